"""Runs cases until a time limit, a number of cases or a failure; `run.sh fuzz` starts it."""

import os

# a waiting thread must not occupy the core of a working one
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import mmap
import signal
import struct
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from random import Random

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz import THREADED, parse  # noqa: E402
from fuzz.generate import generate  # noqa: E402
from fuzz.judge import judge, on_cpu  # noqa: E402

EVERY = 60  # seconds between lines of progress


def run_case(seed: int, number: int, threads: int | None):
    """The case and its verdict."""
    torch.set_num_threads(threads or (3 if number % THREADED == 0 else 1))
    case = generate(Random(f"{seed}:{number}"))
    return case, judge(case)


def describe(case) -> str:
    lines = [f"{case.op}, values: {case.values}, broken: {', '.join(case.broken) or 'nothing'}"]
    for name, x in case.arguments.items():
        if on_cpu(x):
            text = f"{x.dtype} {tuple(x.shape)} strides {x.stride()} offset {x.storage_offset()}"
            if not x.is_floating_point() and 0 < x.numel() < 50:
                text += f" {x.tolist()}"
        else:
            text = repr(x)
        lines.append(f"  {name}: {text}")
    return "\n".join(lines)


def run_one(name: str, threads: int | None) -> int:
    seed, number = map(int, name.split(":"))
    print(describe(generate(Random(f"{seed}:{number}"))))
    print(run_case(seed, number, threads)[1])
    return 0


def run_many(args: argparse.Namespace, reached: mmap.mmap) -> int:
    """Writes the number of each case into ``reached`` before it runs."""
    seen, start, said = Counter(), time.monotonic(), 0.0
    number = 0

    def report() -> None:
        seconds = time.monotonic() - start
        total = sum(seen.values())
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(seen.items()))
        print(
            f"seed {args.seed}: {total} cases in {seconds:.0f} s, {total / seconds:.0f}/s: {kinds}",
            flush=True,
        )

    while True:
        seconds = time.monotonic() - start
        if number == args.cases or (args.cases is None and seconds > 60 * args.minutes):
            break
        if seconds > said + EVERY:
            said = seconds
            report()
        reached[:8] = struct.pack("q", number)
        try:
            case, outcome = run_case(args.seed, number, args.threads)
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
            print(f"again: bash run.sh fuzz --case {args.seed}:{number}", flush=True)
            return 1
        seen[f"{case.op} {outcome}"] += 1
        number += 1
    report()
    return 0


def main() -> int:
    args = parse(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends both processes, and says nothing
    warnings.simplefilter("ignore")  # about dtypes that torch will drop
    # fills unwritten outputs with NaN or the largest integer
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    if args.case:
        return run_one(args.case, args.threads)
    # in a child, so that the parent can report the case that crashed it
    reached = mmap.mmap(-1, 8)
    child = os.fork()
    if not child:
        os._exit(run_many(args, reached))
    print(f"seed {args.seed}, in process {child}", flush=True)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, 1):
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        number = struct.unpack("q", reached[:8])[0]
        print(f"ended by {how}; again: bash run.sh fuzz --case {args.seed}:{number}")
    return min(abs(code), 1)


if __name__ == "__main__":
    sys.exit(main())
