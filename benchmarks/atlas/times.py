"""Times an op on an NPU, next to the estimates of PyPTO's cost model and the rooflines.

    python benchmarks/atlas/times.py OP [--replay] [--quick]

Eager calls: "alone", the host waits for each; "in a row", the host launches 20 and waits once, so
that the slower one of host and device counts. ``--replay`` captures these 20 in a graph instead and
times its replays, in which the host launches nothing.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch_npu  # noqa: F401

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tests")]

from npu_cases import Case  # noqa: E402
from results import FOLDER, of_folder, table  # noqa: E402

from atlas import calls  # noqa: E402
from atlas.estimates import estimates  # noqa: E402
from custom_pypto.requirements import installed_version  # noqa: E402

ROOFLINES = "bytes µs and FLOP µs: what must move and be computed, at 1.42 TB/s and 364 TFLOP/s"


def prepared(op: str, quick: bool) -> tuple[list[tuple[Case, Callable]], bool]:
    """The calls whose first result passes its check, and whether all do."""
    ready, complete = [], True
    for case in calls.cases(op, quick):
        run = case.on("npu")
        begin = time.perf_counter()
        print(f"{case.title}: first call", end=" ", flush=True)
        try:
            calls.check(case, run())
            torch.npu.synchronize()
        except Exception as error:  # the other cases may work
            print(f"\nFAILED  {case.title}: {type(error).__name__}: {error}", flush=True)
            complete = False
            continue
        print(f"{time.perf_counter() - begin:.1f} s", flush=True)
        ready.append((case, run))
    return ready, complete


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("op")
    parser.add_argument("--replay", action="store_true", help="in a captured graph")
    parser.add_argument("--quick", action="store_true", help="the first case, two rounds")
    options = parser.parse_args()
    stored = of_folder(FOLDER)["npu", "pypto"]
    estimated, note = estimates(stored, installed_version("pypto"))
    ready, complete = prepared(options.op, options.quick)
    time_of = calls.replayed if options.replay else calls.eager
    columns = time_of({case.title: run for case, run in ready}, options.quick)
    rows = []
    for case, _ in ready:
        of = (case.name, case.shape)
        times, limits = [x[case.title] for x in columns.values()], case.rooflines()
        numbers = [[f"{us:.1f}" for us in some] for some in (times, limits)]
        rows.append([*of, *numbers[0], estimated.get(of, "-"), *numbers[1]])
    print(table(["op", "B, S1, keys", *columns, "estimate µs", "bytes µs", "FLOP µs"], rows))
    print(f"> estimate µs: {note}.\n> {ROOFLINES}.")
    print(f"{len(rows)} cases timed" + ("" if complete else ", others failed, see above"))
    return int(not complete)


if __name__ == "__main__":
    sys.exit(main())
