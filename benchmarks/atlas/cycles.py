"""An op's `verify` on a CANN toolkit's simulator of the chip, which needs no NPU: its traces.

    python benchmarks/atlas/cycles.py OP FOLDER     # a trace for each launch: FOLDER/OP-*.json

The command line of `msprof op simulator` is the one that its guide documents (docs/npu.md). No
toolkit has run this program: only a stand-in for `msprof` has.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

# Atlas A2 and A3, for which the kernels are; a toolkit has a simulator for each of its chips
CHIPS = re.compile(r"Ascend910(B|_93)")
KERNELS = "PyPTO"  # how the names of PyPTO's kernels begin
LAUNCHES = 8  # at most, of the first checks
MINUTES = 20  # after which msprof ends the program and reads what is there
MEGABYTES = 64  # of a trace in the archive


def toolkit() -> tuple[str, str]:
    """``msprof`` and the chip whose simulator lies beside it; the chip is empty if none does."""
    found = shutil.which("msprof")
    if found is None:
        return "", ""
    folders = [folder / "tools/simulator" for folder in Path(found).resolve().parents]
    chips = sorted({x.name for folder in folders for x in folder.glob("Ascend*") if x.is_dir()})
    return found, next(filter(CHIPS.match, chips), "")


def lacking() -> str:
    """Why the program cannot run here; empty if it can."""
    msprof, chip = toolkit()
    if not msprof:
        return "CANN's msprof is not on PATH: source set_env.sh of a toolkit"
    return "" if chip else f"{msprof} has no simulator of Atlas A2 or A3 (tools/simulator)"


def main(op: str, folder: Path) -> int:
    msprof, chip = toolkit()
    # msprof rejects a folder into which others may write
    results = folder / op
    results.mkdir(mode=0o700, parents=True)
    options = [f"--soc-version={chip}", f"--output={results}", f"--kernel-name={KERNELS}"]
    options += [f"--launch-count={LAUNCHES}", f"--timeout={MINUTES}"]
    verify = [sys.executable, "-m", "custom_pypto", "verify", "--device", "npu", "--op", op]
    command = [msprof, "op", "simulator", *options, *verify]
    print(*command, flush=True)
    code = subprocess.run(command).returncode
    # of all cores of a launch; those of each core are one folder deeper
    traces = sorted(results.glob("OPPROF_*/**/simulator/trace.json"))
    for number, trace in enumerate(traces):
        size = trace.stat().st_size
        print(f"{trace.relative_to(results)}: {size} bytes")
        if size <= MEGABYTES * 2**20:
            os.replace(trace, folder / f"{op}-{number}.json")
    if not traces:
        print(
            f"FAILED  msprof ended with {code} and wrote no simulator/trace.json; its log is above"
        )
    return code if traces else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
