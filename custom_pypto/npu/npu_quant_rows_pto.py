"""``npu_quant_rows_pto`` on an NPU."""

from typing import Any

from torch import Tensor

from .common import Arguments, KernelCall, Limits, name, padded, program, rows

OP = "npu_quant_rows_pto"


def check(a: Arguments) -> None:
    limits = Limits(OP, a)
    limits.dtype("x")
    dim = a.x.size(-1)
    limits.require(dim == 128, f"x.size({a.x.dim() - 1})", "128", dim)


def kernel_call(a: Arguments, out: tuple[Tensor, Tensor]) -> KernelCall | None:
    if a.x.numel() == 0:
        return None
    facts = program(OP).Facts(dtype=name(a.x.dtype), absent=absent(a))
    results = dict(rows=out[0].view(-1, a.x.size(-1)), scales=out[1].view(-1, 1))
    return KernelCall(facts, operands(a, facts) | results)


def absent(a: Arguments) -> tuple[str, ...]:
    return ("hadamard",) if a.hadamard is None else ()


def operands(a: Arguments, facts: Any) -> dict[str, Tensor | None]:
    """``x`` and ``hadamard``, as the programs take them."""
    x, hadamard = rows(a.x), None if a.hadamard is None else a.hadamard.contiguous()
    return dict(x=padded(x, rows=facts.missing_rows(len(x))), hadamard=hadamard)
