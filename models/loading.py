"""Turns the tensors of a checkpoint into the parameters of a model, if they fit in memory."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator

import torch
from tqdm import tqdm
from transformers.core_model_loading import GLOBAL_WORKERS, ConversionOps
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from . import quantized_weights
from .checkpoint import Checkpoint
from .memory import empty, free_memory
from .reader import Reader
from .sharing import part_of_rank, shared_parameters
from .weights.modules import SCALE, stored_parameters
from .weights.reading import OnDisk, StoredWeight, check_blocks

PROGRESS = "Loading weights"  # transformers' description of its bar


@contextlib.contextmanager
def reading(reader: Reader) -> Iterator[None]:
    """While transformers reads: a progress bar of bytes in place of its own of parameters, and a
    share of torch's threads for each of its threads.

    Else each of these would wait after every operation for as many threads as there are cores.
    """

    def hide(bar, args, kwargs):
        return args[0] if kwargs.get("desc") == PROGRESS else bar(*args, **kwargs)

    options = {"desc": PROGRESS, "unit": "B", "unit_scale": True}
    threads = torch.get_num_threads()
    with logging.tqdm(total=reader.nbytes(), **options) as reader.progress:
        hook = logging.set_tqdm_hook(hide)
        torch.set_num_threads(max(1, threads // GLOBAL_WORKERS))
        try:
            yield
            reader.progress.total = reader.progress.n  # a rank reads parts of some tensors
        finally:
            torch.set_num_threads(threads)
            logging.set_tqdm_hook(hook)


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
    model, checkpoint: Checkpoint, reader: Reader, dtype: torch.dtype, kinds: dict[str, str]
) -> dict[str, Parameter | OnDisk]:
    """Every parameter of ``model``, and its persistent buffers, still on disk.

    Args:
        model: without stored weights, unless the checkpoint has them.
        kinds: the format of each module with stored weights.
    """
    state, dtypes = model.state_dict(), dtypes_of(model, dtype)
    found: dict[str, Parameter | OnDisk] = {}
    for name, parts in checkpoint.parts.items():
        module, _, weight = name.rpartition(".")
        shape = list(state[name].shape)
        kind = kinds.get(module) if weight != "bias" else None
        if kind is None:
            operation = checkpoint.operations.get(name)
            convert = operation and functools.partial(converted, operation, model.config)
            found[name] = Parameter(reader, parts, shape, dtypes[name], convert)
            continue
        check_blocks(name, kind, len(parts), shape, reader.blocks.get(quantized_weights.FP8))
        stored = StoredWeight(reader, parts, shape, kind)
        found[name] = OnDisk(stored, "weight")
        if stored.layout.scale_shape is not None:
            found[name + SCALE] = OnDisk(stored, "scales")
    return found


def converted(operation: ConversionOps, config, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` after an operation by which transformers reads a checkpoint."""
    [result] = operation.convert({"": [tensor]}, [""], [""], config=config).values()
    return result


def check_scale_values(
    model, checkpoint: Checkpoint, reader: Reader, plan: DistributedConfig | None
) -> None:
    """Rejects scales that are infinite or NaN, of the weights that this rank reads.

    Raises:
        ValueError: names file and tensor.
    """
    weights = filter(reader.is_quantized, reader.tensors)
    scales = {quantized_weights.scale_name(name, reader.tensors): slice(None) for name in weights}
    shared = shared_parameters(model, plan) if plan else set()
    for name in stored_parameters(model):
        # of a module that is stored in another format than on disk, there is none to read
        if name.endswith(SCALE) and name in checkpoint.parts:
            count = model.get_parameter(name).size(0)
            first = part_of_rank(count) if name in shared else slice(None)
            scales[checkpoint.parts[name][0]] = first
    for name, first in scales.items():
        if not bool(reader.stored(name, first).float().isfinite().all()):
            file = reader.tensors[name].file
            raise ValueError(
                f"load: {file}: {name} must be finite, got an infinity or NaN; download it again"
            )


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


def check_dtype(dtype: torch.dtype | str) -> torch.dtype | None:
    """The dtype that was asked for; None: ``"auto"``.

    Raises:
        ValueError: names the argument, what was expected and what came.
    """
    if dtype == "auto":
        return None
    wanted = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if wanted not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            "load: dtype must be 'auto', 'float32', 'bfloat16', 'float16' or such a torch.dtype, "
            f"got {dtype!r}"
        )
    return wanted


def check_device(device: torch.device | str | None) -> torch.device:
    """The device that was asked for.

    Raises:
        ValueError: it has no ops, or is not there.
    """
    try:
        wanted = torch.device("cpu" if device is None else device)
    except RuntimeError as error:
        wanted, problem = None, error
    if wanted is not None and wanted.type in ("cpu", "npu"):
        return wanted
    if str(device).partition(":")[0] == "npu":
        raise ValueError(
            f"load: device {str(device)!r} needs torch_npu, which is not loaded; custom-pypto env "
            "says what is missing"
        ) from problem
    raise ValueError(
        f"load: device must be a CPU or an NPU, where the ops run, got {str(device)!r}"
    )


def resolve_dtype(dtype: torch.dtype | None, config, checkpoint: Checkpoint) -> torch.dtype:
    """``dtype``, or for None that of the config, else of the embedding on disk."""
    if dtype is not None:
        return dtype
    name = next(name for name in checkpoint.parts if name.endswith("embed_tokens.weight"))
    [embedding] = checkpoint.parts[name]
    return config.dtype or quantized_weights.FLOATS[checkpoint.tensors[embedding].dtype]


def bytes_of_rank(
    model, dtypes: dict[str, torch.dtype], plan: DistributedConfig | None = None
) -> int:
    """What ``model`` takes on each rank, on average.

    Args:
        plan: how ranks share it; None: one process has it all.
    """
    parts = dict.fromkeys(shared_parameters(model, plan), plan.tp_size) if plan else {}
    state = model.state_dict(keep_vars=True)
    once = {id(tensor): name for name, tensor in reversed(state.items())}  # a tied head
    return sum(
        state[name].numel() * dtypes[name].itemsize // parts.get(name, 1) for name in once.values()
    )


def check_memory(
    model,
    dtype: torch.dtype,
    device: torch.device,
    weights: dict[str, str | None],
    plan: DistributedConfig | None = None,
) -> None:
    """Rejects a model that does not fit in memory.

    Args:
        weights: formats that the caller asked for, of experts and of the rest.
        plan: how ranks share the model; those on one machine share its memory.
    Raises:
        MemoryError: names the required and the available memory, and the remedy.
    """
    ranks = 1 if plan is None else plan.tp_size
    needed = bytes_of_rank(model, dtypes_of(model, dtype), plan)
    here = 1 if ranks == 1 else int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    available = {}
    if device.type != "cpu":
        available[str(device)] = free_memory(device)
    if device.type == "cpu" or ranks == 1:  # a whole model passes through host memory
        available["this machine"] = free_memory(torch.device("cpu")) // here
    each = "" if ranks == 1 else f" on each of {ranks} ranks"
    kinds = {module.kind for module in model.modules() if getattr(module, "kind", None)}
    form = f"weights in {', '.join(sorted(kinds))}" if kinds else str(dtype).removeprefix("torch.")
    smaller = ""
    if device.type == "cpu" and ranks == 1:
        if not kinds:
            smaller = ", or pass weights='int8' or 'int4'"
        elif any(weights.values()) and not kinds & {"int4", "fp4"}:
            smaller = ", or pass weights='int4'"  # a model saved with weights keeps its own
    for place, free in available.items():
        if needed > free:
            raise MemoryError(
                f"load: out of memory: the model needs {tqdm.format_sizeof(needed, 'B')} in "
                f"{form}{each}, {place} has {tqdm.format_sizeof(free, 'B')} free; "
                f"load fewer layers with num_hidden_layers, or use more devices{smaller}"
            )
