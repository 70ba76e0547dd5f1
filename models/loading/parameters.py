"""Turns the tensors of a checkpoint into the parameters of a model."""

import functools
from collections.abc import Callable

import torch
from transformers.core_model_loading import ConversionOps

from ..memory import empty
from ..weights import published
from ..weights.modules import SCALE, stored_parameters
from ..weights.on_disk import OnDisk, StoredWeight, check_blocks
from .checkpoint import Checkpoint
from .reader import Reader


class Parameter:
    """A parameter on disk; indexing reads it, like a slice of safetensors.

    Experts, stored one by one, are read directly into the model's stacked tensor. Upstream reads
    all parts and then stacks them, which takes that tensor's memory twice.
    """

    def __init__(
        self,
        reader: Reader,
        parts: list[str],
        shape: list[int],
        dtype: torch.dtype,
        convert: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ):
        self.reader, self.parts, self.shape, self.dtype = reader, parts, shape, dtype
        self.convert = convert

    def get_shape(self) -> list[int]:
        return self.shape

    def get_dtype(self) -> str:
        """safetensors' name of a dtype; transformers asks whether it is one of floats."""
        return "BF16" if self.dtype.is_floating_point else "I64"

    def __getitem__(self, index) -> torch.Tensor:
        if len(self.parts) == 1:
            [name] = self.parts
            as_stored = self.convert is None and not self.reader.is_quantized(name)
            if as_stored and index is not ...:
                first, *others = index
                part = self.reader.stored(name, first)
                wanted = part[(slice(None), *others)]
                return part if wanted.shape == part.shape else wanted.clone()
            whole = self.reader.read(self.parts[0], self.dtype).view(self.shape)
            whole = whole if self.convert is None else self.convert(whole)
            # a copy: a view of a part would keep the whole tensor in memory
            return whole if index is ... else whole[index].clone()
        if len(self.parts) < self.shape[0]:  # blocks of rows
            whole = torch.cat([self.reader.read(part, self.dtype) for part in self.parts])
            return whole if index is ... else whole[index].clone()
        # a rank reads only a part of each expert, or some of the experts
        experts, rows, columns = [slice(None)] * 3 if index is ... else index
        selected = range(self.shape[0])[experts]
        parts_of_one = len(self.parts) // self.shape[0]
        buffer = torch.empty(self.shape[1:], dtype=self.dtype, device="cpu")
        parameter = empty((len(selected), *buffer[rows, columns].shape), self.dtype)
        whole = parameter.shape[1:] == buffer.shape
        for i, place in zip(selected, parameter, strict=True):
            expert = place if whole else buffer
            parts = self.parts[i * parts_of_one : (i + 1) * parts_of_one]
            targets = expert.view(parts_of_one, -1, self.shape[-1])
            for part, target in zip(parts, targets, strict=True):
                self.reader.convert(part, target)
            if expert is buffer:
                place.copy_(expert[rows, columns])
        return parameter


def parameters(
    model,
    checkpoint: Checkpoint,
    reader: Reader,
    dtypes: dict[str, torch.dtype],
    kinds: dict[str, str],
) -> dict[str, Parameter | OnDisk]:
    """Every parameter of ``model``, and its persistent buffers, still on disk.

    Args:
        model: without stored weights.
        dtypes: of the parameters in the loaded model.
        kinds: the format of each module whose weights are plain on disk and stored in the model.
    """
    state = model.state_dict() | checkpoint.saved
    found: dict[str, Parameter | OnDisk] = {}
    for name, parts in checkpoint.parts.items():
        module, _, weight = name.rpartition(".")
        shape = list(state[name].shape)
        kind = kinds.get(module) if weight != "bias" else None
        if kind is None:
            dtype = state[name].dtype if name in checkpoint.saved else dtypes[name]
            operation = checkpoint.operations.get(name)
            convert = operation and functools.partial(converted, operation, model.config)
            found[name] = Parameter(reader, parts, shape, dtype, convert)
            continue
        check_blocks(name, kind, len(parts), shape, reader.blocks.get(published.FP8))
        stored = StoredWeight(reader, parts, shape, kind)
        found[name] = OnDisk(stored, "weight")
        if stored.layout.scale_shape is not None:
            found[name + SCALE] = OnDisk(stored, "scales")
    return found


def converted(operation: ConversionOps, config, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` after an operation by which transformers reads a checkpoint."""
    [result] = operation.convert({"": [tensor]}, [""], [""], config=config).values()
    return result


def dtypes_of(model, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype of every parameter and persistent buffer once ``model`` is loaded in ``dtype``.

    Tables of integers and stored weights keep their dtype, and upstream's float32 parameters stay
    in float32.
    """
    kept, stored = model._get_dtype_plan(dtype), stored_parameters(model)

    def dtype_of(name: str, tensor: torch.Tensor) -> torch.dtype:
        if name in stored or not tensor.is_floating_point():
            return tensor.dtype
        return next((kept[part] for part in kept if part in name), dtype)

    return {name: dtype_of(name, tensor) for name, tensor in model.state_dict().items()}
