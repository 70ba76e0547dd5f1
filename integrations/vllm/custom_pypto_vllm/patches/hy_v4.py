"""Hy4 in vLLM, whose own attention of this model is written for GPUs.

Rotations are vLLM's: pairs of neighbouring dims. transformers rotates halves of the same weights.
"""

from vllm.model_executor.models.utils import WeightsMapper
from vllm.models.hy_v4.nvidia import attention
from vllm.models.hy_v4.nvidia import model as upstream

from ..attention.backend import SparseAttentionBackend
from ..attention.layer import ServedLatentAttention
from ..checks import check_hy_v4
from ..config import sharing
from ..weights.experts import limit_gates
from . import apply


class ServedGatedAttention(ServedLatentAttention, attention.HYV4MLAAttention):
    """Attention with a sink in each head's softmax and a gate of its output."""

    index_rope_last = True

    def __init__(self, vllm_config, *arguments, **keywords):
        check_hy_v4(vllm_config)
        config = vllm_config.model_config.hf_config
        # beside indexer_types, by which it makes layers and loads weights, vLLM heeds no other key
        shares = sharing(config.to_dict())
        layers = range(config.num_hidden_layers)
        config.indexer_types = ["shared" if i in shares else "full" for i in layers]
        super().__init__(vllm_config, *arguments, **keywords)
        self.num_heads = self.num_local_heads
        self.own_index_cache()

    def forward(self, positions, hidden_states, llama_4_scaling=None):
        output = self.attend(positions, hidden_states, llama_4_scaling)
        if self.gated_mla:
            gate = self.linear_gate(hidden_states)[0].sigmoid().unflatten(-1, (self.num_heads, -1))
            output = (output.unflatten(-1, (self.num_heads, -1)) * gate).flatten(-2)
        return self.o_proj(output)[0]


class ServedHYV4Experts(upstream.HYV4MoEFused):
    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        limit_gates(self.experts.routed_experts)


def sparse_backend(**_) -> type[SparseAttentionBackend]:
    return SparseAttentionBackend


# published names of the tensors that transformers 5 saves under its own
PUBLISHED = WeightsMapper(
    orig_to_new_substr={
        ".hc_pre.hc_attn_layer.": ".hc_attn_layer.hc_pre.",
        ".hc_pre.hc_mlp_layer.": ".hc_mlp_layer.hc_pre.",
        "model.hc_pre.hc_head.": "model.hc_head.",
        "mlp.linear_gate.": "mlp.gate_proj.",
        "shared_experts.linear_gate.": "shared_experts.gate_proj.",
    }
)


class HYV4ForCausalLM(upstream.HYV4ForCausalLM):
    """vLLM's class, which also loads checkpoints of transformers."""

    def load_weights(self, weights):
        return super().load_weights(PUBLISHED.apply(weights))


apply("hy_v4")
