"""GLM-5: the indexer rotates interleaved pairs, and layers of type "shared" use the indices of the
layer before (arXiv:2603.12201)."""

from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
    GlmMoeDsaAttention,
    GlmMoeDsaIndexer,
    apply_rotary_pos_emb_interleave,
)

from ..cache.layout import MLA_POOLS, Pool
from ..latent_attention import LatentAttention


class PagedGlmMoeDsaAttention(LatentAttention, GlmMoeDsaAttention):
    pools = MLA_POOLS | {"index": Pool("index_head_dim", where=("indexer_types", "full"))}
    int8 = True
    indexer_class = GlmMoeDsaIndexer
    rope = staticmethod(apply_rotary_pos_emb_interleave)
    index_rope = staticmethod(apply_rotary_pos_emb_interleave)
    returns_indices = True
