"""Hy4 with images and videos: rotations of adjacent pairs, by the positions of time, height and
width; the norms of latents have the epsilon of the config."""

from transformers.models.hy_v4_vl.modeling_hy_v4_vl import (
    HYV4VLAttention,
    HYV4VLIndexer,
    apply_rotary_pos_emb,
)

from ..hy_v4 import GatedAttention
from ..one_op import Rotation


class PagedHYV4VLAttention(GatedAttention, HYV4VLAttention):
    indexer_class = HYV4VLIndexer
    rope = Rotation(apply_rotary_pos_emb)
    index_rope = Rotation(apply_rotary_pos_emb)
    rotates_by_axes = True
