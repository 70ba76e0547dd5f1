"""Calls of the public ops on an NPU, from the cases of benchmarks/npu_cases.py."""

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import npu_cases
import torch
from measure import interleaved
from torch import Tensor
from torch.utils._pytree import tree_map_only

import custom_pypto

IN_A_ROW = 20  # calls that the host launches without waiting
ROUNDS = 15


@dataclass
class Call:
    """A case as a call of a public op."""

    case: npu_cases.Case

    def on(self, device: str) -> Callable[[], object]:
        """The call with its tensors on a device, moved there once."""
        moved = tree_map_only(Tensor, lambda tensor: tensor.to(device), self.case.arguments)
        return functools.partial(getattr(custom_pypto, self.case.op), **moved)

    def rooflines(self) -> tuple[float, float]:
        """µs that the call's bytes and its products take at least."""
        case = self.case
        return case.bytes / npu_cases.HBM_BYTES_PER_US, case.flop / npu_cases.CUBE_FLOP_PER_US

    def check(self, out) -> None:
        """Rejects a result of another shape than the Meta function's, and one that is not finite.

        ``verify`` compares values.
        """
        for got, expected in zip(_tensors(out), _tensors(self.on("meta")()), strict=True):
            if got.shape != expected.shape or got.dtype != expected.dtype:
                raise ValueError(
                    f"must be {list(expected.shape)} of {expected.dtype}, "
                    f"got {list(got.shape)} of {got.dtype}"
                )
            if got.is_floating_point() and not bool(got.isfinite().all()):
                raise ValueError("must be finite, got NaN or infinity")


def calls(op: str, quick: bool) -> list[Call]:
    """The cases of an op; with ``quick`` the one with the least work."""
    found = (Call(case) for case in npu_cases.cases(op))
    return [min(found, key=lambda call: call.case.flop)] if quick else list(found)


def timed(sides: dict[str, Callable], quick: bool) -> dict[str, tuple[float, float]]:
    """Median µs of each side: of a call that the host waits for, and of a call in a row of them.

    The rounds of all sides are interleaved.
    """
    times = 1 if quick else IN_A_ROW
    found = {}
    for count in (1, times):
        repeated = {name: functools.partial(_row, call, count) for name, call in sides.items()}
        seconds = interleaved(repeated, 2 if quick else ROUNDS, clock=time.perf_counter)
        for name, each in seconds.items():
            found.setdefault(name, []).append(1e6 * statistics.median(each) / count)
    return {name: tuple(values) for name, values in found.items()}


def _row(call: Callable, count: int) -> None:
    for _ in range(count):
        call()
    torch.npu.synchronize()


def _tensors(out) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else list(out)
