"""``npu_lightning_indexer_pto`` on an NPU."""

from torch import Tensor

from .common import (
    Arguments,
    Launch,
    kernel,
    name,
    query_lengths,
    ready_on_host,
    require,
    require_contiguous,
    require_dtype,
    require_heads,
    require_paged,
    require_sortable,
    rows,
)

OP = "npu_lightning_indexer_pto"


def check(a: Arguments) -> None:
    require_dtype(OP, "query", a.query)
    require_paged(OP, "layout_key", a.layout_key)
    dim = a.query.size(-1)
    require(dim == 128, OP, f"query.size({a.query.dim() - 1})", "128", dim, "run on the CPU")
    require_heads(OP, a.query, 64)
    require_contiguous(OP, "key", a.key)
    keys = a.block_table.size(1) * a.key.size(1)
    require_sortable(OP, a.sparse_count, keys)
    # positions go through float32
    require(
        keys <= 2**24, OP, "block_table", "of at most 16 million keys", keys, "use a smaller table"
    )


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
        tokens=tokens,
        batch=batch,
        table_width=width,
        ready_on_host=ready_on_host(
            OP,
            actual_seq_lengths_query=a.actual_seq_lengths_query,
            actual_seq_lengths_key=a.actual_seq_lengths_key,
            block_table=a.block_table,
        ),
    )
    lengths_key = a.actual_seq_lengths_key
    indices = out.view(-1, a.sparse_count)
    tensors = (
        rows(a.query),
        a.weights.contiguous().view(-1, 1),
        rows(a.key),
        query_lengths(a.actual_seq_lengths_query, a.layout_query, tokens, lengths_key),
        lengths_key.contiguous(),
        a.block_table.contiguous(),
        indices,
    )
    launch(program, tensors, (indices,))
    return out
