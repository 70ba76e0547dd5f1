"""Memory that this process can still allocate, and large tensors in it."""

import contextlib
import math
import mmap
import resource
from pathlib import Path

import psutil
import torch
from torch._C._functorch import is_functorch_wrapped_tensor, peek_interpreter_stack
from torch._subclasses.fake_tensor import is_fake

CPU = torch.device("cpu")
HUGE = 2**21  # bytes of a page
# limit and use of memory of a control group, in Linux's version 2 and 1
GROUP_FILES = [
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
]


def has_numbers(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has numbers; in a graph, on the meta device or if fake, it has none."""
    if torch.compiler.is_compiling():
        return False
    return tensor.device.type != "meta" and not is_fake(tensor)


def is_readable(tensor: torch.Tensor) -> bool:
    """Whether numbers of ``tensor`` can be read here; those of an accelerator would stall it."""
    return has_numbers(tensor) and tensor.device.type == "cpu"


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` is running; the ops have no rules for any."""
    return not torch.compiler.is_compiling() and peek_interpreter_stack() is not None


def free_memory(device: torch.device) -> int:
    """Bytes that this process can still allocate on ``device``; on a CPU, without swapping."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        module.empty_cache()  # else blocks that torch caches would count as used
        return module.mem_get_info(device)[0]
    available = min(psutil.virtual_memory().available, free_in_container())
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return available
    return min(available, limit - psutil.Process().memory_info().vms)


def free_in_container(root: Path = Path("/")) -> int | float:
    """Bytes that the control groups of this process still allow, as those of a container.

    Pages of files count as used, but are given back on demand.
    """
    free, folders = math.inf, []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return free
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base = root / "sys/fs/cgroup"
        if controllers == "memory":  # of version 1
            base /= "memory"
        elif controllers:
            continue
        group = base / path.lstrip("/")
        folders += [one for one in (group, *group.parents) if one.is_relative_to(base)]
    for folder in folders:
        for limit, used in GROUP_FILES:
            try:
                most = (folder / limit).read_text().strip()
                now = int((folder / used).read_text())
                stat = dict(map(str.split, (folder / "memory.stat").read_text().splitlines()))
            except OSError:
                continue
            if most != "max":
                files = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
                free = min(free, max(int(most) - now + files, 0))
    return free


def empty(shape, dtype: torch.dtype, device: torch.device = CPU, beside: int = 0) -> torch.Tensor:
    """An uninitialised tensor, for much that is read often: on Linux in pages of 2 MiB from its
    first byte on. A rest is in small ones where more than a quarter of one would be unused, or
    beside much more than an eighth of all or three quarters of one.

    Fewer pages mean fewer misses in the TLB, above all in a virtual machine.

    Args:
        beside: bytes that are read with it, such as the values of its scales, and count with it.

    Raises:
        torch.OutOfMemoryError: of any allocator; torch's own on a CPU is a RuntimeError.
    """
    size = math.prod(shape) * dtype.itemsize
    whole = -(-size // HUGE) * HUGE
    if whole - size > max(HUGE // 4, min((size + beside) // 8, HUGE * 3 // 4)):
        whole -= HUGE
    if whole and is_plain(device):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        # an exact one may still fit where there is no room to align this one
        with contextlib.suppress(OSError, OverflowError):
            memory = mmap.mmap(-1, max(size, whole) + HUGE, flags=flags)
            start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE
            with contextlib.suppress(OSError):  # of a kernel without such pages
                memory.madvise(mmap.MADV_HUGEPAGE, start, whole)
            tensor = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start)
            return tensor.view(dtype).view(shape)
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except (RuntimeError, TypeError) as error:
        if not any(word in str(error) for word in ("allocate", "memory", "verflow")):
            raise  # of another kind: torch has one class for all
        raise torch.OutOfMemoryError(str(error)) from error


def is_plain(device: torch.device) -> bool:
    """Whether a tensor that is made now is one alone, in memory whose pages can be chosen."""
    made = torch.empty((0,), device=device)
    is_own = is_readable(made) and not is_functorch_wrapped_tensor(made)
    return is_own and hasattr(mmap, "MADV_HUGEPAGE")
