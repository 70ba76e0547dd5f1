"""``npu_quant_lightning_indexer_pto`` on an NPU."""

from torch import Tensor

from .common import MOST_COUNTED, Arguments, KernelCall, Limits, name, program
from .npu_lightning_indexer_pto import (
    check_cache,
    check_query,
    common_facts,
    common_tensors,
    is_filled,
)

OP = "npu_quant_lightning_indexer_pto"


def check(a: Arguments) -> None:
    limits = Limits(OP, a)
    check_cache(limits)
    check_query(limits)
    # else the last tile of a block, of 32 rows, is loaded from behind it
    block_size = a.key.size(1)
    limits.require(block_size % 32 == 0, "key.size(1)", "a multiple of 32", block_size)
    limits.contiguous("key", "key_dequant_scale")
    # block ids pass through float32
    blocks = a.key.size(0)
    limits.require(blocks <= MOST_COUNTED, "key.size(0)", "at most 16 million", blocks)


def kernel_call(a: Arguments, out: Tensor) -> KernelCall | None:
    if is_filled(a, out):
        return None
    facts = program(OP).Facts(
        **common_facts(OP, a, out),
        scale_dtype=name(a.query_dequant_scale.dtype),
        cache_blocks=a.key.size(0),
    )
    scales = dict(
        query_scale=a.query_dequant_scale.contiguous().view(-1, 1),
        key_scale=a.key_dequant_scale.squeeze(2),
    )
    return KernelCall(facts, common_tensors(a, out, facts) | scales)
