"""Weights in the published fp8 format: e4m3, with one scale per block of each weight.

transformers 5.23 assumes a block height of ``rows // rows of the grid``. It rejects the 576 rows of
``kv_a_proj_with_mqa`` with 5 rows of scales, and applies wrong scales to 192 rows with 2.
"""

import torch

STORED = "F8_E4M3"  # safetensors' name for e4m3
# other dtypes of weights and scales in a checkpoint, by safetensors' names
DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E8M0": torch.float8_e8m0fnu,
}


def scale_name(weight: str) -> str:
    return f"{weight}_scale_inv"


def grid(shape: list[int], block: tuple[int, int]) -> list[int]:
    """The shape of the scales of a weight; the last block of a row or column may be partial."""
    return [-(-size // length) for size, length in zip(shape, block, strict=True)]


def block_of(config: dict) -> tuple[int, int] | None:
    """Rows and columns that share a scale, from a ``config.json``; None: not fp8.

    Raises:
        ValueError: unsupported quantisation.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if method != "fp8" or not block:
        raise ValueError(
            "load: quantization_config of config.json must be fp8 with a weight_block_size (the "
            f"format of DeepSeek and GLM), got {method} with weight_block_size {block}"
        )
    rows, columns = block
    return rows, columns


def dequantise(weight, scale_inv, block: tuple[int, int], out) -> None:
    """``out = weight * scale_inv of its block``, in float32, rounded once to the dtype of ``out``.

    Args:
        weight: ``[rows, columns]`` float8_e4m3fn.
        scale_inv: of the shape :func:`grid` of ``weight`` and any dtype of :data:`DTYPES`.
        block: rows and columns that share a scale.
        out: ``[rows, columns]``, written to.
    """
    rows, columns = block
    # one row of blocks at a time, which stays in the CPU cache until it is written to out
    for part, scales, target in zip(
        weight.split(rows), scale_inv.float(), out.split(rows), strict=True
    ):
        values = part.float()
        values *= scales.repeat_interleave(columns)[: weight.size(1)]
        target.copy_(values)
