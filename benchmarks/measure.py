"""How benchmarks time and report: interleaved repeats, floors, runs."""

import ctypes
import math
import multiprocessing
import os
import re
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from unittest import mock

import busy
import results
import torch

from custom_pypto import env

READ = 256 << 20  # bytes, more than caches hold: their sum tells the bandwidth of the moment


def user_seconds() -> float:
    """CPU time of this thread, without the kernel's.

    The kernel clears fresh pages, and in a virtual machine the host may have to find them first:
    that can take longer than the computation (page_faults.md).
    """
    return resource.getrusage(resource.RUSAGE_THREAD).ru_utime


def peak_over(call: Callable[[], object]) -> int:
    """Peak resident bytes of a call, beyond those resident before it."""

    def status(key: str) -> int:
        text = Path("/proc/self/status").read_text()
        return 1024 * int(re.search(rf"{key}:\s*(\d+) kB", text)[1])

    ctypes.CDLL(None).malloc_trim(0)  # returns freed memory, which the call could otherwise reuse
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    call()
    return status("VmHWM") - before


def interleaved(
    calls: dict[str, Callable], repeats: int, clock: Callable[[], float] | None = None
) -> dict[str, list[float]]:
    """Seconds of each call, all once per round, so that they share the state of the machine.

    One thread is timed by its own CPU time, which other processes cannot stretch; more by clock.
    """
    if clock is None:
        one = torch.get_num_threads() == 1
        clock = time.thread_time if one else time.monotonic
    for call in calls.values():
        call()  # warm up
    seconds = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = clock()
            call()
            seconds[name].append(clock() - start)
    return seconds


def ratio(slow: list[float], fast: list[float]) -> float:
    """Median of the rounds' quotients."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


@dataclass(frozen=True)
class Floor:
    """A figure and its limit; without a limit, the kernels of this process have none.

    A missed floor is measured again, and counts as missed only if nobody disturbed a measurement.
    """

    name: str
    measure: Callable[[], float]
    limit: float | None
    at_least: bool = True
    tries: int = 3

    def reached(self, figure: float) -> bool:
        return figure >= self.limit if self.at_least else figure <= self.limit

    def row(self) -> list[str]:
        """Name, best figure, limit, and ``ok``, ``MISSED``, ``no floor`` or who disturbs it."""
        if self.limit is None:
            kernels = torch.ops.custom_pypto.cpu_isa()
            return [self.name, "not measured", f"none for the kernels {kernels}", "no floor"]
        limit = f"{'at least' if self.at_least else 'at most'} {self.limit:.4g}"
        better = max if self.at_least else min
        best, said, tries = None, "", 0
        while tries < self.tries and (best is None or not self.reached(best)):
            before = busy.now()
            figure = self.measure()
            disturbed = busy.since(before)
            best = figure if best is None else better(best, figure)
            said = disturbed if tries == 0 or not disturbed else said
            tries += 1
        result = "ok" if self.reached(best) else f"BUSY: {said}" if said else "MISSED"
        return [self.name, f"{best:.4g}", limit, result]


def known(name: str, figure: float, limit: float, at_least: bool = True) -> Floor:
    """Of a figure that measuring again does not change."""
    return Floor(name, lambda: figure, limit, at_least, tries=1)


def no_floor(name: str) -> Floor:
    """Of a case that has a floor for other kernels only."""
    return Floor(name, lambda: math.nan, None)


@dataclass(frozen=True)
class Benchmark:
    """What the runner prints, checks and writes. All functions take the benchmark's options."""

    header: list[str]
    rows: Callable[..., Iterable[list[str]]]
    floors: Callable[..., Iterable[Floor]] | None = None
    cases: int = 1  # leading columns, which name a case
    variant: str = ""  # a format string of the options: runs of others stay beside it
    kernels: str = ""  # in place of the set of CPU kernels, where it has no part in the figures

    def run(self, rows: list[list[str]], command: str, options: dict) -> tuple[str, results.Run]:
        """The kernels and the run, as :mod:`results` stores them."""
        report = env.collect()
        cpu, versions = report["cpu"], report["versions"]
        return self.kernels or cpu["kernels_isa"], dict(
            variant=self.variant.format(**options),
            command=command,
            commit=commit(),
            date=str(date.today()),
            cpu=cpu["model"],
            threads=cpu["threads"],
            torch=versions["torch"],
            python=versions["python"],
            load=round(os.getloadavg()[0], 1),
            note="",
            case=self.header[: self.cases],
            figures=self.header[self.cases :],
            rows=[[*row[: self.cases], *map(results.number, row[self.cases :])] for row in rows],
        )


def check(floors: Iterable[Floor], command: str) -> int:
    """Prints each floor, then again those that were missed or could not be measured.

    Args:
        command: repeats the check.

    Returns:
        the exit code: 1 if a floor was missed, or the machine was too busy to say.
    """
    kernels, rows = torch.ops.custom_pypto.cpu_isa(), []
    for floor in floors:
        rows.append(floor.row())
        print(*rows[-1], sep="  ", flush=True)
    if not rows:
        print(f"no floor: {command} has none")
    failed = [row for row in rows if row[-1] not in ("ok", "no floor")]
    for name, figure, limit, result in failed:
        what = "missed" if result == "MISSED" else "too busy to measure"
        why = result.removeprefix("MISSED").removeprefix("BUSY")
        text = f"{what}: {name}, kernels {kernels}: {figure}, floor: {limit}{why}"
        print(f"{text}; to repeat: {command}", file=sys.stderr)
    return int(bool(failed))


def median_ms(seconds: list[float], digits: int = 2) -> str:
    return f"{statistics.median(seconds) * 1e3:.{digits}f}"


def in_own_process(function: Callable, *arguments, **variables: str):
    """The result of a function of a module, in a new process with these environment variables."""
    with mock.patch.dict(os.environ, variables):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(function, arguments)


def free_port() -> int:
    """Of this machine, for a server that is measured."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def machine() -> str:
    report = env.collect()
    cpu, versions = report["cpu"], report["versions"]
    return (
        f"{cpu['model']}, {cpu['threads']} thread(s), kernels {cpu['kernels_isa']}, "
        f"torch {versions['torch']}, Python {versions['python']}"
    )


def commit() -> str:
    """Of this checkout; "unknown" elsewhere."""
    if not shutil.which("git"):
        return "unknown"
    head = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(head, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"
