"""Times an op on an NPU beside the estimates of PyPTO's cost model and the rooflines.

    python benchmarks/atlas/times.py OP [--replay] [--quick]

Eager calls: "alone", the host waits for each; "in a row", the host launches 20 and waits once, so
that the slower one of host and device counts. ``--replay`` captures these 20 in a graph instead and
times its replays, in which the host launches nothing.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import torch_npu  # noqa: F401

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tests")]

from measure import interleaved, table  # noqa: E402

from atlas.calls import IN_A_ROW, ROUNDS, Call, calls, timed  # noqa: E402
from atlas.estimates import RESULTS, estimates  # noqa: E402
from custom_pypto.requirements import installed_version  # noqa: E402

ROOFLINES = "bytes µs and FLOP µs: what must move and be computed, at 1.42 TB/s and 364 TFLOP/s"


def eager(ready: list[tuple[Call, object]], quick: bool) -> dict[str, list[str]]:
    sides = timed({_name(call): run for call, run in ready}, quick)
    return {name: [f"{alone:.1f}", f"{row:.1f}"] for name, (alone, row) in sides.items()}


def replayed(ready: list[tuple[Call, object]], quick: bool) -> dict[str, list[str]]:
    count = 1 if quick else IN_A_ROW
    graphs = {}
    for call, run in ready:
        graphs[_name(call)] = graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            for _ in range(count):
                run()

    def replay(graph):
        graph.replay()
        torch.npu.synchronize()

    seconds = interleaved(
        {name: lambda graph=graph: replay(graph) for name, graph in graphs.items()},
        2 if quick else ROUNDS,
        clock=time.perf_counter,
    )
    return {name: [f"{1e6 * statistics.median(s) / count:.1f}"] for name, s in seconds.items()}


def _name(call: Call) -> str:
    return f"{call.case.name} {call.case.shape}"


def prepared(op: str, quick: bool) -> tuple[list[tuple[Call, object]], bool]:
    """The calls whose first result passes its check, and whether all do."""
    ready, failed = [], False
    for call in calls(op, quick):
        run = call.on("npu")
        begin = time.perf_counter()
        print(f"{_name(call)}: first call", end=" ", flush=True)
        try:
            call.check(run())
            torch.npu.synchronize()
        except Exception as error:  # the other cases may work
            print(f"\nFAILED  {_name(call)}: {type(error).__name__}: {error}", flush=True)
            failed = True
            continue
        print(f"{time.perf_counter() - begin:.1f} s", flush=True)
        ready.append((call, run))
    return ready, not failed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("op")
    parser.add_argument("--replay", action="store_true", help="in a captured graph")
    parser.add_argument("--quick", action="store_true", help="the smallest case, two rounds")
    options = parser.parse_args()
    estimated, note = estimates(RESULTS.read_text("utf-8"), installed_version("pypto"))
    ready, complete = prepared(options.op, options.quick)
    measured = (replayed if options.replay else eager)(ready, options.quick)
    columns = ["replayed µs"] if options.replay else ["alone µs", "in a row µs"]
    rows = []
    for call, _ in ready:
        of = (call.case.name, call.case.shape)
        limits = [f"{limit:.1f}" for limit in call.rooflines()]
        rows.append([*of, *measured[_name(call)], estimated.get(of, "-"), *limits])
    print(table(["op", "B, S1, keys", *columns, "estimate µs", "bytes µs", "FLOP µs"], rows))
    print(f"> estimate µs: {note}.\n> {ROOFLINES}.")
    print(f"{len(rows)} cases timed" + ("" if complete else ", others failed, see above"))
    return int(not complete)


if __name__ == "__main__":
    sys.exit(main())
