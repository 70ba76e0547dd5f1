"""Latency of the NPU kernels by PyPTO's cost model; no NPU has been used.

The figures are PyPTO's estimates for its simulated Atlas A2/A3 (24 cube and 48 vector cores). The
model counts the task graph, copies and matmuls. It counts gathers and top-k near zero, gives every
core its own memory bandwidth, and charges the full tile of a task, including invalid rows. The
figures therefore compare programs of the same kind and are not device times. The table also has the
two rooflines of the chip: minimal bytes over 1.42 TB/s, and minimal FLOP over 364 TFLOP/s in bf16.

Each call goes through custom_pypto.npu as on an NPU, with the tile settings of the package.
"""

from collections.abc import Iterator
from pathlib import Path

from measure import Benchmark, Floor, known
from npu_cases import Case, cases

from custom_pypto import simulation
from custom_pypto.requirements import installed_version

PICTURE = Path(__file__).with_name("plots") / "npu_model.png"
# The floors are for PyPTO 0.2.0. CANN 9.1's merges other tasks and charges them otherwise.
VERSION = installed_version("pypto")
FLOORS_TIMES = 1.0 if VERSION == "0.2.0" else 1.35


def estimate(case: Case, trace: str) -> simulation.Estimate:
    if not trace:
        return case.estimate()
    folder = Path(trace)
    folder.mkdir(parents=True, exist_ok=True)
    return case.estimate(folder / f"{case.title.replace(', ', ',').replace(' ', '_')}.json")


def rows(trace: str, plot: bool) -> Iterator[list[str]]:
    """A case that fails ends the run after the others."""
    bars, failed = [], []
    for case in cases():
        try:
            found = estimate(case, trace)
        except simulation.SimulationError as error:
            failed.append(f"{case.name} at {case.shape} failed: {error}")
            continue
        least = case.rooflines()
        if case.floor is not None:  # a picture of all would be too high to read
            bars.append((case.title, found.latency_us, *least))
        yield [
            *(case.name, case.shape, f"{found.latency_us:.1f}"),
            "-" if case.floor is None else f"{FLOORS_TIMES * case.floor:.1f}",
            *(f"{100 * found.utilisation:.0f}", str(found.tasks), str(found.edges)),
            *(f"{us:.1f}" for us in least),
        ]
    if failed:
        raise SystemExit("\n".join(failed))
    if plot:
        draw(bars)


def floors(trace: str, plot: bool) -> Iterator[Floor]:
    for case in cases():
        if case.floor is not None:
            us = estimate(case, trace).latency_us
            name = f"{case.name} at {case.shape}, µs"
            yield known(name, us, FLOORS_TIMES * case.floor, at_least=False)


def draw(bars: list[tuple[str, float, float, float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names, *columns = zip(*bars, strict=True)
    labels = ("estimate of PyPTO's cost model", "bytes over 1.42 TB/s", "FLOP over 364 TFLOP/s")
    figure, axes = plt.subplots(figsize=(9, 0.45 * len(names) + 1.5))
    for i, (label, values) in enumerate(zip(labels, columns, strict=True)):
        axes.barh([y + 0.27 * i for y in range(len(names))], values, height=0.25, label=label)
    axes.set_yticks([y + 0.27 for y in range(len(names))], names)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("µs, simulated Atlas A2/A3, not a device")
    figure.legend(loc="upper center", ncols=len(labels))
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(PICTURE)


BENCHMARKS = {
    "npu": Benchmark(
        [
            *("op", "B, S1, keys", "estimate µs", "floor µs", "cores busy, %", "tasks", "edges"),
            *("bytes µs", "FLOP µs"),
        ],
        rows,
        floors,
        cases=2,
        variant=VERSION or "",
        kernels="pypto",
    )
}
