"""Mistral Large 4: GLM-5 without compressed queries; every fourth layer has no RoPE, queries grow
with the logarithm of their position, and layers may attend to the latents of an earlier one."""

from torch import Tensor
from transformers.models.mistral_large4.modeling_mistral_large4 import (
    MistralLarge4RMSNorm,
    MistralLarge4TextAttention,
    MistralLarge4TextDecoderLayer,
    MistralLarge4TextExperts,
    MistralLarge4TextIndexer,
    MistralLarge4TextMLP,
    apply_rotary_pos_emb_interleave,
)

from ..cache import Tokens
from ..cache.layout import OWN_NUMBER, Pool
from ..latent_attention import LatentAttention
from ..one_op import MLP, Experts, Norm, Rotation
from ..routing import SoftmaxLayer

OWN_LATENTS = {"kv_source_layers": OWN_NUMBER}


class PagedMistralLarge4Attention(LatentAttention, MistralLarge4TextAttention):
    one_op = {
        MistralLarge4TextDecoderLayer: SoftmaxLayer,
        MistralLarge4TextMLP: MLP,
        MistralLarge4TextExperts: Experts,
        MistralLarge4RMSNorm: Norm,
    }
    pools = {
        "latent": Pool("kv_lora_rank", where=OWN_LATENTS),
        "rope": Pool("qk_rope_head_dim", where=OWN_LATENTS | {"no_rope_layers": 1}),
        "index": Pool("index_head_dim", where={"indexer_types": "full"}),
    }
    indexer_class = MistralLarge4TextIndexer
    rope = Rotation(apply_rotary_pos_emb_interleave, interleaved=True)
    index_rope = Rotation(apply_rotary_pos_emb_interleave, interleaved=True)
    returns_indices = True
    first_norm = "kv_b_proj"  # the norm is missing in layers without latents of their own

    @property
    def shares_latents(self) -> bool:
        return self.store_full_length_kv

    def write_latents(self, *args) -> None:
        if not self.is_kv_shared_layer:
            super().write_latents(*args)

    @property
    def source(self) -> int | None:
        return self.config.kv_source_layers[self.layer_idx] if self.is_kv_shared_layer else None

    def compress_query(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def project_query(
        self, hidden_states: Tensor, q_latent: Tensor, tokens: Tokens
    ) -> tuple[Tensor, None]:
        query = self.q_proj(q_latent).unflatten(-1, (-1, self.qk_head_dim))
        return self.softmax_scaling(query, tokens.position_ids, head_dim_first=False), None

    def index_query(self, q_latent: Tensor, tokens: Tokens) -> Tensor:
        indexer = self.indexer
        query = indexer.wq_b(indexer.q_input_norm(q_latent))
        query = query.unflatten(-1, (indexer.n_heads, indexer.head_dim))
        return indexer.softmax_scaling(query, tokens.position_ids, head_dim_first=False)

    def rotate_index(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return super().rotate_index(x, cos, sin) if self.use_rope else x
