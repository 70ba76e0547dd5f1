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
        # a part at a time, whose copy stays in the CPU's cache
        whole = values.view(integers)
        parts = np.array_split(whole, -(-len(whole) // 2**18))
        return not any(bool(((part & bits) == bits).any()) for part in parts)


def pieces(
    reader, parts_of: dict[str, list[str]], module: str, form: Form, experts: int
) -> list[list[Piece]]:
    """The pieces of each expert of ``module``, in the order of the file.

    Args:
        reader: of the checkpoint.
        parts_of: names on disk of each parameter.
    """
    found: list[list[Piece]] = [[] for _ in range(experts)]
    for i, weight in enumerate(EXPERT_WEIGHTS):
        parts = parts_of[f"{module}.{weight}"]
        scales = parts_of.get(f"{module}.{weight}{SCALE}")
        if scales is None and len(form.arrays) > len(EXPERT_WEIGHTS):
            scales = [published.scale_name(part, reader.tensors) for part in parts]
        for array, names in ((i, parts), (i + len(EXPERT_WEIGHTS), scales or [])):
            for expert, piece in of_tensors(reader, names, array, form, experts):
                found[expert].append(piece)
    return [merged(some, form) for some in found]


def of_tensors(
    reader, names: list[str], array: int, form: Form, experts: int
) -> Iterator[tuple[int, Piece]]:
    """The tensors of one array of all experts: one of all, or one or several of each."""
    start = 0
    for i, name in enumerate(names):
        file, offset, size, dtype = reader.extent(name)
        count = experts if len(names) == 1 else 1
        share = size // count
        for expert in range(count):
            first = start if count == 1 else 0
            place = offset + expert * share
            yield (
                i * experts // len(names) + expert,
                Piece(file, name, place, share, dtype, array, first),
            )
        start += size // dtype.itemsize
        start %= math.prod(form.arrays[array][0])


def merged(found: list[Piece], form: Form) -> list[Piece]:
    """With neighbours in the file and in the expert as one."""
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
