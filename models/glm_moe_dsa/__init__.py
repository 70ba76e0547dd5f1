"""GLM-5: the indexer rotates interleaved pairs, and layers of type "shared" use the indices of the
layer before (arXiv:2603.12201)."""

from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
    GlmMoeDsaAttention,
    GlmMoeDsaDecoderLayer,
    GlmMoeDsaExperts,
    GlmMoeDsaIndexer,
    GlmMoeDsaMLP,
    GlmMoeDsaRMSNorm,
    GlmMoeDsaTopkRouter,
    apply_rotary_pos_emb_interleave,
)

from ..cache.layout import MLA_POOLS, Pool
from ..latent_attention import LatentAttention
from ..one_op import MLP, Experts, Norm, Rotation, Router
from ..routing import RoutedLayer


class PagedGlmMoeDsaAttention(LatentAttention, GlmMoeDsaAttention):
    one_op = {
        GlmMoeDsaDecoderLayer: RoutedLayer,
        GlmMoeDsaMLP: MLP,
        GlmMoeDsaExperts: Experts,
        GlmMoeDsaRMSNorm: Norm,
        GlmMoeDsaTopkRouter: Router,
    }
    pools = MLA_POOLS | {"index": Pool("index_head_dim", where={"indexer_types": "full"})}
    int8 = True
    indexer_class = GlmMoeDsaIndexer
    rope = Rotation(apply_rotary_pos_emb_interleave, interleaved=True)
    index_rope = Rotation(apply_rotary_pos_emb_interleave, interleaved=True)
    returns_indices = True
