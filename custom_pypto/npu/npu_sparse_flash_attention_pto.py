"""``npu_sparse_flash_attention_pto`` on an NPU."""

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
    tokens = a.sparse_indices.numel() // count
    rope, heads = a.query_rope is not None, a.query.size(-2)
    program = kernel(
        OP,
        dtype=name(a.query.dtype),
        rope=rope,
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
    lengths_kv = a.actual_seq_lengths_kv
    result = out.view(-1, out.size(-1))
    tensors = (
        padded(rows(a.query), rows=-heads % CUBE),
        *([padded(rows(a.query_rope), rows=-heads % CUBE)] if rope else []),
        rows(a.key),
        *([rows(a.key_rope)] if rope else []),
        rows(a.key if a.value is None else a.value),
        rows(a.sparse_indices),
        query_lengths(a.actual_seq_lengths_query, a.layout_query, tokens, lengths_kv),
        lengths_kv.contiguous(),
        a.block_table.contiguous(),
        result,
    )
    launch(program, tensors, (result,))
    return out
