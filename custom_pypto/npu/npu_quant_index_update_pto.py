"""``npu_quant_index_update_pto`` on an NPU."""

from .common import Arguments, KernelCall, Limits, name, program, rows, words
from .npu_quant_rows_pto import absent, operands

OP = "npu_quant_index_update_pto"


def check(a: Arguments) -> None:
    limits = Limits(OP, a)
    limits.dtype("x")
    dim = a.x.size(-1)
    limits.require(dim == 128, f"x.size({a.x.dim() - 1})", "128", dim)
    limits.contiguous("cache", "scale_cache")


def kernel_call(a: Arguments, out: None) -> KernelCall | None:
    if a.x.numel() == 0 or a.cache.numel() == 0:
        return None
    facts = program(OP).Facts(
        dtype=name(a.x.dtype),
        absent=absent(a),
        slot_words=a.slots.element_size() // 4,
        ready_on_host=Limits(OP, a).ready_on_host("slots"),
    )
    caches = dict(cache=rows(a.cache), scale_cache=a.scale_cache.view(-1, 1))
    tensors = operands(a, facts) | dict(slots=words(a.slots)) | caches
    return KernelCall(facts, tensors)
