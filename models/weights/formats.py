"""The stored formats of a weight ``[.., N, K]``: dtypes, shapes of scales.

:func:`custom_pypto.weight_only_linear` defines the formats.
"""

from typing import NamedTuple

import torch
from torch import Tensor

#: those that weights are rounded to: int8 symmetric with a scale for each row, int4 between the
#: smallest and the largest value of a group
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
