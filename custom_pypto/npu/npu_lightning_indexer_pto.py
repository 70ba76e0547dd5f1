"""``npu_lightning_indexer_pto`` on an NPU, and its parts for the indexer over int8 keys."""

from typing import Any

import torch
from torch import Tensor

from .common import Arguments, KernelCall, Limits, name, padded, program, query_lengths, rows
from .pages import paged

OP = "npu_lightning_indexer_pto"


def check(a: Arguments) -> None:
    limits = Limits(OP, a)
    limits.dtype("query")
    if a.layout_key == "PA_BSND" or a.cmp_ratio != 1:
        check_cache(limits)
        limits.contiguous("key")
    else:
        limits.countable("key", a.key.size(-3))
        limits.sortable(a.key.size(-3))
    check_query(limits)


def check_cache(limits: Limits) -> None:
    a = limits.arguments
    limits.paged("layout_key")
    keys = a.block_table.size(1) * a.key.size(1)
    limits.sortable(keys)
    limits.countable("block_table", keys)


def check_query(limits: Limits) -> None:
    a = limits.arguments
    dim = a.query.size(-1)
    limits.require(dim == 128, f"query.size({a.query.dim() - 1})", "128", dim)
    limits.heads(64)


def kernel_call(a: Arguments, results: tuple[Tensor, Tensor]) -> KernelCall | None:
    out, values = results[0], results[1] if a.return_value else None
    if is_filled(a, out, values):
        return None
    made: dict[str, Any] = {}
    if a.layout_key != "PA_BSND":
        caches, lengths, table = paged(a.layout_key, a.actual_seq_lengths_key, dict(key=a.key))
        a = Arguments(**vars(a) | caches | dict(block_table=table, actual_seq_lengths_key=lengths))
        made = dict(ready_on_host=False)  # lengths are computed on the device
    made |= dict(cmp_ratio=a.cmp_ratio, values=values is not None)
    facts = program(OP).Facts(**common_facts(OP, a, out) | made)
    values = None if values is None else values.view(-1, a.sparse_count)
    return KernelCall(facts, common_tensors(a, out, facts) | dict(values=values))


def is_filled(a: Arguments, out: Tensor, values: Tensor | None = None) -> bool:
    """Whether no token sees a key, so that there is nothing to launch."""
    if a.key.numel() == 0 or (a.block_table is not None and a.block_table.numel() == 0):
        out.fill_(-1)
        if values is not None:
            values.fill_(-torch.inf)
        return True
    return out.numel() == 0


def common_facts(op: str, a: Arguments, out: Tensor) -> dict[str, Any]:
    """The facts of both indexers."""
    control_flow = "actual_seq_lengths_query", "actual_seq_lengths_key", "block_table"
    batch, width = a.block_table.shape
    return dict(
        dtype=name(a.query.dtype),
        weights_dtype=name(a.weights.dtype),
        heads=a.query.size(-2),
        block_size=a.key.size(1),
        sparse_count=a.sparse_count,
        layout=a.layout_query,
        ragged=a.actual_seq_lengths_query is not None,
        sparse_mode=a.sparse_mode,
        tokens=out.numel() // a.sparse_count,
        batch=batch,
        table_width=width,
        ready_on_host=Limits(op, a).ready_on_host(*control_flow),
    )


def common_tensors(a: Arguments, out: Tensor, facts: Any) -> dict[str, Tensor | None]:
    """The tensors of both indexers."""
    lengths, indices = a.actual_seq_lengths_key, out.view(-1, a.sparse_count)
    return dict(
        query=padded(rows(a.query), rows=facts.rows_behind_query),
        weights=a.weights.contiguous().view(-1, 1),
        key=rows(a.key),
        query_lengths=query_lengths(
            a.actual_seq_lengths_query, a.layout_query, len(indices), lengths
        ),
        key_lengths=lengths.contiguous(),
        block_table=a.block_table.contiguous(),
        indices=indices,
    )
