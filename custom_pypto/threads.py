"""The threads of torch: their stacks, how long they spin, and whether cores are left for them.

Imports the standard library only, before torch.
"""

import os
import re
import sys
from pathlib import Path

from .requirements import Problem

SPINNING, POLICY = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
SPINS = "3000"  # more cost speed beside busy processes: docs/cpu_kernels.md
CGROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def check_stack_size() -> None:
    """Rejects an ``OMP_STACKSIZE`` with which CPU kernels would end the process.

    Raises:
        ImportError: names the variable, the least and the given value.
    """
    given = os.environ.get("OMP_STACKSIZE", "")
    found = re.fullmatch(r"\s*(\d+)\s*([BKMG]?)\s*", given, re.IGNORECASE)
    if found is None:  # the OpenMP runtime ignores it, too
        return
    unit = {"B": 1, "": 2**10, "K": 2**10, "M": 2**20, "G": 2**30}[found[2].upper()]
    if int(found[1]) * unit < 20 * 2**10:  # with 16K sparse attention ends with SIGSEGV
        raise ImportError(
            "custom_pypto: OMP_STACKSIZE must be at least 20K, which threads of "
            f"CPU kernels need, got {given!r}; unset it"
        )


def bound_spinning() -> None:
    """Lets threads of torch spin for about 150 us when they wait for others, then sleep.

    libgomp's default is milliseconds, in which a thread that another process has displaced cannot
    come back to a core. libgomp reads the variable when torch loads it: this has no effect after
    torch is imported, nor on other OpenMP runtimes. What the user has set is left alone.
    """
    if "torch" not in sys.modules and not {SPINNING, POLICY} & os.environ.keys():
        os.environ[SPINNING] = SPINS


def oversubscription(threads: int) -> Problem | None:
    """Why ``threads`` of torch wait for cores, and the remedy; None: they do not."""
    cores, quota, busy = len(os.sched_getaffinity(0)), cpu_quota(), os.getloadavg()[0]
    allowed = min(cores, quota or cores)
    if threads > max(1, allowed):
        of = "its CPU quota" if allowed < cores else "its affinity"
        fitting = max(1, int(allowed))
        return Problem(
            f"torch has {threads} threads on the {allowed:g} cores of {of}",
            f"set OMP_NUM_THREADS={fitting}, or torch.set_num_threads({fitting})",
        )
    if threads > 1 and busy > (os.cpu_count() or cores):
        spins = not {SPINNING, POLICY} & os.environ.keys()
        sleep = f"import custom_pypto before torch, set {SPINNING}={SPINS}, or " if spins else ""
        return Problem(
            f"{busy:.1f} threads are busy on {os.cpu_count()} cores, torch has {threads}",
            f"{sleep}set OMP_NUM_THREADS=1",
        )
    return None


def cpu_quota() -> float | None:
    """Cores that the control groups of this process allow it on average; None: no limit."""
    quotas = []
    for line in _read(OWN_GROUPS).splitlines():
        controllers, path = line.split(":", 2)[1:]
        if controllers and "cpu" not in controllers.split(","):
            continue
        # version 2 names no controllers
        root = CGROUPS / controllers
        # in a container the path may be that on the host
        group = root / path.strip("/") if (root / path.strip("/")).is_dir() else root
        while True:  # each group above has a limit of its own
            if controllers:
                limit = [_read(group / f"cpu.cfs_{one}_us").strip() for one in ("quota", "period")]
            else:
                limit = _read(group / "cpu.max").split()
            if len(limit) == 2 and limit[0].isdigit():  # max and -1: none
                quotas.append(int(limit[0]) / int(limit[1]))
            if group == root:
                break
            group = group.parent
    return min(quotas, default=None)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
