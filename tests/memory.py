"""What a process takes of memory."""

import ctypes
import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

MIB = 2**20
# What memory may grow by after the first tenth of the calls: pages that the allocators of C, Python
# and torch come to use late, seen up to 0.4 MiB. A leak of 210 bytes a call shows among 10,000.
FLAT = 2 * MIB


def in_a_process(function, *args):
    """The result of ``function`` in a process of its own, whose memory is nobody else's."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as processes:
        return processes.submit(function, *args).result()


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
