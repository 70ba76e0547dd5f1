"""Reads weights from a checkpoint into stored formats, one tensor at a time."""

import math
import threading

import torch
from torch import Tensor

from custom_pypto.files import NAMES
from custom_pypto.weight_formats import WEIGHT_FORMATS

from ..memory import empty
from . import published
from .modules import Layout, layout, matrices


class StoredWeight:
    """A weight on disk and its scales, both made when the weight is read, whole or of some experts.

    Args:
        parts: names on disk: one, or of each expert one or two.
        shape: of the values.
    """

    def __init__(self, reader, parts: list[str], shape: list[int], kind: str):
        self.reader, self.parts, self.shape, self.kind = reader, parts, shape, kind
        self.layout = layout(kind, shape)
        self.lock, self.made = threading.Lock(), None

    def scales(self, experts: slice) -> Tensor | None:
        """The memory of the scales, which :meth:`weight` fills.

        transformers reads both in threads; the one for the scales does not wait for the other, but
        reads the next weight.
        """
        stored = self.layout_of(experts)
        with self.lock:
            if self.made is None and stored.scale_shape is not None:
                values = math.prod(stored.shape) * stored.dtype.itemsize
                self.made = empty(stored.scale_shape, stored.scale_dtype, beside=values)
            return self.made

    def layout_of(self, experts: slice) -> Layout:
        first, *others = self.shape
        return layout(self.kind, [len(range(first)[experts]), *others])

    def weight(self, experts: slice) -> Tensor:
        stored, parts, first = self.layout_of(experts), self.parts, slice(None)
        weight, scales = empty(stored.shape, stored.dtype), self.scales(experts)
        if len(parts) == 1:
            first = experts
        else:
            of_expert = len(parts) // self.shape[0]
            selected = range(self.shape[0])[experts]
            parts = parts[selected.start * of_expert : selected.stop * of_expert]
        # a part is some rows of a matrix
        weights = matrices(weight).flatten(0, -2).unflatten(0, (len(parts), -1))
        if scales is not None:
            of_matrix = stored.scale_shape[2 if len(self.shape) == 3 else 1 :]
            scales = scales.view(len(parts), -1, *of_matrix)
        for i, part in enumerate(parts):
            self.read(part, first, weights[i], None if scales is None else scales[i])
        return weight

    def read(self, part: str, first: slice, weight: Tensor, scales: Tensor | None) -> None:
        if WEIGHT_FORMATS[self.kind].rounded:
            self.reader.convert(part, weight, scales, first)
            return
        for _, values in self.reader.row_blocks(part, first, into=weight):
            if values.dtype == torch.float8_e4m3fn and published.has_nan(values):
                file = self.reader.tensors[part].file
                raise ValueError(f"load: {file}: {part} has NaN; download it again")
        if scales is not None:
            name = published.scale_name(part, self.reader.tensors)
            scales.copy_(self.reader.stored(name))


class OnDisk:
    """A parameter with the values or the scales of a stored weight, like a slice of safetensors."""

    def __init__(self, weight: StoredWeight, which: str):
        self.weight, self.which = weight, which

    def get_shape(self) -> list[int]:
        stored = self.weight.layout
        return stored.shape if self.which == "weight" else stored.scale_shape

    def get_dtype(self) -> str:
        stored = self.weight.layout
        return NAMES[stored.dtype if self.which == "weight" else stored.scale_dtype]

    def __getitem__(self, index) -> Tensor:
        # what was read, never a copy: the scales are filled later; ranks share experts alone
        return getattr(self.weight, self.which)(slice(None) if index is ... else index[0])


def check_blocks(name: str, kind: str, parts: int, shape: list[int], block) -> None:
    """Rejects blocks that :func:`custom_pypto.weight_only_linear` cannot have.

    Raises:
        ValueError: names the weight and the remedy.
    """
    size = WEIGHT_FORMATS[kind].block
    if size == 0:
        return
    if tuple(block) != (size, size):
        raise ValueError(
            f"load: weight_block_size of config.json must be [{size}, {size}] for "
            f"weights='stored', got {list(block)}; pass weights='int8'"
        )
    projections = parts // shape[0] if len(shape) == 3 else 1
    rows = shape[-2] // projections
    if projections > 1 and rows % size:
        raise ValueError(
            f"load: {name} must have a multiple of {size} rows in each projection for "
            f"weights='stored', got {rows}; pass weights='int8'"
        )
