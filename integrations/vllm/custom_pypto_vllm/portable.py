"""What vLLM computes for DeepSeek-V4 by kernels in AVX-512 and bfloat16, by layer ops: hyper
connections and routing, on any CPU and in any dtype."""

import torch.nn.functional as F
from torch import Tensor
from vllm.model_executor.layers.mhc import HCHeadOp, MHCPostOp, MHCPreOp

from custom_pypto import layer_ops


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
