"""Whether others disturb a measurement: what the kernel counted of all CPUs, less our own share."""

import os
import time
from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")
#: shares of the CPUs: of other processes, which take caches and memory bandwidth; of the host,
#: which takes a virtual machine's CPU away
MOST_OTHERS, MOST_STOLEN = 0.25, 0.05
SHORTEST = 0.2  # seconds; the kernel counts in hundredths


class Counted(NamedTuple):
    """Seconds: of the clock; of all CPUs, busy and stolen; of this process and its children."""

    clock: float
    busy: float
    stolen: float
    ours: float


def now() -> Counted:
    user, nice, system, _, _, irq, softirq, stolen = map(int, STAT.read_text().split()[1:9])
    each = os.sysconf("SC_CLK_TCK")
    busy = (user + nice + system + irq + softirq) / each
    return Counted(time.monotonic(), busy, stolen / each, sum(os.times()[:4]))


def since(before: Counted) -> str:
    """Who took the CPUs since then, and how much; empty: nobody took enough to disturb."""
    return between(before, now(), os.cpu_count() or 1)


def between(before: Counted, after: Counted, cpus: int) -> str:
    clock, busy, stolen, ours = (b - a for a, b in zip(before, after, strict=True))
    if clock < SHORTEST:
        return ""
    others, stolen = (busy - ours) / clock, stolen / clock
    if others > MOST_OTHERS * cpus:
        return f"other processes took {others:.1f} of {cpus} CPUs (/proc/stat)"
    if stolen > MOST_STOLEN * cpus:
        return f"the host took {stolen:.1f} of {cpus} CPUs away (steal in /proc/stat)"
    return ""
