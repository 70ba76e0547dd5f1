"""Rows of the int8 caches, for the layers that allocate or copy them; ``csrc`` has the same in the
header of its row reader."""

import torch
from torch import Tensor

SCALE_GROUP = 128  # values that share a scale


def int8_row_bytes(latent: int, rope: int) -> int:
    """``latent`` values of one byte, ``rope`` values of two, a float32 scale per group."""
    return latent + 2 * rope + 4 * latent // SCALE_GROUP


def int8_index_row_bytes(dim: int) -> int:
    """Of the indexer: ``dim`` values of one byte, a float16 scale."""
    return dim + 2


def dequantized(rows: Tensor, latent: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``(latent, rope)`` of these rows, in ``dtype``: each int8 times its scale, in float32, then
    rounded."""
    values, rope, scales = rows.split(
        [latent, rows.size(-1) - latent - 4 * latent // SCALE_GROUP, 4 * latent // SCALE_GROUP], -1
    )
    # views of another dtype need rows of their own, which start at a multiple of its size
    scales, rope = (part.clone(memory_format=torch.contiguous_format) for part in (scales, rope))
    values = values.unflatten(-1, (-1, SCALE_GROUP)).float() * scales.view(torch.float32)[..., None]
    return values.flatten(-2).to(dtype), rope.view(dtype)


def hadamard_matrix(dim: int) -> Tensor:
    """``[dim, dim]`` float32, of a power of two: rotates the rows of the indexer."""
    signs = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float32, device="cpu")
    matrix = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    for _ in range(dim.bit_length() - 1):
        matrix = torch.kron(signs, matrix)
    return matrix * dim**-0.5
