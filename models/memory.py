"""Memory that this process can still allocate, and large tensors in it."""

import ctypes
import mmap
import resource

import psutil
import torch
from torch._C._functorch import is_functorch_wrapped_tensor, peek_interpreter_stack
from torch._subclasses.fake_tensor import is_fake

CPU = torch.device("cpu")


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
    available = psutil.virtual_memory().available
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return available
    return min(available, limit - psutil.Process().memory_info().vms)


def empty(shape, dtype: torch.dtype, device: torch.device = CPU) -> torch.Tensor:
    """An uninitialised tensor, for much that is read often: on Linux in pages of 2 MiB.

    Fewer pages mean fewer misses in the TLB, above all in a virtual machine.

    Raises:
        torch.OutOfMemoryError: of any allocator; torch's own on a CPU is a RuntimeError.
    """
    try:
        tensor = torch.empty(shape, dtype=dtype, device=device)
    except RuntimeError as error:
        if not any(word in str(error) for word in ("allocate", "memory", "overflow")):
            raise  # of another kind: torch has one class for all
        raise torch.OutOfMemoryError(str(error)) from error
    has_memory = is_readable(tensor) and not is_functorch_wrapped_tensor(tensor)
    if has_memory and hasattr(mmap, "MADV_HUGEPAGE"):
        huge = 2**21
        start = -(-tensor.data_ptr() // huge) * huge
        size = (tensor.data_ptr() + tensor.nbytes - start) // huge * huge
        if size > 0:  # advice: nothing depends on its result
            libc = ctypes.CDLL(None)
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)
    return tensor
