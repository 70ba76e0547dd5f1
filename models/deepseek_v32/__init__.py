"""DeepSeek-V3.2: every layer has an indexer, which rotates half-split pairs (arXiv:2512.02556)."""

from transformers.models.deepseek_v32.modeling_deepseek_v32 import (
    DeepseekV32Attention,
    DeepseekV32Indexer,
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
)

from ..cache.layout import INDEX_POOLS, MLA_POOLS
from ..latent_attention import LatentAttention


class PagedDeepseekV32Attention(LatentAttention, DeepseekV32Attention):
    pools = MLA_POOLS | INDEX_POOLS
    int8 = True
    indexer_class = DeepseekV32Indexer
    rope = staticmethod(apply_rotary_pos_emb_interleave)
    # DeepSeek's first release rotated interleaved pairs here, as MLA does; that was a bug
    index_rope = staticmethod(apply_rotary_pos_emb)
