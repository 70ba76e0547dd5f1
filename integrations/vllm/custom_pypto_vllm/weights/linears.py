"""Linear layers over quantized weights that vLLM has no kernel for on this CPU."""

import torch
from torch import Tensor
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear import (
    CPUWNA16LinearKernel,
    Fp8BlockScaledMMLinearKernel,
    MPLinearKernel,
)
from vllm.model_executor.utils import replace_parameter
from vllm.platforms.interface import PlatformEnum
from vllm.scalar_type import scalar_types

import custom_pypto

BITS = {scalar_types.uint4b8: 4, scalar_types.uint8b128: 8}  # symmetric, stored plus 8 or 128
VLLM_HAS_INT4 = hasattr(torch.ops._C, "cpu_gemm_wna16")  # not in the library for AVX2


def unpack(packed: Tensor, scales: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Weight and scales of :func:`custom_pypto.weight_only_linear` from those of the format
    ``pack-quantized``, in the same memory.

    Args:
        packed: int32 ``[.., N, K * bits / 32]``, the first value in the low bits.
        scales: ``[.., N, groups]``; one group for 8 bits.
    """
    stored = packed.view(torch.uint8)
    if bits == 8:
        return stored.bitwise_xor_(0x80).view(torch.int8), scales[..., 0].float()
    scales = scales.bfloat16()
    return stored, torch.stack([scales, torch.zeros_like(scales)], dim=-1)


def rejects(bits: int | None, group_size: int) -> str | None:
    """What is wrong with packed weights of these; ``group_size`` is -1 for a scale per row."""
    if bits == 8 and group_size == -1 or bits == 4 and (group_size == -1 or group_size % 32 == 0):
        return None
    return (
        "packed weights must be symmetric, of 4 bits with a scale per row or per multiple of 32 "
        f"values, or of 8 bits with a scale per row, got groups of {group_size}"
    )


class PackedLinear(MPLinearKernel):
    """Weights of 4 or 8 bits in the format ``pack-quantized`` of compressed-tensors."""

    @classmethod
    def get_min_capability(cls):
        return -1

    @classmethod
    def can_implement(cls, c):
        bits = BITS.get(c.weight_type)
        if VLLM_HAS_INT4 and bits == 4 and c.act_type != torch.float32:
            return False, f"{CPUWNA16LinearKernel.__name__} can"
        if reason := rejects(bits, c.group_size):
            return False, f"custom_pypto_vllm: {reason} of {c.weight_type}"
        return c.partition_weight_shape[0] % 32 == 0, "the input size is no multiple of 32"

    def process_weights_after_loading(self, layer):
        weight, scales, _ = self._get_weight_params(layer)
        if weight.input_dim != 1:
            raise ValueError(
                "custom_pypto_vllm: packed weights must be those of compressed-tensors, got a "
                f"{self.w_q_name} of another layout, which vLLM serves on CPUs with AVX-512"
            )
        for name, value in zip(
            (self.w_q_name, self.w_s_name),
            unpack(weight.data, scales.data, BITS[self.config.weight_type]),
            strict=True,
        ):
            replace_parameter(layer, name, torch.nn.Parameter(value, requires_grad=False))

    def apply_weights(self, layer, x, bias=None):
        weight, scales, _ = self._get_weight_params(layer)
        y = custom_pypto.weight_only_linear(x, weight, scales)
        return y if bias is None else y + bias


class BlockFp8Linear(Fp8BlockScaledMMLinearKernel):
    """Weights in fp8 with a scale per square block; activations stay as they are."""

    apply_input_quant = False

    @classmethod
    def is_supported(cls, compute_capability=None):
        return True, None

    @classmethod
    def can_implement(cls, config):
        if config.input_dtype != torch.float32 and any(
            kernel.is_supported()[0] and kernel.can_implement(config)[0]
            for kernel in linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU]
            if kernel is not cls
        ):
            return False, "vLLM's own kernel, for CPUs with AMX, can"
        block = config.weight_quant_key.scale.group_shape
        return block.row == block.col and block.row % 32 == 0, "the blocks are not square"

    def process_weights_after_loading(self, layer):
        super().process_weights_after_loading(layer)
        params = self._get_layer_params(layer)
        # DeepSeek-V4 stores scales as powers of two, in e8m0
        replace_parameter(layer, params.block_scale_attr, params.block_scale.data.float())

    def apply_block_scaled_mm(self, A, B, As, Bs):
        return custom_pypto.weight_only_linear(A, B, Bs, block_size=self.weight_group_shape.row)


def with_block_fp8(kernels: dict) -> dict:
    """vLLM's kernels for blocks of fp8 by platform; it takes the first that can."""
    kernels[PlatformEnum.CPU].insert(0, BlockFp8Linear)
    return kernels


def with_packed(kernels: dict) -> dict:
    """vLLM's kernels for packed weights by platform."""
    own = kernels[PlatformEnum.CPU]
    own.insert(own.index(CPUWNA16LinearKernel), PackedLinear)
    if not VLLM_HAS_INT4:
        own.remove(CPUWNA16LinearKernel)
    return kernels
