"""``npu_kv_quant_update_pto`` on an NPU."""

import torch

from .common import Arguments, Launch, Limits, kernel, name, rows

OP = "npu_kv_quant_update_pto"
LATENT, ROPE = 512, 64


def check(a: Arguments) -> None:
    limits = Limits(OP, a)
    limits.dtype("latent")
    last = a.latent.dim() - 1
    for argument, width in (("latent", LATENT), ("rope", ROPE)):
        size = getattr(a, argument).size(last)
        limits.require(size == width, f"{argument}.size({last})", f"{width}", size)
    limits.contiguous("cache")


def run(launch: Launch, a: Arguments, out: None) -> None:
    if a.latent.numel() == 0 or a.cache.numel() == 0:
        return
    program = kernel(
        OP,
        dtype=name(a.latent.dtype),
        slot_words=a.slots.element_size() // 4,
        ready_on_host=Limits(OP, a).ready_on_host("slots"),
    )
    cache = rows(a.cache).view(torch.float32)
    slots = a.slots.contiguous().view(1, -1).view(torch.int32)
    launch(program, (rows(a.latent), rows(a.rope), slots, cache), (cache,))
