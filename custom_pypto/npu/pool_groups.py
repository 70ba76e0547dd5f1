"""``pool_groups`` on an NPU. Torch's ops compute which groups are complete, on the device."""

import torch
from torch import Tensor

from .common import Arguments, KernelCall, Limits, name, program, rows

OP = "pool_groups"


def check(a: Arguments) -> None:
    limits = Limits(OP, a)
    limits.dtype("state")
    rate, ring = a.bias.size(0), a.state.size(1)
    limits.require(rate <= 128, "bias.size(0)", "at most 128", rate)
    limits.require(a.width % 16 == 0, "width", "a multiple of 16", a.width)
    # so that the tokens of a group are in at most two runs of rows
    limits.require(ring >= rate, "state.size(1)", f"at least {rate} (rows of bias)", ring)
    limits.contiguous("state")


def kernel_call(a: Arguments, out: tuple[Tensor, Tensor]) -> KernelCall | None:
    sums, complete = out
    if complete.numel() == 0:
        return None
    rate = a.bias.size(0)
    group = torch.arange(1, complete.size(1) + 1, device=sums.device)
    group = a.start.clamp(min=0).long().unsqueeze(1) // rate + group
    complete.copy_(group * rate <= a.lengths.unsqueeze(1))
    state, blocks = a.state, a.blocks
    if state.size(0) == 0:  # no block is known
        state = state.new_empty(1, *state.shape[1:])
        blocks = torch.full_like(blocks, -1)
    facts = program(OP).Facts(
        dtype=name(state.dtype),
        ring=state.size(1),
        ready_on_host=Limits(OP, a).ready_on_host("blocks", "start", "lengths"),
    )
    tensors = dict(
        state=rows(state),
        blocks=blocks.contiguous(),
        values=rows(a.values),
        bias=a.bias.contiguous(),
        start=a.start.contiguous(),
        lengths=a.lengths.contiguous(),
        sums=rows(sums),
    )
    return KernelCall(facts, tensors)
