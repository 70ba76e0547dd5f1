"""Hy4: GLM-5 with half-split rotations, of the last dims in its indexer; each head has a sink
in its softmax (the parameter ``sinks``) and a gate of its output from the hidden states."""

from torch import Tensor
from transformers.models.hy_v4.modeling_hy_v4 import (
    HYV4MLP,
    HYV4Attention,
    HYV4DecoderLayer,
    HYV4Experts,
    HYV4Indexer,
    HYV4RMSNorm,
    HYV4TopkRouter,
    apply_rotary_pos_emb,
)

from ..attention import Mtp
from ..cache import Tokens
from ..cache.layout import MLA_POOLS, Pool
from ..latent_attention import LatentAttention
from ..one_op import MLP, Experts, Norm, Rotation, Router
from ..routing import RoutedLayer


class GatedAttention(LatentAttention):
    pools = MLA_POOLS | {"index": Pool("index_head_dim", where={"indexer_types": "full"})}
    index_rope_last = True
    returns_indices = True

    def project_query(
        self, hidden_states: Tensor, q_latent: Tensor, tokens: Tokens
    ) -> tuple[Tensor, Tensor]:
        query, _ = super().project_query(hidden_states, q_latent, tokens)
        return query, self.gate_proj(hidden_states).unflatten(-1, (-1, self.v_head_dim))

    def project_output(self, output: Tensor, gate: Tensor) -> Tensor:
        return super().project_output(output * gate.sigmoid(), None)


class PagedHYV4Attention(GatedAttention, HYV4Attention):
    one_op = {
        HYV4DecoderLayer: RoutedLayer,
        HYV4MLP: MLP,
        HYV4Experts: Experts,
        HYV4RMSNorm: Norm,
        HYV4TopkRouter: Router,
    }
    indexer_class = HYV4Indexer
    mtp = Mtp(
        plain=True,
        names={
            r"\.mtp_layers\.0\.final_layernorm\.": ".layers.{}.shared_head.norm.",
            r"\.mtp_layers\.0\.": ".layers.{}.",
        },
    )
    rope = Rotation(apply_rotary_pos_emb, interleaved=False)
    index_rope = Rotation(apply_rotary_pos_emb, interleaved=False)
