"""The arguments of :func:`models.load`."""

import re
from dataclasses import dataclass

import torch

from ..cache.layout import check_int
from ..weights.choice import Weights, check_weights

UNITS = {f"{prefix}B": 1000**i for i, prefix in enumerate("KMGT", 1)}
UNITS |= {f"{prefix}iB": 1024**i for i, prefix in enumerate("KMGT", 1)}


def check_memory_option(memory: str | int | None) -> int | None:
    """The option ``memory`` of :func:`models.load`, in bytes.

    Raises:
        TypeError, ValueError: names the argument, what was expected and what came.
    """
    if memory is None:
        return None
    what = "load: memory must be bytes, or a string such as '64GB' or '60GiB'"
    if isinstance(memory, bool) or not isinstance(memory, (int, str)):
        raise TypeError(f"{what}, got {memory!r}")
    if isinstance(memory, int):
        number, unit = float(memory), 1
    else:
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B)\s*", memory)
        if found is None:
            raise ValueError(f"{what}, got {memory!r}")
        number, unit = float(found[1]), UNITS[found[2]]
    if number <= 0:
        raise ValueError(f"{what}, more than 0, got {memory!r}")
    return int(number * unit)


def check_activations(activations: str | None, memory: int | None) -> None:
    """The option ``activations`` of :func:`models.load`.

    Raises:
        ValueError: names the argument, what was expected and what came.
    """
    if activations not in (None, "int8"):
        raise ValueError(f"load: activations must be 'int8' or None, got {activations!r}")
    if activations is not None and memory is not None:
        raise ValueError(
            "load: activations must be None with memory, whose experts in files are not "
            f"multiplied by rounded activations, got {activations!r}; omit one of them"
        )


@dataclass
class Request:
    """The arguments of ``load``, validated."""

    dtype: torch.dtype | None  # None: "auto"
    num_hidden_layers: int | None
    device: torch.device | str | None
    tensor_parallel: bool
    expert_parallel: bool
    weights: dict[str, str | None]  # of experts and of the rest
    memory: int | None  # bytes for weights; None: the whole model is in memory
    mtp: bool = False  # with the layer that drafts
    activations: str | None = None  # what layers with weights in int8 or 4 bits round theirs to

    @classmethod
    def of(
        cls,
        dtype: torch.dtype | str,
        num_hidden_layers: int | None,
        device: torch.device | str | None,
        tensor_parallel: bool,
        expert_parallel: bool,
        weights: Weights,
        memory: str | int | None,
        mtp: bool = False,
        activations: str | None = None,
    ) -> "Request":
        """
        Raises:
            TypeError, ValueError: names the argument, what was expected and what came.
        """
        if not isinstance(mtp, bool):
            raise TypeError(f"load: mtp must be True or False, got {mtp!r}")
        if mtp and num_hidden_layers is not None:
            raise ValueError(
                "load: mtp must be False with num_hidden_layers, got True with num_hidden_layers="
                f"{num_hidden_layers!r}; omit one of them"
            )
        wanted, formats = check_dtype(dtype), check_weights(weights)
        if num_hidden_layers is not None:
            check_int("load: num_hidden_layers", num_hidden_layers)
        place, limit = check_device(device), check_memory_option(memory)
        if limit is not None and place.type != "cpu":
            raise ValueError(
                "load: device must be None or 'cpu' with memory, which says how much of a model is "
                f"in that of this machine, got {device!r}; omit one of them"
            )
        check_activations(activations, limit)
        ways = tensor_parallel, expert_parallel
        return cls(wanted, num_hidden_layers, device, *ways, formats, limit, mtp, activations)

    @property
    def shared(self) -> bool:
        """Whether ranks share the model."""
        return self.tensor_parallel or self.expert_parallel


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
