"""DeepSeek-V4 in vLLM on any CPU.

vLLM's own model for CPUs attends, routes and connects layers by kernels in AMX and AVX-512, and
does not limit the gates of unquantized experts. Loading, weights and the rest stay vLLM's.
"""

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.router import cpu_router
from vllm.model_executor.models.utils import WeightsMapper
from vllm.models.deepseek_v4.cpu import model as upstream
from vllm.utils.torch_utils import direct_register_custom_op

from . import portable
from .checks import check_v4
from .compressed_attention import ServedCompressedAttention
from .experts import limit_gates


class ServedDeepseekV4Experts(upstream.DeepseekV4MoE):
    """vLLM's layer, whose gates and values are limited, as one op to the compiler."""

    def __init__(self, vllm_config, prefix=""):
        super().__init__(vllm_config, prefix)
        limit_gates(self.experts.routed_experts)
        vllm_config.compilation_config.static_forward_context[prefix] = self

    def forward(self, hidden_states, input_ids=None):
        return torch.ops.vllm.custom_pypto_experts(hidden_states, input_ids, self.prefix)


def _experts(hidden: Tensor, input_ids: Tensor | None, layer_name: str) -> Tensor:
    layer = get_forward_context().no_compile_layers[layer_name]
    return super(ServedDeepseekV4Experts, layer).forward(hidden, input_ids)


def _experts_meta(hidden: Tensor, input_ids: Tensor | None, layer_name: str) -> Tensor:
    return torch.empty_like(hidden)


# An op, because Inductor fuses the choice of experts with what precedes the router, whose logits
# vLLM's op writes into an argument: experts would be chosen by memory that is not yet written.
direct_register_custom_op("custom_pypto_experts", _experts, [], _experts_meta)

# churn: names of vllm/models/deepseek_v4/cpu/model.py and of its router, resolved when layers are
# made and called
upstream.DeepseekV4CPUAttention = ServedCompressedAttention
upstream.DeepseekV4MoE = ServedDeepseekV4Experts
upstream.MHCPreOp = portable.HyperConnectionPre
upstream.MHCPostOp = portable.HyperConnectionPost
upstream.HCHeadOp = portable.HyperConnectionHead
cpu_router._sqrtsoftplus_bias_topk = portable.route


# published names of the tensors that transformers 5 saves under its own
PUBLISHED = WeightsMapper(
    orig_to_new_substr={
        "model.": "",
        "embed_tokens.": "embed.",
        "hc_head.hc_": "hc_head_",
        ".attn.norm.": ".attn.kv_norm.",
    }
)


class DeepseekV4ForCausalLM(upstream.DeepseekV4ForCausalLM):
    """vLLM's class, which also loads checkpoints of transformers."""

    def __init__(self, *, vllm_config, prefix=""):
        check_v4(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    def load_weights(self, weights):
        return super().load_weights(PUBLISHED.apply(weights))
