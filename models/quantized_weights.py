"""Weights in the published quantized formats: a scale for each block of a weight.

fp8 is e4m3 with blocks of ``weight_block_size``. fp4, of DeepSeek-V4's experts, is e2m1 with blocks
of 32 values of a row, two values per byte, the first in the low four bits (OCP Microscaling
Formats, version 1.0).

transformers 5.23 assumes a block height of ``rows // rows of the grid``. It rejects the 576 rows of
``kv_a_proj_with_mqa`` with 5 rows of scales, and applies wrong scales to 192 rows with 2.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

# safetensors' names for e4m3, and for bytes, which hold two values of e2m1
FP8, FP4 = "F8_E4M3", "I8"
FP4_BLOCK = (1, 32)
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
ROWS_AT_ONCE = 32  # whose float32 values stay in the CPU cache
_BYTES = torch.arange(256, dtype=torch.uint8, device="cpu")
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float32, device="cpu")
_FOUR_BITS = torch.cat([_E2M1, -_E2M1])
# by the dtype on disk, what a byte holds in float32: a value, or two as one number of 64 bits
_VALUES = {
    torch.float8_e4m3fn: _BYTES.view(torch.float8_e4m3fn).float(),
    torch.int8: torch.stack([_FOUR_BITS[_BYTES.int() & 15], _FOUR_BITS[_BYTES.int() >> 4]], 1)
    .view(torch.int64)
    .squeeze(1),
}


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
    return {FP8: (rows, columns)} | ({FP4: FP4_BLOCK} if experts == "fp4" else {})


def has_nan(weight: Tensor) -> bool:
    """Whether a weight in float8_e4m3fn has NaN: all bits but the sign are set.

    torch compares float8 value by value, but bytes in vectors.
    """
    parts = weight.view(torch.int8).flatten().split(2**20)  # each stays in the CPU cache
    return any(int((part & 0x7F).max()) == 0x7F for part in parts)


def row_blocks(matrix: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows, and which rows these are."""
    for first in range(0, len(matrix), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        yield rows, matrix[rows]


def dequantized(
    weight: Tensor, scales: Tensor, block: tuple[int, int]
) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows of ``weight * scale of its block`` in float32, and which rows these are.

    The next block overwrites the memory of the last: new memory costs as much as the product.

    Args:
        weight: ``[rows, columns]`` float8_e4m3fn, or ``[rows, columns / 2]`` int8 of fp4.
        scales: of the shape :func:`grid` of ``[rows, columns]`` and any dtype of :data:`FLOATS`.
        block: rows and columns that share a scale.
    """
    height, width = block
    table, scales = _VALUES[weight.dtype], scales.float()
    shape = ROWS_AT_ONCE, weight.size(1)
    indices = torch.empty(shape, dtype=torch.int32, device="cpu")
    found = torch.empty(shape, dtype=table.dtype, device="cpu")
    step = ROWS_AT_ONCE if height == 1 else height
    for start in range(0, len(weight), step):
        factors = scales[start // height : -(-(start + step) // height)]
        factors = factors.repeat_interleave(width, 1)
        for rows, part in row_blocks(weight[start : start + step].view(torch.uint8)):
            index, values = indices[: len(part)].copy_(part), found[: len(part)]
            # torch converts float8 value by value, which takes four times as long
            torch.index_select(table, 0, index.view(-1), out=values.view(-1))
            product = values.view(torch.float32)
            product *= factors[:, : product.size(1)]
            yield slice(start + rows.start, start + rows.stop), product
