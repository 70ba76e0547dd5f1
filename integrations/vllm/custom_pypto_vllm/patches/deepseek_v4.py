"""DeepSeek-V4 in vLLM on any CPU and in any dtype.

vLLM's own model for CPUs attends, routes and connects layers by kernels in AMX and AVX-512, and
does not limit the gates of unquantized experts. Loading, weights and the rest stay vLLM's.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mhc import HCHeadOp, MHCPostOp, MHCPreOp
from vllm.model_executor.models.utils import WeightsMapper
from vllm.models.deepseek_v4.cpu import model as upstream
from vllm.utils.torch_utils import direct_register_custom_op

from custom_pypto import layer_ops

from ..checks import check_v4
from ..weights.experts import limit_gates
from . import apply


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


class HyperConnectionPre(MHCPreOp):
    """The input of a block from the streams of its residual, and how its output joins them
    (DeepSeek-V4, technical report, section 2.2)."""

    def forward_cpu(
        self,
        residual,
        fn,
        hc_scale,
        hc_base,
        rms_eps,
        hc_pre_eps,
        hc_sinkhorn_eps,
        hc_post_mult_value,
        sinkhorn_repeat,
        n_splits=1,
        norm_weight=None,
        norm_eps=0.0,
    ):
        """Of streams ``[..., S, hidden]``: gates ``[..., S, 1]`` of the output, a doubly stochastic
        mixture ``[..., S, S]`` of the streams, and the input ``[..., hidden]``."""
        if norm_weight is not None:
            raise ValueError("custom_pypto_vllm: norm_weight must be None, got a tensor")
        if hc_post_mult_value != 2:
            raise ValueError(
                f"custom_pypto_vllm: hc_post_mult_value must be 2, got {hc_post_mult_value}"
            )
        if hc_sinkhorn_eps != hc_pre_eps:
            raise ValueError(
                f"custom_pypto_vllm: hc_sinkhorn_eps must be {hc_pre_eps} (hc_pre_eps), got "
                f"{hc_sinkhorn_eps}"
            )
        *tokens, streams, width = residual.shape
        after, mixture, hidden = layer_ops.hyper_connection(
            residual.reshape(1, -1, streams, width),
            fn,
            hc_base,
            hc_scale,
            sinkhorn_repeat,
            hc_pre_eps,
            rms_eps,
        )
        after, mixture = after.view(*tokens, streams, 1), mixture.view(*tokens, streams, streams)
        return after, mixture, hidden.view(*tokens, width)


class HyperConnectionPost(MHCPostOp):
    def forward_cpu(self, x, residual, post_layer_mix, comb_res_mix):
        """Streams ``[..., S, hidden]``: their mixture, and the output by its gates."""
        streams, width = residual.shape[-2:]
        mixed = layer_ops.mix_streams(
            residual.reshape(1, -1, streams, width),
            x.reshape(1, -1, width),
            post_layer_mix.reshape(1, -1, streams),
            comb_res_mix.reshape(1, -1, streams, streams),
        )
        return mixed.view(residual.shape)


class HyperConnectionHead(HCHeadOp):
    def forward_cpu(self, hidden_states, hc_fn, hc_scale, hc_base, rms_norm_eps, hc_eps):
        """``[..., hidden]`` from streams ``[..., streams, hidden]``, weighted by a gate each."""
        *tokens, streams, width = hidden_states.shape
        hidden = layer_ops.collapse_streams(
            hidden_states.reshape(1, -1, streams, width),
            hc_fn,
            hc_base,
            hc_scale.view(1),
            hc_eps,
            rms_norm_eps,
        )
        return hidden.view(*tokens, width)


def route(
    router_logits: Tensor,
    top_k: int,
    renormalize: bool,
    e_score_correction_bias: Tensor | None,
    routed_scaling_factor: float,
    input_ids: Tensor | None,
    hash_indices_table: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Weights ``[tokens, top_k]`` float32 and experts int32: by sqrt(softplus(logit)) and a bias
    that counts in the choice alone, or, in the first layers, by a table of the tokens' ids."""
    if not renormalize:
        raise ValueError("custom_pypto_vllm: norm_topk_prob must be true, got false")
    logits = router_logits.float()
    if hash_indices_table is None:
        bias = e_score_correction_bias.float()
        weights, experts = layer_ops.route_roots(logits, bias, top_k, routed_scaling_factor)
        return weights, experts.int()
    scores = F.softplus(logits).sqrt()
    experts = hash_indices_table[input_ids].long()
    weights = scores.gather(-1, experts)
    weights = weights / weights.sum(-1, keepdim=True) * routed_scaling_factor
    return weights, experts.int()


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


apply("deepseek_v4")
