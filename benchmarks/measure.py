"""How the benchmarks time and report: interleaved repeats, medians, sections of RESULTS.md."""

import ctypes
import re
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch

from custom_pypto import env

RESULTS = Path(__file__).with_name("RESULTS.md")


def user_seconds() -> float:
    """CPU time of this thread, without the kernel's.

    The kernel clears fresh pages, and in a virtual machine the host may have to find them first:
    that can take longer than the computation (RESULTS.md, "Upstream decode from 8K to 16K").
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


def check(floors: list[tuple[str, Callable[[], float], float]], tries: int = 3) -> int:
    """Compares ratios with their floors: ``(name, measure, floor)``, more is better.

    A missed floor is measured again, since the machine may have been busy.

    Returns:
        the exit code: 1 if a floor was missed every time; its name goes to standard error.
    """
    missed = []
    for name, measure, floor in floors:
        best = 0.0
        for _ in range(tries):
            best = max(best, measure())
            if best >= floor:
                break
        else:
            missed.append(name)
        print(f"{name}  {best:.2f}  {floor:.2f}  {'ok' if best >= floor else 'MISSED'}", flush=True)
    for name in missed:
        print(f"missed: {name}", file=sys.stderr)
    return 1 if missed else 0


def machine() -> str:
    report = env.collect()
    cpu, versions = report["cpu"], report["versions"]
    return (
        f"{cpu['model']}, {cpu['threads']} thread(s), kernels {cpu['kernels_isa']}, "
        f"torch {versions['torch']}, Python {versions['python']}"
    )


def of_kernels(title: str) -> str:
    """The title of a section with figures of this CPU's kernels: each set has its own section."""
    return f"{title}, {torch.ops.custom_pypto.cpu_isa()}"


def when() -> str:
    """Commit, where this is a checkout, and date."""
    commit = ""
    if shutil.which("git"):
        head = ["git", "-C", str(RESULTS.parent), "rev-parse", "--short", "HEAD"]
        done = subprocess.run(head, capture_output=True, text=True)
        commit = f"commit {done.stdout.strip()}, " if done.returncode == 0 else ""
    return f"{commit}{date.today()}"


def write_section(title: str, command: str, text: str) -> None:
    """Replaces the text under ``## title`` of RESULTS.md."""
    section = f"## {title}\n\n`{command}`, {when()}\n\n{machine()}\n\n{text.strip()}\n"
    old = RESULTS.read_text() if RESULTS.exists() else "# Results\n"
    pattern = rf"## {re.escape(title)}\n.*?(?=\n## |\Z)"
    if re.search(pattern, old, re.S):
        new = re.sub(pattern, lambda _: section, old, flags=re.S)
    else:
        new = f"{old.rstrip()}\n\n{section}"
    RESULTS.write_text(new)


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
