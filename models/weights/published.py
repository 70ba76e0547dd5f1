"""Weights in the published quantized formats: a scale for each block of a weight.

fp8 is e4m3 with blocks of ``weight_block_size``. fp4, of DeepSeek-V4's experts, is e2m1 with blocks
of 32 values of a row, two values per byte, the first in the low four bits (OCP Microscaling
Formats, version 1.0).

transformers 5.23 assumes a block height of ``rows // rows of the grid``. It rejects the 576 rows of
``kv_a_proj_with_mqa`` with 5 rows of scales, and applies wrong scales to 192 rows with 2.
"""

import torch
from torch import Tensor

from custom_pypto.weight_formats import WEIGHT_FORMATS

# safetensors' names for e4m3, and for bytes, which hold two values of e2m1
FP8, FP4 = (WEIGHT_FORMATS[kind].on_disk for kind in ("fp8", "fp4"))
# other dtypes of weights and scales in a checkpoint, by safetensors' names
FLOATS = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E8M0": torch.float8_e8m0fnu,
}
# quant_method of a config.json for weights that the modules keep as they are stored
METHOD = "custom_pypto"
# keys of a config.json about quantization
CONFIG = {"quantization_config", "expert_dtype"}
INTEGERS = {"I32": torch.int32, "I64": torch.int64}


def weight_name(scale: str) -> str:
    """The name of the weight of ``scale``; names of other tensors unchanged."""
    if scale.endswith(".scale"):  # DeepSeek-V4
        return scale.removesuffix("scale") + "weight"
    return scale.removesuffix("_scale_inv")


def scale_names(weight: str) -> list[str]:
    return [f"{weight}_scale_inv", weight.removesuffix("weight") + "scale"]


def scale_name(weight: str, tensors) -> str | None:
    """The name in ``tensors`` of the scales of a weight."""
    return next((name for name in scale_names(weight) if name in tensors), None)


def grid(shape: list[int], block: tuple[int, int]) -> list[int]:
    """The shape of the scales of a weight; the last block of a row or column may be partial."""
    return [-(-size // length) for size, length in zip(shape, block, strict=True)]


def blocks_of(config: dict) -> dict[str, tuple[int, int]]:
    """Rows and columns that share a scale, for each quantized dtype that a ``config.json`` allows.

    Raises:
        ValueError: unsupported quantization.
    """
    quantization = config.get("quantization_config")
    if quantization is None or quantization.get("quant_method") == METHOD:
        return {}
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if method != "fp8" or not block:
        raise ValueError(
            "load: quantization_config of config.json must be fp8 with a weight_block_size (the "
            f"format of DeepSeek and GLM), got {method} with weight_block_size {block}"
        )
    rows, columns = block
    # transformers moves expert_dtype into the quantization_config
    experts = quantization.get("expert_dtype", config.get("expert_dtype"))
    of_experts = {FP4: (1, *WEIGHT_FORMATS["fp4"].groups)} if experts == "fp4" else {}
    return {FP8: (rows, columns)} | of_experts


def has_nan(weight: Tensor) -> bool:
    """Whether a weight in float8_e4m3fn has NaN: the bytes 0x7F and 0xFF.

    torch compares float8 value by value, but bytes in vectors.
    """
    signed, unsigned = (weight.view(dtype).max() for dtype in (torch.int8, torch.uint8))
    return int(signed) == 0x7F or int(unsigned) == 0xFF
