"""Reads tensors of a checkpoint, as they are stored or in the formats of a model."""

import functools
import json
import math
import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from custom_pypto import layer_ops
from custom_pypto.files import NAMES

from ..memory import empty
from ..weights import published
from .checkpoint import Stored

TORCH_DTYPES = published.FLOATS | published.INTEGERS
TORCH_DTYPES |= {name: dtype for dtype, name in NAMES.items()}
AT_ONCE = 2**20  # bytes that stay in the CPU cache until they are converted


class File:
    """A file of safetensors, whose header was validated.

    The library reads whole tensors, into memory of its own that it clears first.
    """

    def __init__(self, path: Path):
        self.path, self.descriptor = path, os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)
        length = int.from_bytes(os.pread(self.descriptor, 8, 0), "little")
        self.header = json.loads(os.pread(self.descriptor, length, 8))
        self.data = 8 + length

    def read(self, name: str, out: Tensor, skip: int) -> None:
        """Fills ``out`` with the bytes of a tensor, from the byte ``skip`` on."""
        begin, end = (self.data + offset for offset in self.header[name]["data_offsets"])
        begin, rest = begin + skip, memoryview(out.view(-1).view(torch.uint8).numpy())
        while rest:
            count = os.preadv(self.descriptor, [rest], begin) if begin + len(rest) <= end else 0
            if count == 0:
                raise ValueError(f"load: {self.path} changed while it was read; load it again")
            begin, rest = begin + count, rest[count:]


class Reader:
    """Reads tensors of a checkpoint.

    Args:
        tensors: those that this rank reads.
        mapped: whether tensors are pages of their files, which several processes then share.
    """

    def __init__(
        self,
        tensors: dict[str, Stored],
        blocks: dict[str, tuple[int, int]],
        mapped: bool = False,
    ):
        self.tensors, self.blocks = tensors, blocks
        self.progress, self.lock = tqdm(disable=True), threading.Lock()
        # else read: a mapped file counts as memory of this process, and a change of the file would
        # change or crash the model
        self.mapped = mapped
        self._map = functools.cache(functools.partial(safe_open, framework="pt"))
        self._open = functools.cache(File)

    def stored(self, name: str, first: slice = slice(None)) -> Tensor:
        """The tensor as stored in the file, or a part of its first dim."""
        if self.mapped:
            opened, whole = self._map(self.tensors[name].file), first == slice(None)
            tensor = opened.get_tensor(name) if whole else opened.get_slice(name)[first]
            self._count(tensor)
            return tensor
        shape, dtype, skip = self._part(name, first)
        tensor = empty(shape, dtype)
        self._fill(name, tensor, skip)
        return tensor

    def read(self, name: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The tensor as stored, or dequantized to ``dtype``."""
        if not self.is_quantized(name):
            return self.stored(name)
        tensor = empty(self.tensors[name].shape, dtype)
        self.convert(name, tensor)
        return tensor

    def convert(
        self,
        name: str,
        out: Tensor,
        out_scales: Tensor | None = None,
        first: slice = slice(None),
    ) -> None:
        """Writes a matrix, or a part of the first dim of several, in the format of ``out``: of
        floats or, with scales, one that is rounded to."""
        block, scales, height = self.blocks.get(self.tensors[name].dtype), None, 1
        if block is not None:
            scales = self.stored(published.scale_name(name, self.tensors))
            height = block[0]
        elif out.dtype == TORCH_DTYPES[self.tensors[name].dtype]:
            return self._fill(name, out, self._part(name, first)[-1])
        for rows, values in self.row_blocks(name, first, height):
            layer_ops.convert_weight(
                values,
                None if scales is None else scales[rows.start // height : -(-rows.stop // height)],
                block,
                out[rows],
                None if out_scales is None else out_scales[rows],
            )

    def row_blocks(
        self, name: str, first: slice = slice(None), height: int = 1, into: Tensor | None = None
    ) -> Iterator[tuple[slice, Tensor]]:
        """Blocks of rows of a matrix as stored, or of a part of the first dim of several, and which
        rows these are.

        Args:
            height: of which a block has a multiple of rows.
            into: the memory for all rows; None: each block overwrites the last.
        """
        (*lead, columns), dtype, skip = self._part(name, first)
        rows, size = math.prod(lead), columns * dtype.itemsize
        step = max(1, AT_ONCE // (size * height)) * height
        memory = torch.empty((min(step, rows), columns), dtype=dtype, device="cpu")
        for start in range(0, rows, step):
            of_block = slice(start, min(start + step, rows))
            values = memory[: of_block.stop - start] if into is None else into[of_block]
            self._fill(name, values, skip + start * size)
            yield of_block, values

    def is_quantized(self, name: str) -> bool:
        return self.tensors[name].dtype in self.blocks

    def extent(self, name: str) -> tuple[Path, int, int, torch.dtype]:
        """Where the bytes of a tensor are: file, offset and size; and their dtype."""
        path, dtype, _ = self.tensors[name]
        file = self._open(path)
        begin, end = (file.data + offset for offset in file.header[name]["data_offsets"])
        return path, begin, end - begin, TORCH_DTYPES[dtype]

    def nbytes(self, names: Iterable[str]) -> int:
        """Bytes of these tensors."""
        parts = (self._part(name, slice(None)) for name in names)
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype, _ in parts)

    def _part(self, name: str, first: slice) -> tuple[list[int], torch.dtype, int]:
        """Shape and dtype as stored of a part of a tensor's first dim, and the bytes before it."""
        _, dtype, shape = self.tensors[name]
        if dtype == published.FP4 and dtype in self.blocks:
            shape = [*shape[:-1], shape[-1] // 2]
        if not shape:
            return shape, TORCH_DTYPES[dtype], 0
        chosen, others = range(shape[0])[first], shape[1:]
        skip = chosen.start * math.prod(others) * TORCH_DTYPES[dtype].itemsize
        return [len(chosen), *others], TORCH_DTYPES[dtype], skip

    def _fill(self, name: str, out: Tensor, skip: int) -> None:
        self._open(self.tensors[name].file).read(name, out, skip)
        self._count(out)

    def _count(self, tensor: Tensor) -> None:
        with self.lock:
            self.progress.update(tensor.nbytes)
