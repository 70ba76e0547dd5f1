"""Cost of an op call with CUSTOM_PYPTO_LOG off and at each of its levels.

    python benchmarks/bench_log.py [--repeats 15] [--write]
    python benchmarks/bench_log.py --check    # exit code 1 if off costs a microsecond or more

The op is add_custom on one element, the smallest possible call. "Off" is the overhead of the public
function over the dispatcher alone: one Python call, nothing else precedes the kernel. Each level is
timed in its own process, with its output discarded.
"""

import argparse
import logging
import os
import statistics
import subprocess
import sys

import torch
from measure import check, interleaved, machine, table, write_section

import custom_pypto

CALLS = 10_000
LEVELS = {
    "0": "off",
    "1": "the first call of each op",
    "2": "every call",
    "3": "and the inputs of a failing one",
}


def microseconds(repeats: int) -> tuple[float, float]:
    """Time of a call in the dispatcher, and the overhead of the public function."""
    x = torch.ones(1)
    dispatched, public = torch.ops.custom_pypto.add_custom.default, custom_pypto.add_custom

    def calls(function):
        def run():
            for _ in range(CALLS):
                function(x, x)

        return run

    seconds = interleaved({"op": calls(dispatched), "public": calls(public)}, repeats)
    more = [a - b for a, b in zip(seconds["public"], seconds["op"], strict=True)]
    each = 1e6 / CALLS
    return statistics.median(seconds["op"]) * each, statistics.median(more) * each


def at_level(level: str, repeats: int) -> tuple[float, float]:
    command = [sys.executable, __file__, "--measure", "--repeats", str(repeats)]
    environment = os.environ | {"CUSTOM_PYPTO_LOG": level}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    op, more = map(float, done.stdout.split())
    return op, more


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--write", action="store_true", help="write to benchmarks/RESULTS.md")
    parser.add_argument("--check", action="store_true", help="compare with the floor")
    parser.add_argument("--measure", action="store_true", help="print two numbers of this process")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.measure:
        logging.basicConfig(handlers=[logging.FileHandler(os.devnull)])
        print(*microseconds(args.repeats))
        return 0
    print(machine())
    if args.check:
        # one microsecond over the cost of off: more is better, as for the other floors
        return check([("log off, of 1 us", lambda: 1 / at_level("0", args.repeats)[1], 1.0)])
    rows = []
    for level, what in LEVELS.items():
        op, more = at_level(level, args.repeats)
        rows.append([level, what, f"{op:.2f}", f"{more:.2f}"])
        print(*rows[-1], sep="  ", flush=True)
    if args.write:
        header = ["CUSTOM_PYPTO_LOG", "logs", "dispatcher, us", "public function, us more"]
        write_section("Log", "python benchmarks/bench_log.py --write", table(header, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
