"""``npu_quant_index_update_pto`` on an NPU."""

import torch

from .common import Arguments, Launch, Limits, kernel, name, rows
from .npu_quant_rows_pto import operands

OP = "npu_quant_index_update_pto"


def check(a: Arguments) -> None:
    limits = Limits(OP, a)
    limits.dtype("x")
    dim = a.x.size(-1)
    limits.require(dim == 128, f"x.size({a.x.dim() - 1})", "128", dim)
    limits.contiguous("cache", "scale_cache")


def run(launch: Launch, a: Arguments, out: None) -> None:
    if a.x.numel() == 0 or a.cache.numel() == 0:
        return
    program = kernel(
        OP,
        dtype=name(a.x.dtype),
        rotates=a.hadamard is not None,
        slot_words=a.slots.element_size() // 4,
        ready_on_host=Limits(OP, a).ready_on_host("slots"),
    )
    slots = a.slots.contiguous().view(1, -1).view(torch.int32)
    cache, scale_cache = rows(a.cache), a.scale_cache.view(-1, 1)
    launch(program, (*operands(a), slots, cache, scale_cache), (cache, scale_cache))
