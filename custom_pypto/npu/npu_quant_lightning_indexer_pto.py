"""``npu_quant_lightning_indexer_pto`` on an NPU."""

from .common import Arguments, Limits

OP = "npu_quant_lightning_indexer_pto"


def check(a: Arguments) -> None:
    limits = Limits(OP, a)
    limits.paged("layout_key")
    dim = a.query.size(-1)
    limits.require(dim == 128, f"query.size({a.query.dim() - 1})", "128", dim)
    limits.heads(64)
    limits.contiguous("key", "key_dequant_scale")
    keys = a.block_table.size(1) * a.key.size(1)
    limits.sortable(keys)
    # positions go through float32
    at_most = "of at most 16 million keys"
    limits.require(keys <= 2**24, "block_table", at_most, keys, "use a smaller table")
