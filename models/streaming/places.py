"""Where the bytes of each expert are: in a published checkpoint each expert has tensors of its own,
in a saved model those of a layer are stacked."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from custom_pypto.weight_formats import WEIGHT_FORMATS

from ..weights import published
from ..weights.modules import EXPERT_WEIGHTS, SCALE

# (unsigned integers, bits that NaN and infinities alone have all of)
NOT_FINITE = {
    torch.float8_e4m3fn: (np.uint8, 0x7F),
    torch.float8_e8m0fnu: (np.uint8, 0xFF),
    torch.bfloat16: (np.uint16, 0x7F80),
    torch.float16: (np.uint16, 0x7C00),
    torch.float32: (np.uint32, 0x7F800000),
}


class Form(NamedTuple):
    """What an expert is in memory: the shape and dtype of each of its arrays, which are the values
    of both weights and then their scales, if the format has any."""

    kind: str
    arrays: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @classmethod
    def of(cls, kind: str, shapes: list[list[int]]) -> "Form":
        """Of experts in the format ``kind``, with weights of these shapes, ``[N, K]``."""
        form = WEIGHT_FORMATS[kind]
        arrays = [(tuple(form.shape(shape)), form.dtype) for shape in shapes]
        if form.scale_dtype is not None:
            arrays += [(tuple(form.scale_shape(shape)), form.scale_dtype) for shape in shapes]
        return cls(kind, tuple(arrays))

    def nbytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.arrays)


class Piece(NamedTuple):
    """Consecutive bytes of a file, and their place in an expert."""

    file: Path
    tensor: str  # the first one there, for errors
    offset: int
    size: int
    dtype: torch.dtype
    array: int  # of Form.arrays
    start: int  # its first value in the array

    def is_finite(self, values: np.ndarray) -> bool:
        """Whether there is no NaN in fp8, and no infinity or NaN among scales."""
        of_scales = self.array >= len(EXPERT_WEIGHTS)
        if self.dtype not in NOT_FINITE or not (of_scales or self.dtype == torch.float8_e4m3fn):
            return True
        integers, bits = NOT_FINITE[self.dtype]
        # by numpy: torch would take threads for each thread that reads; a part at a time, whose
        # copy stays in the CPU's cache
        whole = values.view(integers)
        parts = np.array_split(whole, -(-len(whole) // 2**18))
        return not any(bool(((part & bits) == bits).any()) for part in parts)


def pieces(
    reader, parts_of: dict[str, list[str]], module: str, form: Form, count: int, own: range
) -> list[list[Piece]]:
    """The pieces of each of the ``own`` experts of ``module``, which has ``count``.

    Args:
        reader: of the checkpoint.
        parts_of: names on disk of each parameter.
    """
    found: list[list[Piece]] = [[] for _ in own]
    for i, weight in enumerate(EXPERT_WEIGHTS):
        parts = parts_of[f"{module}.{weight}"]
        scales = parts_of.get(f"{module}.{weight}{SCALE}", [])
        for some, expert in zip(found, own, strict=True):
            of_expert = list(of_one(reader, parts, i, expert, count))
            some += of_expert
            if len(form.arrays) == len(EXPERT_WEIGHTS):
                continue
            names = scales or [published.scale_name(x.tensor, reader.tensors) for x in of_expert]
            of = (expert, count) if scales else (0, 1)
            some += of_one(reader, names, i + len(EXPERT_WEIGHTS), *of)
    return [merged(some) for some in found]


def of_one(reader, names: list[str], array: int, expert: int, count: int) -> Iterator[Piece]:
    """The tensors of an array of one expert, or its part of the only one of all."""
    if len(names) == 1:
        file, offset, size, dtype = reader.extent(names[0])
        share = size // count
        yield Piece(file, names[0], offset + expert * share, share, dtype, array, 0)
        return
    start, each = 0, len(names) // count
    for name in names[expert * each : (expert + 1) * each]:
        file, offset, size, dtype = reader.extent(name)
        yield Piece(file, name, offset, size, dtype, array, start)
        start += size // dtype.itemsize


def merged(found: list[Piece]) -> list[Piece]:
    """In the order of their files, neighbours in the file and in the expert as one."""
    whole: list[Piece] = []
    for piece in sorted(found, key=lambda piece: (piece.file, piece.offset)):
        last = whole[-1] if whole else None
        if (
            last is not None
            and (last.file, last.array, last.dtype) == (piece.file, piece.array, piece.dtype)
            and last.offset + last.size == piece.offset
            and last.start + last.size // last.dtype.itemsize == piece.start
        ):
            whole[-1] = last._replace(size=last.size + piece.size)
        else:
            whole.append(piece)
    return whole
