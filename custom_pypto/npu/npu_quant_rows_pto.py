"""``npu_quant_rows_pto`` on an NPU."""

from torch import Tensor

from .common import Arguments, Launch, Limits, kernel, name, padded, rows

OP = "npu_quant_rows_pto"


def check(a: Arguments) -> None:
    limits = Limits(OP, a)
    limits.dtype("x")
    dim = a.x.size(-1)
    limits.require(dim == 128, f"x.size({a.x.dim() - 1})", "128", dim)


def run(launch: Launch, a: Arguments, out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    if a.x.numel() == 0:
        return out
    values, scales = out[0].view(-1, a.x.size(-1)), out[1].view(-1, 1)
    program = kernel(OP, dtype=name(a.x.dtype), rotates=a.hadamard is not None)
    launch(program, (*operands(a), values, scales), (values, scales))
    return out


TOKENS = 16  # of a tile, whose rows a product loads whole


def operands(a: Arguments) -> tuple[Tensor, Tensor]:
    """``x`` as the programs take it, and ``hadamard`` or what stands for None."""
    x = rows(a.x)
    if a.hadamard is None:
        return x, x.new_empty(1, 1)
    return padded(x, rows=-len(x) % TOKENS), a.hadamard.contiguous()
