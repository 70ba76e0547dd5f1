"""Routed experts that vLLM has no kernel for on this CPU: over quantized weights, and over
unquantized ones whose gates are limited.

E experts of this rank, T tokens, k experts of a token.
"""

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import (
    FusedMoEMethodBase,
    FusedMoeWeightScaleSupported,
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.utils import set_weight_attrs

import custom_pypto
from custom_pypto import layer_ops

from .linears import unpack


class WeightOnlyExperts(FusedMoEMethodBase):
    """Experts gated by SiLU, their weights as they are stored, their activations unquantized.

    Lines of the first paragraph of a subclass are rows of docs/serving.md.
    """

    scale: FusedMoeWeightScaleSupported  # what a scale is of: how vLLM's loader shares them out
    unit: int  # divides both sizes of an expert
    product = staticmethod(custom_pypto.weight_only_linear)

    def parameters(self, rows: int, columns: int) -> dict[str, tuple[list[int], torch.dtype]]:
        """Shape and dtype of what a checkpoint stores of one ``[rows, columns]``, by its name."""
        raise NotImplementedError

    def stored(self, **loaded: Tensor) -> tuple[Tensor, Tensor]:
        """Weight and scales of :func:`custom_pypto.weight_only_linear` from :meth:`parameters`."""
        raise NotImplementedError

    # churn: the names w13 and w2, which vLLM's loader makes of gate, up and down
    def create_weights(
        self,
        layer,
        num_experts,
        hidden_size,
        intermediate_size_per_partition,
        params_dtype,
        **attributes,
    ):
        size = intermediate_size_per_partition
        if hidden_size % self.unit or size % self.unit:
            raise ValueError(
                f"custom_pypto_vllm: hidden and intermediate size of the experts of a rank must be "
                f"multiples of {self.unit}, got {hidden_size} and {size}; with a smaller "
                "--tensor-parallel-size, or --enable-expert-parallel, a rank has more of each"
            )
        attributes |= {"quant_method": self.scale.value}
        for name, matrix in {"w13": (2 * size, hidden_size), "w2": (hidden_size, size)}.items():
            for suffix, (shape, dtype) in self.parameters(*matrix).items():
                empty = torch.empty(num_experts, *shape, dtype=dtype)
                parameter = torch.nn.Parameter(empty, requires_grad=False)
                set_weight_attrs(parameter, attributes)
                layer.register_parameter(f"{name}_{suffix}", parameter)

    def process_weights_after_loading(self, layer):
        for name in ("w13_", "w2_"):
            own = [key for key in layer._parameters if key.startswith(name)]
            loaded = {key.removeprefix(name): layer._parameters.pop(key).data for key in own}
            for suffix, value in zip(("weight", "scales"), self.stored(**loaded), strict=True):
                parameter = torch.nn.Parameter(value, requires_grad=False)
                layer.register_parameter(name + suffix, parameter)

    def get_fused_moe_quant_config(self, layer):
        return None  # of vLLM's own kernels

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        if layer.expert_map is not None:
            topk_ids = layer.expert_map[topk_ids]  # -1 for another rank's: adds nothing

        def gate(both: Tensor) -> Tensor:
            gates, up = both.chunk(2, dim=-1)
            if (limit := layer.swiglu_limit) is not None:
                gates, up = gates.clamp(max=limit), up.clamp(-limit, limit)
            return torch.nn.functional.silu(gates) * up

        up, down = (layer.w13_weight, layer.w13_scales), (layer.w2_weight, layer.w2_scales)
        return layer_ops.experts(x, up, down, topk_ids, topk_weights, gate, self.product)


class PlainExperts(WeightOnlyExperts):
    """unquantized, where `swiglu_limit` limits gates (DeepSeek-V4, Hy4)."""

    def process_weights_after_loading(self, layer):
        layer.w13_scales = layer.w2_scales = None

    @staticmethod
    def product(x, weight, scales, *, experts):
        if weight.dtype == torch.bfloat16:
            return custom_pypto.weight_only_linear(x, weight, experts=experts)
        if x.dim() == 2:
            x = x[:, None].expand(*experts.shape, -1)
        output = x.new_zeros(*experts.shape, weight.shape[1])
        for expert in experts[experts >= 0].unique().tolist():
            chosen = experts == expert
            output[chosen] = x[chosen] @ weight[expert].T
        return output


class Int8Experts(WeightOnlyExperts):
    """compressed-tensors W8A8: int8, a scale per row."""

    scale = FusedMoeWeightScaleSupported.CHANNEL
    unit = 32

    def parameters(self, rows, columns):
        return {
            "weight": ([rows, columns], torch.int8),
            "weight_scale": ([rows, 1], torch.float32),
        }

    def stored(self, weight, weight_scale):
        return weight, weight_scale[..., 0]


class PackedExperts(WeightOnlyExperts):
    """compressed-tensors W8A16: packed, symmetric, a scale per row
    compressed-tensors W4A16: packed, symmetric, a scale per row or per 32·n values

    Their format is ``pack-quantized``.
    """

    def __init__(self, moe, bits: int, group_size: int):
        super().__init__(moe)
        self.bits, self.group_size = bits, group_size
        kinds = FusedMoeWeightScaleSupported
        self.scale = kinds.CHANNEL if group_size == -1 else kinds.GROUP
        self.unit = max(group_size, 32)

    def parameters(self, rows, columns):
        groups = 1 if self.group_size == -1 else columns // self.group_size
        scale_dtype = torch.bfloat16 if self.bits == 4 else torch.float32
        return {
            "weight_packed": ([rows, columns * self.bits // 32], torch.int32),
            "weight_scale": ([rows, groups], scale_dtype),
            "weight_shape": ([2], torch.int64),
        }

    def stored(self, weight_packed, weight_scale, weight_shape):
        return unpack(weight_packed, weight_scale, self.bits)


class BlockFp8Experts(WeightOnlyExperts):
    """fp8 in blocks of 128 x 128, as DeepSeek publishes it."""

    scale = FusedMoeWeightScaleSupported.BLOCK
    unit = 128

    def parameters(self, rows, columns):
        return {
            "weight": ([rows, columns], torch.float8_e4m3fn),
            "weight_scale_inv": ([rows // 128, columns // 128], torch.float32),
        }

    def stored(self, weight, weight_scale_inv):
        return weight, weight_scale_inv


class Fp4Experts(WeightOnlyExperts):
    """fp4 with a scale for 32 values, as DeepSeek-V4 is published.

    e2m1 with scales in e8m0.
    """

    scale = FusedMoeWeightScaleSupported.GROUP
    unit = 32

    def parameters(self, rows, columns):
        return {
            "weight": ([rows, columns // 2], torch.uint8),
            "weight_scale": ([rows, columns // 32], torch.uint8),
        }

    def stored(self, weight, weight_scale):
        return weight, weight_scale.view(torch.float8_e8m0fnu)


def limit_gates(layer) -> None:
    """Makes unquantized experts of a layer honour ``swiglu_limit``, which vLLM's kernel ignores."""
    if layer.swiglu_limit is None or not isinstance(layer.quant_method, UnquantizedFusedMoEMethod):
        return
    del layer.quant_method  # a module, which only another module may replace
    layer._replace_quant_method(PlainExperts(layer.moe_config))  # churn: RoutedExperts


def are_plain(layer) -> bool:
    """Whether :class:`WeightOnlyExperts` computes what ``layer`` asks for besides its weights."""
    return (
        layer.activation == MoEActivation.SILU
        and not layer.moe_config.has_bias
        and not layer.apply_router_weight_on_input
    )
