"""Hy4 with images and videos: rotations of adjacent pairs, by the positions of time, height and
width; the norms of latents have the epsilon of the config."""

from transformers.models.hy_v4_vl.modeling_hy_v4_vl import (
    HYV4VLMLP,
    HYV4VLAttention,
    HYV4VLExperts,
    HYV4VLIndexer,
    HYV4VLRMSNorm,
    HYV4VLTopkRouter,
    apply_rotary_pos_emb,
)

from ..hy_v4 import GatedAttention
from ..one_op import MLP, Experts, Norm, Rotation, Router


class OneOpHYV4VLMLP(MLP, HYV4VLMLP):
    pass


class OneOpHYV4VLExperts(Experts, HYV4VLExperts):
    pass


class OneOpHYV4VLRMSNorm(Norm, HYV4VLRMSNorm):
    pass


class OneOpHYV4VLTopkRouter(Router, HYV4VLTopkRouter):
    pass


class PagedHYV4VLAttention(GatedAttention, HYV4VLAttention):
    one_op = (OneOpHYV4VLMLP, OneOpHYV4VLExperts, OneOpHYV4VLRMSNorm, OneOpHYV4VLTopkRouter)
    indexer_class = HYV4VLIndexer
    rope = Rotation(apply_rotary_pos_emb)
    index_rope = Rotation(apply_rotary_pos_emb)
    rotates_by_axes = True
