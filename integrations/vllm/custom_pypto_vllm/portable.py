"""What vLLM computes for DeepSeek-V4 by kernels in AVX-512 and bfloat16, in plain torch: hyper
connections and routing, on any CPU and in any dtype."""

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.model_executor.layers.mhc import HCHeadOp, MHCPostOp, MHCPreOp


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
        streams = residual.shape[-2]
        before, after, mixture = _mixes(residual, fn, rms_eps).split(
            [streams, streams, streams**2], dim=-1
        )
        of_before, of_after, of_mixture = hc_base.split([streams, streams, streams**2])
        gates = torch.sigmoid(before * hc_scale[0] + of_before) + hc_pre_eps
        after = torch.sigmoid(after * hc_scale[1] + of_after) * hc_post_mult_value
        mixture = (mixture * hc_scale[2] + of_mixture).unflatten(-1, (streams, streams))
        mixture = mixture.softmax(-1) + hc_sinkhorn_eps
        mixture = mixture / (mixture.sum(-2, keepdim=True) + hc_sinkhorn_eps)
        for _ in range(sinkhorn_repeat - 1):
            mixture = mixture / (mixture.sum(-1, keepdim=True) + hc_sinkhorn_eps)
            mixture = mixture / (mixture.sum(-2, keepdim=True) + hc_sinkhorn_eps)
        return after[..., None], mixture, _weighted(gates, residual)


class HyperConnectionPost(MHCPostOp):
    def forward_cpu(self, x, residual, post_layer_mix, comb_res_mix):
        """Streams ``[..., S, hidden]``: their mixture, and the output by its gates."""
        mixed = comb_res_mix.float().transpose(-1, -2) @ residual.float()
        return (mixed + post_layer_mix * x.float()[..., None, :]).to(residual.dtype)


class HyperConnectionHead(HCHeadOp):
    def forward_cpu(self, hidden_states, hc_fn, hc_scale, hc_base, rms_norm_eps, hc_eps):
        """``[..., hidden]`` from streams ``[..., streams, hidden]``, weighted by a gate each."""
        gates = torch.sigmoid(_mixes(hidden_states, hc_fn, rms_norm_eps) * hc_scale + hc_base)
        return _weighted(gates + hc_eps, hidden_states)


def _mixes(streams: Tensor, projection: Tensor, eps: float) -> Tensor:
    flat = streams.flatten(-2).float()
    return F.linear(F.rms_norm(flat, flat.shape[-1:], eps=eps), projection)


def _weighted(gates: Tensor, streams: Tensor) -> Tensor:
    return (gates[..., None] * streams.float()).sum(-2).to(streams.dtype)


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
    scores = F.softplus(router_logits.float()).sqrt()
    if hash_indices_table is None:
        experts = (scores + e_score_correction_bias).topk(top_k, dim=-1).indices
    else:
        experts = hash_indices_table[input_ids].long()
    weights = scores.gather(-1, experts)
    weights = weights / weights.sum(-1, keepdim=True) * routed_scaling_factor
    return weights, experts.int()
