"""``npu_sparse_flash_attention_pto`` on an NPU."""

import torch
from torch import Tensor

from .common import CUBE, Arguments, Launch, Limits, kernel, name, padded, query_lengths, rows

OP = "npu_sparse_flash_attention_pto"
OUTPUTS = "out", "softmax_max", "softmax_sum"  # of the program, the last two if wanted


def check(a: Arguments) -> None:
    limits = Limits(OP, a)
    limits.dtype("query")
    limits.paged("layout_kv")
    limits.heads(128)
    limits.contiguous("key", "value", "key_rope")
    limits.checkable(a.block_table.size(1) * a.key.size(1), a.key.size(0))


def run(
    launch: Launch, a: Arguments, results: Tensor | tuple[Tensor, ...]
) -> Tensor | tuple[Tensor, ...]:
    out, *statistics = (results,) if isinstance(results, Tensor) else results
    if not a.return_softmax_lse:
        statistics = []
    count = a.sparse_indices.size(-1)
    if out.numel() == 0:
        return results
    if a.key.numel() == 0 or a.block_table.numel() == 0 or count == 0:
        for tensor, nothing in zip((out, *statistics), (0, -torch.inf, 0), strict=False):
            tensor.fill_(nothing)
        return results
    tokens, heads = a.sparse_indices.numel() // count, a.query.size(-2)
    matrices = out.view(-1, out.size(-1)), *(tensor.view(-1, 1) for tensor in statistics)
    written = dict(zip(OUTPUTS, matrices, strict=False))
    tensors = _inputs(a, tokens) | dict.fromkeys(OUTPUTS) | written
    program = kernel(
        OP,
        dtype=name(a.query.dtype),
        absent=tuple(argument for argument, tensor in tensors.items() if tensor is None),
        heads=heads,
        block_size=a.key.size(1),
        scale=a.scale_value,
        layout=a.layout_query,
        ragged=a.actual_seq_lengths_query is not None,
        sparse_mode=a.sparse_mode,
        tokens=tokens,
        table_width=a.block_table.size(1),
        ready_on_host=Limits(OP, a).ready_on_host(
            "actual_seq_lengths_query", "actual_seq_lengths_kv"
        ),
    )
    half, single = (a.query.new_empty(1, 1, dtype=d) for d in (a.query.dtype, torch.float32))
    for argument, tensor in tensors.items():
        if tensor is None:  # not read
            tensors[argument] = half if argument.endswith("rope") else single
    launch(program, tuple(tensors.values()), tuple(written.values()))
    return results


def _inputs(a: Arguments, tokens: int) -> dict[str, Tensor | None]:
    """What the program reads, in its order."""
    missing, rope = -a.query.size(-2) % CUBE, a.query_rope is not None
    return dict(
        query=padded(rows(a.query), rows=missing),
        query_rope=padded(rows(a.query_rope), rows=missing) if rope else None,
        key=rows(a.key),
        key_rope=rows(a.key_rope) if rope else None,
        value=rows(a.key if a.value is None else a.value),
        indices=rows(a.sparse_indices),
        sinks=None if a.sinks is None else a.sinks.contiguous().view(-1, 1),
        query_lengths=query_lengths(
            a.actual_seq_lengths_query, a.layout_query, tokens, a.actual_seq_lengths_kv
        ),
        key_lengths=a.actual_seq_lengths_kv.contiguous(),
        block_table=a.block_table.contiguous(),
    )
