"""``npu_lightning_indexer_pto`` on an NPU, and what it shares with the indexer over int8 keys."""

from collections.abc import Sequence

from torch import Tensor

from .common import CUBE, Arguments, Launch, Limits, kernel, name, padded, query_lengths, rows

OP = "npu_lightning_indexer_pto"


def check(a: Arguments) -> None:
    limits = Limits(OP, a)
    limits.dtype("query")
    check_sizes(limits)
    limits.contiguous("key")


def check_sizes(limits: Limits) -> None:
    a = limits.arguments
    limits.paged("layout_key")
    dim = a.query.size(-1)
    limits.require(dim == 128, f"query.size({a.query.dim() - 1})", "128", dim)
    limits.heads(64)
    keys = a.block_table.size(1) * a.key.size(1)
    limits.sortable(keys)
    # positions go through float32
    at_most = "of at most 16 million keys"
    limits.require(keys <= 2**24, "block_table", at_most, keys, "use a smaller table")


def run(launch: Launch, a: Arguments, out: Tensor) -> Tensor:
    dtype = name(a.query.dtype)
    return select(OP, launch, a, out, cube=CUBE, dtype=dtype, cmp_ratio=a.cmp_ratio)


def select(
    op: str,
    launch: Launch,
    a: Arguments,
    out: Tensor,
    *,
    cube: int,
    query_scale: Sequence[Tensor] = (),
    key_scale: Sequence[Tensor] = (),
    **facts,
) -> Tensor:
    """Launches the indexer ``op``.

    Args:
        cube: rows of the tiles in which products load the query.
        query_scale: the program's argument behind the weights, if it has one.
        key_scale: the program's argument behind the keys, if it has one.
        facts: static ones that only this indexer has.
    """
    tokens, (batch, width) = out.numel() // a.sparse_count, a.block_table.shape
    if tokens == 0:
        return out
    if a.key.numel() == 0 or a.block_table.numel() == 0:
        return out.fill_(-1)
    program = kernel(
        op,
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
        ready_on_host=Limits(op, a).ready_on_host(
            "actual_seq_lengths_query", "actual_seq_lengths_key", "block_table"
        ),
        **facts,
    )
    lengths_key = a.actual_seq_lengths_key
    indices = out.view(-1, a.sparse_count)
    tensors = (
        # a tile of several tokens may end anywhere in the last one
        padded(rows(a.query), rows=cube - 1 if a.query.size(-2) % cube else 0),
        a.weights.contiguous().view(-1, 1),
        *query_scale,
        rows(a.key),
        *key_scale,
        query_lengths(a.actual_seq_lengths_query, a.layout_query, tokens, lengths_key),
        lengths_key.contiguous(),
        a.block_table.contiguous(),
        indices,
    )
    launch(program, tensors, (indices,))
    return out
