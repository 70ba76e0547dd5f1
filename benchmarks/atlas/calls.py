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
from custom_pypto import schemas

IN_A_ROW = 20  # calls that the host launches without waiting
ROUNDS = 15
KEY_LENGTHS = (
    "actual_seq_lengths_kv",
    "actual_seq_lengths_key",
    "actual_seq_kvlen",
    "actual_seq_klen",
)


@dataclass
class Call:
    """A case as a call of a public op: its arguments by name, on the CPU."""

    case: npu_cases.Case
    op: str
    arguments: dict

    def on(self, device: str) -> Callable[[], object]:
        """The call with its tensors on a device, moved there once."""
        moved = tree_map_only(Tensor, lambda tensor: tensor.to(device), self.arguments)
        return functools.partial(getattr(custom_pypto, self.op), **moved)

    def fill(self, seed: int = 0) -> None:
        """Gives values to the tensors, of which the cases give only shapes.

        The time of gathers and sorting depends on values: all keys of one score, or the first 2048
        positions, are no selection. What the program reads as addresses stays as it is.
        """
        g = torch.Generator().manual_seed(seed)
        self.arguments |= {
            name: _values(name, value, g)
            for name, value in self.arguments.items()
            if isinstance(value, Tensor)
        }
        x = self.arguments
        if "sparse_indices" in x:
            visible = int(min(next(x[name] for name in KEY_LENGTHS if name in x)))
            if x.get("sparse_mode", 3) == 3:
                visible += 1 - x["query"].size(1)
            for row in x["sparse_indices"].flatten(0, 2):
                row.copy_(torch.randperm(visible, generator=g)[: len(row)])
        if self.op == "npu_kv_quant_sparse_flash_attention_pto":  # rows hold scales and rope
            cache = x["key"]
            slots = torch.arange(cache.size(0) * cache.size(1)).view(cache.shape[:2])
            latent, rope = (
                torch.randn(*slots.shape, width, generator=g).bfloat16() for width in (512, 64)
            )
            custom_pypto.npu_kv_quant_update_pto(latent, rope, slots, cache)

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
    found = (call for call in map(recorded, npu_cases.cases()) if call.op == op)
    return [min(found, key=lambda call: call.case.flop)] if quick else list(found)


def recorded(case: npu_cases.Case) -> Call:
    """What the case would call."""
    found: list[Call] = []

    class Recorder:
        def __getitem__(self, op: str) -> Callable:
            return lambda *args, **kwargs: found.append(
                Call(case, op, schemas.given(op, args, kwargs))
            )

    case.call(Recorder())
    (call,) = found
    return call


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


def _values(name: str, tensor: Tensor, g: torch.Generator) -> Tensor:
    if tensor.dtype == torch.int8:
        return torch.randint(-127, 128, tensor.shape, generator=g, dtype=torch.int8)
    if not tensor.is_floating_point() or tensor.any():  # lengths, ids; scales of one
        return tensor
    noise = 0.1 * torch.randn(tensor.shape, generator=g)
    return (noise.abs() if name.endswith("scale") else noise).to(tensor.dtype)
