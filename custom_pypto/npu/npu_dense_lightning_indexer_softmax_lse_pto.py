"""``npu_dense_lightning_indexer_softmax_lse_pto`` on an NPU."""

from torch import Tensor

from . import every_key
from .common import Arguments, KernelCall, Limits, padded, program, rows

OP = "npu_dense_lightning_indexer_softmax_lse_pto"


def check(a: Arguments) -> None:
    every_key.check(Limits(OP, a))


def kernel_call(a: Arguments, out: tuple[Tensor, Tensor]) -> KernelCall | None:
    largest, total = out
    keys = every_key.key_sequences(a)
    if total.numel() == 0 or keys.empty:
        largest.fill_(-float("inf"))
        total.zero_()
        return None
    facts = program(OP).Facts(**every_key.common_facts(a, keys))
    size = facts.tiling.chunk
    results = dict(softmax_max=largest.view(-1, 1), softmax_sum=total.view(-1, 1))
    tensors = dict(
        query=padded(rows(a.query_index), rows=facts.rows_behind_query),
        weights=a.weights.contiguous().view(-1, 1),
        # the last tile ends behind the keys
        key=padded(rows(a.key_index), rows=size),
    )
    tensors |= every_key.common_tensors(a, keys, size)
    return KernelCall(facts, tensors | results)
