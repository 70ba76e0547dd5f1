"""Latency of the NPU programs by PyPTO's cost model; no NPU has been used.

    python benchmarks/bench_npu_model.py [--check] [--plot FILE] [--trace FOLDER] [--write]
    python benchmarks/bench_npu_model.py --tune {indexer,attention,fused} [--budget SECONDS]

``--check`` exits with 1 and names every missed floor; ``--tune`` searches tile settings and writes
the best into custom_pypto/kernels/tiling.py.

The figures are PyPTO's estimates for its simulated Atlas A2/A3 (24 cube and 48 vector cores). The
model prices the task graph, copies and matmuls. It prices gathers and top-k near zero, gives every
core its own memory bandwidth, and charges the full tile of a task, including invalid rows. The
figures therefore compare programs of the same kind and are not device times. The table also has the
two rooflines of the chip: minimal bytes over 1.42 TB/s, and minimal FLOP over 364 TFLOP/s in bf16.

Each call goes through custom_pypto.npu as on an NPU, with the tile settings of the package.
"""

import argparse
import sys
from pathlib import Path

from measure import table, write_section
from npu_cases import CUBE_FLOP_PER_US, HBM_BYTES_PER_US, Case, cases
from tune_npu_model import SUBJECTS, tune

from custom_pypto import simulation
from custom_pypto.requirements import installed_version

# The floors are for PyPTO 0.2.0. CANN 9.1's merges other tasks and charges them otherwise.
VERSION = installed_version("pypto")
FLOORS_TIMES = 1.0 if VERSION == "0.2.0" else 1.35


def floor_of(case: Case) -> float | None:
    return None if case.floor is None else FLOORS_TIMES * case.floor


def missed_floors(results: list[tuple[Case, simulation.Estimate]]) -> list[str]:
    """Names every floor that is not met."""
    missed = []
    for case, estimate in results:
        floor = floor_of(case)
        if floor is not None and estimate.latency_us > floor:
            missed.append(
                f"{case.op} at {case.shape}: {estimate.latency_us:.1f} µs, floor {floor:.1f}"
            )
    return missed


def report(results: list[tuple[Case, simulation.Estimate]]) -> str:
    rows = []
    for case, estimate in results:
        rows.append(
            [
                case.op,
                case.shape,
                f"{estimate.latency_us:.1f}",
                "-" if case.floor is None else f"{floor_of(case):.1f}",
                f"{estimate.utilisation:.0%}",
                str(estimate.tasks),
                str(estimate.edges),
                f"{case.bytes / HBM_BYTES_PER_US:.1f}",
                f"{case.flop / CUBE_FLOP_PER_US:.1f}",
            ]
        )
    header = [
        *("op", "B, S1, keys", "estimate µs", "floor µs", "cores busy", "tasks", "edges"),
        *("bytes µs", "FLOP µs"),
    ]
    return table(header, rows)


NOTE = f"""Estimates of PyPTO {VERSION}'s cost model for its simulated Atlas A2/A3, bf16, 128 heads
where none are named, K 2048, blocks of 128 keys. They are not device times: the model prices
gathers and top-k near zero, gives every core its own memory bandwidth, and a task its full tile,
whatever is valid. An estimate below its roofline shows just that. bytes µs: what must move at
least, over 1.42 TB/s; FLOP µs: what must be computed, over 364 TFLOP/s. Sinks and cmp_ratio: layers
of DeepSeek-V4 without rope, where keys are cached rows, of the indexer tokens. Times that others
measured on hardware cannot be compared with these. Picture (`--plot`): plots/npu_model.png. No NPU
has run these programs.
"""


def plot(results: list[tuple[Case, simulation.Estimate]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [f"{case.op} {case.shape}" for case, _ in results]
    bars = {
        "estimate of PyPTO's cost model": [e.latency_us for _, e in results],
        "bytes over 1.42 TB/s": [c.bytes / HBM_BYTES_PER_US for c, _ in results],
        "FLOP over 364 TFLOP/s": [c.flop / CUBE_FLOP_PER_US for c, _ in results],
    }
    figure, axes = plt.subplots(figsize=(9, 0.45 * len(names) + 1.5))
    for i, (label, values) in enumerate(bars.items()):
        axes.barh([y + 0.27 * i for y in range(len(names))], values, height=0.25, label=label)
    axes.set_yticks([y + 0.27 for y in range(len(names))], names)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("µs, simulated Atlas A2/A3, not a device")
    figure.legend(loc="upper center", ncols=len(bars))
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 if a floor is missed")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a bar chart")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="write timelines for Perfetto")
    parser.add_argument("--write", action="store_true", help="write the table into RESULTS.md")
    parser.add_argument("--tune", choices=list(SUBJECTS), help="search tile settings instead")
    parser.add_argument("--budget", type=float, default=600, help="seconds to tune for")
    options = parser.parse_args()
    if options.tune:
        tune(options.tune, options.budget)
        return 0

    if options.trace:
        options.trace.mkdir(parents=True, exist_ok=True)
    results, failed = [], []
    for case in cases():
        trace = None
        if options.trace:
            name = f"{case.op} {case.shape}".replace(", ", ",").replace(" ", "_")
            trace = options.trace / f"{name}.json"
        try:
            results.append((case, case.estimate(trace)))
        except simulation.SimulationError as error:  # report the other cases
            failed.append(f"{case.op} at {case.shape} failed: {error}")
        if sys.stderr.isatty():
            print(f"{case.op} {case.shape}", file=sys.stderr)
    missed = missed_floors(results)
    for line in failed:
        print(line, file=sys.stderr)
    text = f"{report(results)}\n\n{NOTE}"
    print(text)
    if options.write:
        command = "python benchmarks/bench_npu_model.py --write"
        write_section(f"NPU programs, PyPTO {VERSION} cost-model estimates", command, text)
    if options.plot:
        plot(results, options.plot)
    for line in missed:
        print(f"floor missed: {line}")
    return 1 if failed or (options.check and missed) else 0


if __name__ == "__main__":
    sys.exit(main())
