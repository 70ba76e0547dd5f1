"""Quantized checkpoints: vLLM's own reading of them, and the op where vLLM has no kernel."""

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization import (
    QuantizationConfig,
    register_quantization_config,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.models.deepseek_v4.quant_config import DeepseekV4FP8Config

from .experts import (
    BlockFp8Experts,
    Fp4Experts,
    Int8Experts,
    PackedExperts,
    WeightOnlyExperts,
    are_plain,
)
from .linears import rejects


class OwnExperts:
    """Mixed into a config of vLLM: experts of this package where vLLM has no kernel for them."""

    def get_quant_method(self, layer, prefix):
        if not isinstance(layer, RoutedExperts):
            return super().get_quant_method(layer, prefix)
        try:  # churn: without a kernel, the method's constructor raises, or sets None
            method = super().get_quant_method(layer, prefix)
            method = method if getattr(method, "experts_cls", method) is not None else None
        except NotImplementedError:
            method = None
        # churn: vLLM chooses its kernels for CPUs with AMX, which take no float32, for float32 too
        in_float32 = layer.moe_config.in_dtype == torch.float32
        if method is not None and not in_float32 or isinstance(method, UnquantizedFusedMoEMethod):
            return method
        got, experts = self.own_experts(layer, prefix)
        if experts is None or not are_plain(layer):
            if method is not None:
                return method
            raise ValueError(
                "custom_pypto_vllm: on a CPU for which vLLM has no kernel of its own, experts must "
                "be gated by SiLU without bias, and be int8 with a scale per row, int4 with a "
                "scale per row or multiple of 32 values (both symmetric), fp8 in blocks of "
                f"128 x 128, or DeepSeek-V4's fp4; got {layer.activation.value} and {got}; "
                "quantize them so, or leave them unquantized"
            )
        return experts


class CompressedTensors(OwnExperts, CompressedTensorsConfig):
    def own_experts(self, layer, prefix) -> tuple[str, WeightOnlyExperts | None]:
        scheme = self.get_scheme_dict(layer, f"{prefix}.0.{layer.ckpt_gate_proj_name}")
        weights, activations = scheme["weights"], scheme.get("input_activations")
        experts = None
        if self._is_wNa16_group_channel(weights, activations):
            group_size = weights.group_size or -1
            plain = weights.symmetric and weights.actorder != "group"
            if plain and rejects(weights.num_bits, group_size) is None:
                experts = PackedExperts(layer.moe_config, weights.num_bits, group_size)
        elif self._is_dynamic_token_w8a8(weights, activations):
            experts = Int8Experts(layer.moe_config)
        return f"weights {weights} and activations {activations}", experts


class Fp8(OwnExperts, Fp8Config):
    @classmethod
    def get_supported_act_dtypes(cls):
        return [*super().get_supported_act_dtypes(), torch.float32]

    def own_experts(self, layer, prefix) -> tuple[str, WeightOnlyExperts | None]:
        block = self.weight_block_size
        experts = BlockFp8Experts(layer.moe_config) if block == [128, 128] else None
        return f"fp8 in blocks of {block}", experts


class V4Fp8(Fp8, DeepseekV4FP8Config):
    """Linear layers in fp8, experts in fp4 or fp8 by ``expert_dtype`` of config.json."""

    def own_experts(self, layer, prefix):
        if self.expert_dtype == "fp4":
            return "fp4", Fp4Experts(layer.moe_config)
        return super().own_experts(layer, prefix)


class OfTransformers(QuantizationConfig):
    """What ``models.load`` keeps in a stored format and ``save_pretrained`` then writes."""

    @classmethod
    def from_config(cls, config):
        raise ValueError(
            "custom_pypto_vllm: a checkpoint for vLLM must be in the published format or in that "
            "of compressed-tensors, got one for custom_pypto.models; serve the original one, or "
            "convert that by examples/convert_checkpoint.py SOURCE TARGET --weights int4 --format "
            "compressed-tensors"
        )


def register() -> None:
    register_quantization_config("custom_pypto")(OfTransformers)
    register_quantization_config("compressed-tensors")(CompressedTensors)
    register_quantization_config("fp8")(Fp8)
    register_quantization_config("deepseek_v4_fp8")(V4Fp8)
