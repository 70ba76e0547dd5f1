"""A.X-K2: DeepSeek-V3.2 with a gate of each head's output, projected together with the query."""

import torch
from torch import Tensor
from transformers.models.axk2.modeling_axk2 import (
    AXK2MLP,
    AXK2Attention,
    AXK2DecoderLayer,
    AXK2Experts,
    AXK2Indexer,
    AXK2RMSNorm,
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
)

from ..cache import Tokens
from ..cache.layout import INDEX_POOLS, MLA_POOLS
from ..latent_attention import LatentAttention
from ..one_op import MLP, Experts, Norm, Rotation
from ..routing import RoutedLayer


class PagedAXK2Attention(LatentAttention, AXK2Attention):
    one_op = {
        AXK2DecoderLayer: RoutedLayer,
        AXK2MLP: MLP,
        AXK2Experts: Experts,
        AXK2RMSNorm: Norm,
    }
    pools = MLA_POOLS | INDEX_POOLS
    int8 = True
    indexer_class = AXK2Indexer
    rope = Rotation(apply_rotary_pos_emb_interleave, interleaved=True)
    index_rope = Rotation(apply_rotary_pos_emb, interleaved=False)

    def compress_query(self, hidden_states: Tensor) -> Tensor:
        latent = self.q_a_proj(hidden_states)
        return torch.cat([self.q_a_layernorm(latent), latent], -1)

    def project_query(
        self, hidden_states: Tensor, q_latent: Tensor, tokens: Tokens
    ) -> tuple[Tensor, Tensor]:
        heads = self.q_gate_proj(q_latent).unflatten(-1, (-1, self.qk_head_dim + self.v_head_dim))
        return heads.split([self.qk_head_dim, self.v_head_dim], -1)

    def project_output(self, output: Tensor, gate: Tensor) -> Tensor:
        gated = (output * gate.float().sigmoid()).to(output.dtype)
        return super().project_output(gated, None)
