"""Hy4 with images and videos: rotations of adjacent pairs, by the positions of time, height and
width; the norms of latents have the epsilon of the config."""

from transformers.models.hy_v4_vl.modeling_hy_v4_vl import (
    HYV4VLMLP,
    HYV4VLAttention,
    HYV4VLDecoderLayer,
    HYV4VLExperts,
    HYV4VLIndexer,
    HYV4VLRMSNorm,
    HYV4VLTopkRouter,
    apply_rotary_pos_emb,
)

from ..attention import Counting
from ..hy_v4 import GatedAttention
from ..one_op import MLP, Experts, Norm, Rotation, Router
from ..routing import RoutedLayer


class PagedHYV4VLAttention(GatedAttention, HYV4VLAttention):
    one_op = {
        HYV4VLDecoderLayer: RoutedLayer,
        HYV4VLMLP: MLP,
        HYV4VLExperts: Experts,
        HYV4VLRMSNorm: Norm,
        HYV4VLTopkRouter: Router,
    }
    indexer_class = HYV4VLIndexer
    rope = Rotation(apply_rotary_pos_emb)
    index_rope = Rotation(apply_rotary_pos_emb)
    counting = Counting(axes=True)
