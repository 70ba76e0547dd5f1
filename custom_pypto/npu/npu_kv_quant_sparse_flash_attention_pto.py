"""``npu_kv_quant_sparse_flash_attention_pto`` on an NPU."""

from torch import Tensor

from .common import Arguments, KernelCall, Limits, program
from .npu_sparse_flash_attention_pto import common_facts, common_tensors, is_filled

OP = "npu_kv_quant_sparse_flash_attention_pto"
LATENT, ROPE = 512, 64


def check(a: Arguments) -> None:
    limits = Limits(OP, a)
    limits.dtype("query")
    limits.paged("layout_kv")
    limits.heads(128)
    limits.require(a.rope_head_dim == ROPE, "rope_head_dim", f"{ROPE}", a.rope_head_dim)
    last, width = a.query.dim() - 1, LATENT + ROPE
    limits.require(
        a.query.size(last) == width, f"query.size({last})", f"{width}", a.query.size(last)
    )
    limits.contiguous("key")
    limits.checkable(a.block_table.size(1) * a.key.size(1), a.key.size(0))


def kernel_call(a: Arguments, out: Tensor) -> KernelCall | None:
    if is_filled(a, out):
        return None
    cache_rows = a.key.size(0) * a.key.size(1)
    facts = program(OP).Facts(**common_facts(OP, a), cache_rows=cache_rows)
    tensors = common_tensors(a, facts) | dict(out=out.view(-1, out.size(-1)))
    return KernelCall(facts, tensors)
