"""From the tensors of a checkpoint to the parameters of a model, if there is room for them."""

import functools
import os
import resource

import psutil
import torch
from safetensors import safe_open
from tqdm import tqdm

from . import fp8
from .checkpoint import Stored, on_disk


class Reader:
    """Reads tensors of a checkpoint, dequantised."""

    def __init__(self, tensors: dict[str, Stored], block: tuple[int, int] | None):
        self.tensors, self.block = tensors, block
        # read, not mapped: a mapped file would count as this process's memory, and a model whose
        # weights are the file would change, or crash, with it
        self._open = functools.cache(functools.partial(safe_open, framework="pt", backend="pread"))

    def stored(self, name: str) -> torch.Tensor:
        """As it is in the file."""
        return self._open(self.tensors[name].file).get_tensor(name)

    def is_quantised(self, name: str) -> bool:
        return self.tensors[name].dtype == fp8.STORED

    def read(self, name: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """As it is, or dequantised to ``dtype``."""
        if not self.is_quantised(name):
            return self.stored(name)
        tensor = torch.empty(self.tensors[name].shape, dtype=dtype)
        self.read_into(name, tensor)
        return tensor

    def read_into(self, name: str, out: torch.Tensor) -> None:
        if self.is_quantised(name):
            scale_inv = self.stored(fp8.scale_name(name))
            fp8.dequantise(self.stored(name), scale_inv, self.block, out)
        else:
            out.copy_(self.stored(name))


class Parameter:
    """A parameter that is still on disk; indexing reads it, as it does a slice of safetensors.

    What lies on disk in parts, expert by expert, is read straight into the one tensor that the
    model has for them. transformers' own way, all parts and then all of them stacked, takes that
    tensor's memory twice.
    """

    def __init__(self, reader: Reader, parts: list[str], shape: list[int], dtype: torch.dtype):
        self.reader, self.parts, self.shape, self.dtype = reader, parts, shape, dtype

    def get_shape(self) -> list[int]:
        return self.shape

    def __getitem__(self, index) -> torch.Tensor:
        if len(self.parts) == 1:
            whole = self.reader.read(self.parts[0], self.dtype)
            # a copy of a part, since a view of it would keep all of it in memory
            return whole if index is ... else whole[index].clone()
        # of a rank that shares the experts with others, only part of each
        experts, rows, columns = [slice(None)] * 3 if index is ... else index
        selected = range(self.shape[0])[experts]
        parts_of_one = len(self.parts) // self.shape[0]
        buffer = torch.empty(self.shape[1:], dtype=self.dtype)
        parameter = buffer.new_empty(len(selected), *buffer[rows, columns].shape)
        for i, place in zip(selected, parameter, strict=True):
            expert = place if index is ... else buffer
            parts = self.parts[i * parts_of_one : (i + 1) * parts_of_one]
            targets = expert.view(parts_of_one, -1, self.shape[-1])
            for part, target in zip(parts, targets, strict=True):
                self.reader.read_into(part, target)
            if expert is buffer:
                place.copy_(expert[rows, columns])
        return parameter


def parameters(model, reader: Reader, dtype: torch.dtype) -> dict[str, Parameter]:
    """Every parameter of ``model``, and its persistent buffers, still on disk."""
    return {
        name: Parameter(reader, parts, shape, dtype)
        for name, (shape, parts) in on_disk(model).items()
    }


def resolve_dtype(dtype: torch.dtype | str, config, tensors: dict[str, Stored]) -> torch.dtype:
    """``dtype``, or for ``"auto"`` the checkpoint's own: of fp8, that of what is not quantised."""
    if dtype != "auto":
        return dtype
    return config.dtype or fp8.DTYPES[tensors["model.embed_tokens.weight"].dtype]


def check_memory(model, dtype: torch.dtype, device: torch.device, ranks: int = 1) -> None:
    """Refuses a model that does not fit.

    Args:
        ranks: processes that share the model, and those on one machine its memory.
    Raises:
        MemoryError: with what it needs, what there is, and what can be done.
    """
    needed = sum(tensor.numel() for tensor in model.state_dict().values()) * dtype.itemsize // ranks
    here = 1 if ranks == 1 else int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    available = {}
    if device.type != "cpu":
        available[str(device)] = free_memory(device)
    if device.type == "cpu" or ranks == 1:  # from where a device gets it, unless in parts
        available["this machine"] = free_memory(torch.device("cpu")) // here
    each = "" if ranks == 1 else f" on each of {ranks} ranks"
    for place, free in available.items():
        if needed > free:
            raise MemoryError(
                f"load: needs {tqdm.format_sizeof(needed, 'B')} as "
                f"{str(dtype).removeprefix('torch.')}{each}; "
                f"{place} has {tqdm.format_sizeof(free, 'B')}: "
                "load fewer layers with num_hidden_layers or use more devices"
            )


def free_memory(device: torch.device) -> int:
    """Bytes that this process can have more of there; of a CPU's, without swapping."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        module.empty_cache()  # or it would not count what torch keeps for later
        return module.mem_get_info(device)[0]
    available = psutil.virtual_memory().available
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return available
    return min(available, limit - psutil.Process().memory_info().vms)
