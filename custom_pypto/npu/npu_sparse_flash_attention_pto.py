"""``npu_sparse_flash_attention_pto`` on an NPU."""

from typing import Any

import torch
from torch import Tensor

from .common import Arguments, KernelCall, Limits, name, padded, program, query_lengths, rows
from .pages import paged

OP = "npu_sparse_flash_attention_pto"
OUTPUTS = "out", "softmax_max", "softmax_sum"  # of the program, the last two if wanted


def check(a: Arguments) -> None:
    limits = Limits(OP, a)
    limits.dtype("query")
    limits.heads(128)
    if a.layout_kv == "PA_BSND":
        limits.contiguous("key", "value", "key_rope")
        limits.checkable(a.block_table.size(1) * a.key.size(1), a.key.size(0))
    else:
        limits.countable("key", a.key.size(-3))


def kernel_call(a: Arguments, results: tuple[Tensor, ...]) -> KernelCall | None:
    out, *statistics = results if a.return_softmax_lse else results[:1]
    if is_filled(a, out, *statistics):
        return None
    made: dict[str, Any] = {}
    if a.layout_kv != "PA_BSND":
        a, made = with_pages(a), dict(ready_on_host=False)  # lengths are computed on the device
    matrices = out.view(-1, out.size(-1)), *(tensor.view(-1, 1) for tensor in statistics)
    written = dict(zip(OUTPUTS, matrices, strict=False))
    rope = a.query_rope is not None
    optional = dict(
        query_rope=rows(a.query_rope) if rope else None,
        key_rope=rows(a.key_rope) if rope else None,
        sinks=None if a.sinks is None else a.sinks.contiguous().view(-1, 1),
    )
    optional |= dict.fromkeys(OUTPUTS) | written
    absent = tuple(argument for argument, tensor in optional.items() if tensor is None)
    facts = program(OP).Facts(**common_facts(OP, a) | made, absent=absent)
    if rope:
        optional["query_rope"] = padded(optional["query_rope"], rows=facts.rows_behind_query)
    value = rows(a.key if a.value is None else a.value)
    tensors = common_tensors(a, facts) | dict(value=value) | optional
    return KernelCall(facts, tensors)


def with_pages(a: Arguments) -> Arguments:
    """The call with a paged cache of its keys."""
    keys = dict(key=a.key, key_rope=a.key_rope, value=a.value)
    caches, lengths, table = paged(a.layout_kv, a.actual_seq_lengths_kv, keys)
    return Arguments(**vars(a) | caches | dict(block_table=table, actual_seq_lengths_kv=lengths))


def is_filled(a: Arguments, out: Tensor, *statistics: Tensor) -> bool:
    """Whether no token sees a selected key, so that there is nothing to launch."""
    no_table = a.block_table is not None and a.block_table.numel() == 0
    if a.key.numel() == 0 or no_table or a.sparse_indices.size(-1) == 0:
        for tensor, nothing in zip((out, *statistics), (0, -torch.inf, 0), strict=False):
            tensor.fill_(nothing)
        return True
    return out.numel() == 0


def common_facts(op: str, a: Arguments) -> dict[str, Any]:
    """The facts of both attentions."""
    control_flow = "actual_seq_lengths_query", "actual_seq_lengths_kv"
    return dict(
        dtype=name(a.query.dtype),
        heads=a.query.size(-2),
        block_size=a.key.size(1),
        scale=a.scale_value,
        layout=a.layout_query,
        ragged=a.actual_seq_lengths_query is not None,
        sparse_mode=a.sparse_mode,
        tokens=a.sparse_indices.numel() // a.sparse_indices.size(-1),
        table_width=a.block_table.size(1),
        ready_on_host=Limits(op, a).ready_on_host(*control_flow),
    )


def common_tensors(a: Arguments, facts: Any) -> dict[str, Tensor | None]:
    """The tensors of both attentions."""
    lengths, indices = a.actual_seq_lengths_kv, rows(a.sparse_indices)
    return dict(
        query=padded(rows(a.query), rows=facts.rows_behind_query),
        key=rows(a.key),
        indices=indices,
        query_lengths=query_lengths(
            a.actual_seq_lengths_query, a.layout_query, len(indices), lengths
        ),
        key_lengths=lengths.contiguous(),
        block_table=a.block_table.contiguous(),
    )
