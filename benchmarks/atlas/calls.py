"""Calls of benchmarks/npu_cases.py on an NPU: checks of their results, and times."""

import functools
import statistics
import time
from collections.abc import Callable

import npu_cases
import torch
from measure import interleaved
from torch.utils._pytree import tree_leaves

IN_A_ROW = 20  # calls that the host launches without waiting
ROUNDS = 15


def cases(op: str, quick: bool) -> list[npu_cases.Case]:
    """Those of an op; with ``quick`` the first, of one sequence."""
    found = npu_cases.cases(op)
    return [next(found)] if quick else list(found)


def check(case: npu_cases.Case, out) -> None:
    """Rejects a result of another shape than the Meta function's, and one that is not finite.

    ``verify`` compares values.
    """
    for got, expected in zip(tree_leaves(out), tree_leaves(case.on("meta")()), strict=True):
        if got.shape != expected.shape or got.dtype != expected.dtype:
            raise ValueError(
                f"must be {list(expected.shape)} of {expected.dtype}, "
                f"got {list(got.shape)} of {got.dtype}"
            )
        if got.is_floating_point() and not bool(got.isfinite().all()):
            raise ValueError("must be finite, got NaN or infinity")


def eager(sides: dict[str, Callable], quick: bool) -> dict[str, dict[str, float]]:
    """Median µs of a call of each side, by how the host waits: for each call, or after a row."""
    rows = {name: functools.partial(_row, run, quick) for name, run in sides.items()}
    return {
        "alone µs": _medians(sides, 1, quick),
        "in a row µs": _medians(rows, _length(quick), quick),
    }


def replayed(sides: dict[str, Callable], quick: bool) -> dict[str, dict[str, float]]:
    """Median µs of a call of each side in a captured row, where the host launches nothing."""
    rows = {}
    for name, run in sides.items():
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            _row(run, quick)
        rows[name] = graph.replay
    return {"replayed µs": _medians(rows, _length(quick), quick)}


def _length(quick: bool) -> int:
    return 1 if quick else IN_A_ROW


def _row(run: Callable, quick: bool) -> None:
    for _ in range(_length(quick)):
        run()


def _medians(sides: dict[str, Callable], calls: int, quick: bool) -> dict[str, float]:
    """Median µs of a call, of sides that make so many before the host waits; interleaved."""

    def waited(run: Callable) -> None:
        run()
        torch.npu.synchronize()

    each = {name: functools.partial(waited, run) for name, run in sides.items()}
    seconds = interleaved(each, 2 if quick else ROUNDS, clock=time.perf_counter)
    return {name: 1e6 * statistics.median(s) / calls for name, s in seconds.items()}
