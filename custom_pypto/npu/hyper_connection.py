"""``hyper_connection`` on an NPU."""

import torch
from torch import Tensor

from .common import Arguments, KernelCall, Limits, name, program

OP = "hyper_connection"


def check(a: Arguments) -> None:
    limits = Limits(OP, a)
    limits.dtype("streams")
    count, width = a.streams.size(2), a.streams.size(3)
    limits.require(count == 4, "streams.size(2)", "4", count)
    legal = width > 0 and width % 16 == 0
    limits.require(legal, "streams.size(3)", "a positive multiple of 16", width)
    # each is a part of the program
    limits.require(1 <= a.iterations <= 64, "iterations", "from 1 to 64", a.iterations)


def kernel_call(a: Arguments, out: tuple[Tensor, Tensor, Tensor]) -> KernelCall | None:
    post, comb, collapsed = out
    if post.numel() == 0:
        return None
    count, width = a.streams.shape[2:]
    streams = a.streams.contiguous().view(-1, count * width)
    facts = program(OP).Facts(
        dtype=name(a.streams.dtype),
        iterations=a.iterations,
        eps=a.eps,
        norm_eps=a.norm_eps,
        tokens=len(streams),
    )
    widths = (count, count, count * count)
    scales = [scale.expand(n) for scale, n in zip(a.scale.split(1), widths, strict=True)]
    tensors = dict(
        streams=streams,
        weight=a.weight.contiguous(),
        base=a.base.contiguous().view(1, -1),
        scales=torch.cat(scales).view(1, -1),
        post=post.view(-1, count),
        comb=comb.view(-1, count, count),
        collapsed=collapsed.view(-1, width),
    )
    return KernelCall(facts, tensors)
