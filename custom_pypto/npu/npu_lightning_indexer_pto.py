"""``npu_lightning_indexer_pto`` on an NPU."""

from torch import Tensor

from .common import CUBE, Arguments, Launch, Limits, kernel, name, padded, query_lengths, rows

OP = "npu_lightning_indexer_pto"


def check(a: Arguments) -> None:
    limits = Limits(OP, a)
    limits.dtype("query")
    limits.paged("layout_key")
    dim = a.query.size(-1)
    limits.require(dim == 128, f"query.size({a.query.dim() - 1})", "128", dim)
    limits.heads(64)
    limits.contiguous("key")
    keys = a.block_table.size(1) * a.key.size(1)
    limits.sortable(keys)
    # positions go through float32
    at_most = "of at most 16 million keys"
    limits.require(keys <= 2**24, "block_table", at_most, keys, "use a smaller table")


def run(launch: Launch, a: Arguments, out: Tensor) -> Tensor:
    tokens, (batch, width) = out.numel() // a.sparse_count, a.block_table.shape
    if tokens == 0:
        return out
    if a.key.numel() == 0 or a.block_table.numel() == 0:
        return out.fill_(-1)
    program = kernel(
        OP,
        dtype=name(a.query.dtype),
        weights_dtype=name(a.weights.dtype),
        heads=a.query.size(-2),
        block_size=a.key.size(1),
        sparse_count=a.sparse_count,
        layout=a.layout_query,
        ragged=a.actual_seq_lengths_query is not None,
        sparse_mode=a.sparse_mode,
        cmp_ratio=a.cmp_ratio,
        tokens=tokens,
        batch=batch,
        table_width=width,
        ready_on_host=Limits(OP, a).ready_on_host(
            "actual_seq_lengths_query", "actual_seq_lengths_key", "block_table"
        ),
    )
    lengths_key = a.actual_seq_lengths_key
    indices = out.view(-1, a.sparse_count)
    tensors = (
        # a tile of several tokens may end anywhere in the last one
        padded(rows(a.query), rows=CUBE - 1 if a.query.size(-2) % CUBE else 0),
        a.weights.contiguous().view(-1, 1),
        rows(a.key),
        query_lengths(a.actual_seq_lengths_query, a.layout_query, tokens, lengths_key),
        lengths_key.contiguous(),
        a.block_table.contiguous(),
        indices,
    )
    launch(program, tensors, (indices,))
    return out
