"""``npu_sparse_flash_attention_pto`` on an NPU."""

import torch
from torch import Tensor

from .common import CUBE, Arguments, Launch, Limits, kernel, name, padded, query_lengths, rows

OP = "npu_sparse_flash_attention_pto"


def check(a: Arguments) -> None:
    limits = Limits(OP, a)
    limits.dtype("query")
    limits.paged("layout_kv")
    limits.require(a.sinks is None, "sinks", "None", "a tensor")
    limits.require(not a.return_softmax_lse, "return_softmax_lse", "False", a.return_softmax_lse)
    limits.heads(128)
    limits.contiguous("key", "value", "key_rope")
    limits.checkable(a.block_table.size(1) * a.key.size(1), a.key.size(0))


def run(launch: Launch, a: Arguments, out: Tensor) -> Tensor:
    count = a.sparse_indices.size(-1)
    if out.numel() == 0:
        return out
    if a.key.numel() == 0 or a.block_table.numel() == 0 or count == 0:
        return out.zero_()
    tokens, heads = a.sparse_indices.numel() // count, a.query.size(-2)
    tensors = _tensors(a, out.view(-1, out.size(-1)), tokens)
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
    launch(program, tuple(tensors.values()), (tensors["out"],))
    return out


def _tensors(a: Arguments, result: Tensor, tokens: int) -> dict[str, Tensor | None]:
    """The program's arguments, in its order."""
    missing = -a.query.size(-2) % CUBE
    rope = a.query_rope is not None
    return dict(
        query=padded(rows(a.query), rows=missing),
        query_rope=padded(rows(a.query_rope), rows=missing) if rope else None,
        key=rows(a.key),
        key_rope=rows(a.key_rope) if rope else None,
        value=rows(a.key if a.value is None else a.value),
        indices=rows(a.sparse_indices),
        sinks=None,
        query_lengths=query_lengths(
            a.actual_seq_lengths_query, a.layout_query, tokens, a.actual_seq_lengths_kv
        ),
        key_lengths=a.actual_seq_lengths_kv.contiguous(),
        block_table=a.block_table.contiguous(),
        out=result,
        softmax_max=None,
        softmax_sum=None,
    )
