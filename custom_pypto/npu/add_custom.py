"""``add_custom`` on an NPU."""

from torch import Tensor

from .common import Arguments, Launch, Limits, kernel, name

OP = "add_custom"


def check(a: Arguments) -> None:
    Limits(OP, a).dtype("self")


def run(launch: Launch, a: Arguments, out: Tensor) -> Tensor:
    if out.numel() == 0:
        return out
    flat = a.self.new_empty(out.numel())
    tensors = (a.self.reshape(-1).contiguous(), a.other.reshape(-1).contiguous(), flat)
    launch(kernel(OP, dtype=name(a.self.dtype)), tensors, (flat,))
    return flat.view(out.shape)


def backward(launch: Launch, self: Tensor) -> tuple[Tensor, Tensor]:
    return self.clone(), self.clone()
