"""The stored formats of a weight ``[.., N, K]``: dtypes, shapes of scales, and rounding to them.

:func:`custom_pypto.weight_only_linear` defines the formats.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

#: those that :func:`quantize` makes
ROUNDED = ("int8", "int4")
FORMATS = ("bfloat16", "fp8", "fp4", *ROUNDED)
#: K is a multiple of it
MULTIPLE = 32
BLOCK = 128  # rows and columns of fp8 with a scale
FP4_GROUP = 32
INT4_GROUPS = (128, 64, 32)  # the largest that divides K


class Layout(NamedTuple):
    """Shapes and dtypes of a stored weight."""

    shape: list[int]
    dtype: torch.dtype
    scale_shape: list[int] | None  # None: no scales
    scale_dtype: torch.dtype | None


def layout(kind: str, shape: list[int]) -> Layout:
    """How a weight of this ``shape`` is stored.

    A code for each value has one dim more, of size 1: a loop that copies plain weights by name then
    fails, which would cast them into codes.
    """
    *lead, rows, columns = shape
    if kind == "bfloat16":
        return Layout(shape, torch.bfloat16, None, None)
    if kind == "fp8":
        grid = [*lead, -(-rows // BLOCK), -(-columns // BLOCK)]
        return Layout([*shape, 1], torch.float8_e4m3fn, grid, torch.float32)
    if kind == "int8":
        return Layout([*shape, 1], torch.int8, [*lead, rows], torch.float32)
    pairs = [*lead, rows, columns // 2]
    if kind == "fp4":
        scales = [*lead, rows, columns // FP4_GROUP]
        return Layout(pairs, torch.uint8, scales, torch.float8_e8m0fnu)
    groups = columns // int4_group(columns)
    return Layout(pairs, torch.uint8, [*lead, rows, groups, 2], torch.bfloat16)


def matrices(weight: Tensor) -> Tensor:
    """A stored weight ``[.., N, columns]``, as :func:`custom_pypto.weight_only_linear` takes it."""
    return weight.squeeze(-1)


def int4_group(columns: int) -> int:
    """Values of a row that share scale and zero."""
    return next(group for group in INT4_GROUPS if columns % group == 0)


def quantize(
    kind: str, blocks: Iterable[tuple[slice, Tensor]], weight: Tensor, scales: Tensor
) -> None:
    """Rounds a matrix ``[N, K]`` to a format of :data:`ROUNDED`: int8 symmetric with a scale for
    each row, int4 between the smallest and the largest value of a group.

    Args:
        blocks: blocks of rows of the matrix, and which rows these are.
    """
    of_rows = {"int8": _int8, "int4": _int4}[kind]
    scratch = torch.empty(0, dtype=torch.float32, device="cpu")  # one memory for all blocks
    for rows, values in blocks:
        of_rows(values.float(), scratch.resize_(values.shape), weight[rows], scales[rows])


def _int8(values: Tensor, scratch: Tensor, weight: Tensor, scales: Tensor) -> None:
    tiny = torch.finfo(torch.float32).tiny  # of a row of zeros
    # abs().amax() and aminmax() compare value by value
    largest = torch.maximum(values.amax(-1), -values.amin(-1))
    torch.div(largest.clamp_(min=tiny), 127, out=scales)
    torch.div(values, scales[:, None], out=scratch)
    weight.copy_(scratch.round_().clamp_(-127, 127))


def _int4(values: Tensor, scratch: Tensor, weight: Tensor, scales: Tensor) -> None:
    groups, codes = (x.unflatten(-1, (scales.size(1), -1)) for x in (values, scratch))
    low, high = groups.amin(-1), groups.amax(-1)
    scale, zero = scales.unbind(-1)
    # of a group of one value, whose zero is that value
    scale.copy_(((high - low) / 15).clamp(min=torch.finfo(torch.float32).tiny))
    step = scale.float()
    zero.copy_(low + 8 * step)
    torch.sub(groups, zero.float()[..., None], out=codes).div_(step[..., None])
    codes.round_().add_(8).clamp_(0, 15)
    # on a little-endian machine the first value of a pair is the lower byte
    pairs = scratch.to(torch.int8).view(torch.int16)
    weight.view(torch.int8).copy_(pairs | pairs >> 4)
