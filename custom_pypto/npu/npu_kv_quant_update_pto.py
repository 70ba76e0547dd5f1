"""``npu_kv_quant_update_pto`` on an NPU."""

import torch

from .common import Arguments, KernelCall, Limits, name, program, rows, words

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


def kernel_call(a: Arguments, out: None) -> KernelCall | None:
    if a.latent.numel() == 0 or a.cache.numel() == 0:
        return None
    facts = program(OP).Facts(
        dtype=name(a.latent.dtype),
        slot_words=a.slots.element_size() // 4,
        ready_on_host=Limits(OP, a).ready_on_host("slots"),
    )
    tensors = dict(
        latent=rows(a.latent),
        rope=rows(a.rope),
        slots=words(a.slots),
        cache=rows(a.cache).view(torch.float32),
    )
    return KernelCall(facts, tensors)
