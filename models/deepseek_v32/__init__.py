"""DeepSeek-V3.2: every layer has an indexer, which rotates half-split pairs (arXiv:2512.02556)."""

from transformers.models.deepseek_v32.modeling_deepseek_v32 import (
    DeepseekV32Attention,
    DeepseekV32DecoderLayer,
    DeepseekV32Experts,
    DeepseekV32Indexer,
    DeepseekV32MLP,
    DeepseekV32RMSNorm,
    DeepseekV32TopkRouter,
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
)

from ..cache.layout import INDEX_POOLS, MLA_POOLS
from ..latent_attention import LatentAttention
from ..one_op import MLP, Experts, Norm, Rotation, Router
from ..routing import RoutedLayer


class PagedDeepseekV32Attention(LatentAttention, DeepseekV32Attention):
    one_op = {
        DeepseekV32DecoderLayer: RoutedLayer,
        DeepseekV32MLP: MLP,
        DeepseekV32Experts: Experts,
        DeepseekV32RMSNorm: Norm,
        DeepseekV32TopkRouter: Router,
    }
    pools = MLA_POOLS | INDEX_POOLS
    int8 = True
    indexer_class = DeepseekV32Indexer
    rope = Rotation(apply_rotary_pos_emb_interleave, interleaved=True)
    # DeepSeek's first release rotated interleaved pairs here, as MLA does; that was a bug
    index_rope = Rotation(apply_rotary_pos_emb, interleaved=False)
