"""Processes of a test's own, and what they take of memory."""

import ctypes
import functools
import mmap
import multiprocessing.forkserver
import os
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

MIB = 2**20
# What memory may grow by after the first tenth of the calls: pages that the allocators of C, Python
# and torch come to use late, seen up to 0.4 MiB. A leak of 210 bytes a call shows among 10,000.
FLAT = 2 * MIB
# What a call may take besides its tensors: pages of code, stacks of threads, free pages that the
# allocators keep. Seen up to 2 MB, by when the threads that read give their buffers back.
PAGES = 8 * MIB


@functools.cache
def forkserver():
    """Forks a process that has imported the models and done nothing else, in place of 3 CPU seconds
    for a new one. Its environment is that of the first call."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tiny", "custom_pypto.models"])
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # before Python 3.14 its own
        multiprocessing.forkserver.ensure_running()
    return context


def in_a_process(function, *args):
    """The result of ``function`` in a process of its own, whose memory is nobody else's."""
    with ProcessPoolExecutor(1, mp_context=forkserver()) as processes:
        return processes.submit(function, *args).result()


def in_ranks(work, folder: Path, *args, ranks: int = 2):
    """Calls ``work(rank, folder, *args)`` in so many processes of a group, on a thread each."""
    forkserver()
    of_each = (work, ranks, folder, *args)
    torch.multiprocessing.start_processes(
        in_group, of_each, nprocs=ranks, start_method="forkserver"
    )


def in_group(rank: int, work, ranks: int, folder: Path, *args):
    torch.set_num_threads(1)
    dist.init_process_group(
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    work(rank, folder, *args)
    # The group's destructor waits for its thread, with the GIL, for which the thread may wait to
    # free the state of its last work (seen with torch 2.13 and DistributedDataParallel).
    time.sleep(0.1)
    dist.destroy_process_group()


def status(line: str) -> int:
    """Bytes of the process as Linux counts them: VmRSS now, VmHWM at the peak."""
    lines = Path("/proc/self/status").read_text()
    return int(re.search(rf"^{line}:\s*(\d+) kB", lines, re.MULTILINE)[1]) * 1024


def growth(call, calls: int) -> int:
    """Bytes that the process grows by, after a tenth of the calls."""
    for _ in range(calls // 10):
        call()
    before = status("VmRSS")
    for _ in range(calls - calls // 10):
        call()
    return status("VmRSS") - before


def peak_of(call) -> int:
    """Bytes that a call takes at its peak."""
    ctypes.CDLL(None).malloc_trim(0)  # memory that is free, but there, would be taken unseen
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS")
    call()
    return status("VmHWM") - before


def at_the_end_of_memory(x: Tensor | None) -> Tensor | None:
    """A copy, and behind it memory that ends the process when it is read."""
    if x is None:
        return None
    size = x.untyped_storage().nbytes()
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    last = ctypes.c_void_p(begin + pages)
    assert ctypes.CDLL(None).mprotect(last, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    values = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=pages - size)
    values.copy_(torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()))
    return values.view(x.dtype).as_strided(x.size(), x.stride())
