"""Memory that this process can still allocate."""

import resource

import psutil
import torch


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
