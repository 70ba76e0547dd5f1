"""Shared by the checks of several ops. Sequences are ragged, blocks shuffled, and block ids past a
sequence's end invalid.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

BLOCK = 128
# bfloat16, float16: 2 units of rounding, one for the result, one for intermediate values; float32:
# sums of some hundred products in another order
ROUNDING = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}
# of gradients: in bfloat16 one more unit, of the operands that are rounded before they are
# multiplied
GRADIENT_ROUNDING = ROUNDING | {torch.bfloat16: 3 * 2**-8}
# lengths, S1, K
SIZES = [([1], 1, 16), ([300, 0, 1000], 1, 128), ([131, 5], 4, 16), ([5000], 2, 2048)]

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
STEP = torch.finfo(torch.float32).eps


def of_sequences(
    dtypes: list[torch.dtype], sizes: list, arguments: Callable, more: str = ""
) -> Iterator[tuple]:
    """Checks with the arguments that ``arguments(dtype, lengths, S1, K)`` makes.

    Args:
        more: what else a check has, for its description.
    """
    for dtype in dtypes:
        for lengths, S1, K in sizes:
            shape = f"lengths {lengths}, S1 {S1}, K {K}{more}"
            yield dtype, shape, arguments(dtype, lengths, S1, K)


def cache(lengths: list[int], g: torch.Generator) -> tuple[Tensor, Tensor, int]:
    """Lengths, a shuffled block table with invalid ids past the end, and the number of blocks."""
    blocks = [-(-n // BLOCK) for n in lengths]
    hostile = torch.tensor([INT_MIN, -1, INT_MAX], dtype=torch.int32)
    table = hostile.repeat(max(blocks) + 1)[: max(blocks) + 1].repeat(len(lengths), 1)
    ids = torch.randperm(sum(blocks) + 1, generator=g, dtype=torch.int32)
    for row, own in zip(table, ids[: sum(blocks)].split(blocks), strict=True):
        row[: len(own)] = own
    return torch.tensor(lengths, dtype=torch.int32), table, sum(blocks) + 1


def row_error(got: Tensor, expected: Tensor) -> float:
    """Largest error relative to the largest magnitude of its row; infinite for NaN."""
    got, expected = got.double(), expected.double()
    scale = expected.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return float(((got - expected).abs() / scale).nan_to_num(nan=torch.inf).amax())


def excess(got: tuple, expected: tuple, magnitudes: Iterable, flushed: float = 0) -> float:
    """The largest error of a finite element, relative to the sum of the magnitudes of its terms.

    Args:
        flushed: what an element may lose where numbers below the normal ones count as 0.
    """
    largest = 0.0
    for one, other, magnitude in zip(got, expected, magnitudes, strict=True):
        limits = torch.finfo(other.dtype)
        difference = (one.double() - other.double()).abs().nan_to_num(nan=torch.inf)
        # below the normal numbers, of float32 in sums and of the dtype in results
        smallest = max(flushed, torch.finfo(torch.float32).tiny, limits.tiny * limits.eps)
        difference = (difference - smallest).clamp(min=0) / magnitude
        counts = other.isfinite() & magnitude.isfinite() & (one != other)
        if counts.any():
            largest = max(largest, float(difference[counts].amax()))
    return largest


def largest(x: Tensor) -> float:
    """The largest finite magnitude."""
    return float(x.double().nan_to_num(0, 0, 0).abs().max()) if x.numel() else 0.0


def steps_from(got: tuple, expected: tuple, bounds: Iterable) -> float:
    """The largest error, relative to the bounds of its elements; infinite for NaN."""
    found = 0.0
    for one, other, bound in zip(got, expected, bounds, strict=True):
        error = ((one.double() - other.double()).abs() / bound).nan_to_num(nan=torch.inf)
        found = max(found, float(error.amax()) if error.numel() else 0.0)
    return found
