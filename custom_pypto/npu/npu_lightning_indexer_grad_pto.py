"""``npu_lightning_indexer_grad_pto`` on an NPU."""

from torch import Tensor

from .common import (
    Arguments,
    KernelCall,
    Limits,
    by_head,
    name,
    program,
    query_lengths,
    rows,
)
from .key_sequences import KeySequences, zero_sums

OP = "npu_lightning_indexer_grad_pto"
OUTPUTS = "d_query_index", "d_key_index", "d_weights"


def check(a: Arguments) -> None:
    limits = Limits(OP, a)
    limits.dtype("query")
    limits.heads(64)
    limits.contiguous("key")
    key_sequences(a).check(limits)


def key_sequences(a: Arguments) -> KeySequences:
    layout, lengths = a.layout_key or a.layout, a.actual_seq_lengths_key
    return KeySequences(a.key, layout, lengths, a.block_table, a.cmp_ratio)


def kernel_call(a: Arguments, results: tuple[Tensor, ...]) -> KernelCall | None:
    keys, K = key_sequences(a), a.sparse_indices.size(-1)
    if a.query.numel() == 0 or keys.empty or K == 0:
        for gradient in results:
            gradient.zero_()
        return None
    d_query, d_key, d_weights = results
    written = dict(zip(OUTPUTS, (rows(d_query), rows(d_key), d_weights.view(-1, 1)), strict=True))
    control_flow = "actual_seq_lengths_query", "actual_seq_lengths_key"
    facts = program(OP).Facts(
        dtype=name(a.query.dtype),
        weights_dtype=name(a.weights.dtype),
        dy_dtype=name(a.dy.dtype),
        heads=a.query.size(-2),
        layout=a.layout,
        ragged=a.actual_seq_lengths_query is not None,
        sparse_mode=a.sparse_mode,
        ready_on_host=Limits(OP, a).ready_on_host(*control_flow),
        **keys.facts(),
    )
    of_keys, indices = keys.tensors(), rows(a.sparse_indices)
    inputs = dict(
        query_index=by_head(a.query, facts.rows),
        key_index=rows(a.key),
        weights=by_head(a.weights.unsqueeze(-1), facts.rows),
        dy=rows(a.dy),
        indices=indices,
        query_lengths=query_lengths(
            a.actual_seq_lengths_query, a.layout, len(indices), of_keys["key_lengths"]
        ),
    )
    tensors = inputs | of_keys | zero_sums(a.key, K, dict(sums=a.key.size(-1))) | written
    return KernelCall(facts, tensors)
