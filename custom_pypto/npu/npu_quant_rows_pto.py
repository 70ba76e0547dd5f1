"""``npu_quant_rows_pto`` on an NPU."""

from .common import Arguments, Limits

OP = "npu_quant_rows_pto"


def check(a: Arguments) -> None:
    limits = Limits(OP, a)
    limits.dtype("x")
    dim = a.x.size(-1)
    limits.require(dim == 128, f"x.size({a.x.dim() - 1})", "128", dim)
