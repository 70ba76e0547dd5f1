"""``npu_sparse_flash_attention_pto`` on an NPU."""

from torch import Tensor

from .common import (
    Arguments,
    Launch,
    kernel,
    name,
    query_lengths,
    ready_on_host,
    require_checkable,
    require_contiguous,
    require_dtype,
    require_heads,
    require_paged,
    rows,
)

OP = "npu_sparse_flash_attention_pto"


def check(a: Arguments) -> None:
    require_dtype(OP, "query", a.query)
    require_paged(OP, "layout_kv", a.layout_kv)
    require_heads(OP, a.query, 128)
    for argument, cache in dict(key=a.key, value=a.value, key_rope=a.key_rope).items():
        require_contiguous(OP, argument, cache)
    width = a.block_table.size(1)
    require_checkable(OP, width, width * a.key.size(1), a.key.size(0))


def run(launch: Launch, a: Arguments, out: Tensor) -> Tensor:
    count = a.sparse_indices.size(-1)
    if out.numel() == 0:
        return out
    if a.key.numel() == 0 or a.block_table.numel() == 0 or count == 0:
        return out.zero_()
    tokens = a.sparse_indices.numel() // count
    rope = a.query_rope is not None
    program = kernel(
        OP,
        dtype=name(a.query.dtype),
        rope=rope,
        heads=a.query.size(-2),
        block_size=a.key.size(1),
        scale=a.scale_value,
        layout=a.layout_query,
        ragged=a.actual_seq_lengths_query is not None,
        sparse_mode=a.sparse_mode,
        tokens=tokens,
        table_width=a.block_table.size(1),
        ready_on_host=ready_on_host(
            OP,
            actual_seq_lengths_query=a.actual_seq_lengths_query,
            actual_seq_lengths_kv=a.actual_seq_lengths_kv,
        ),
    )
    lengths_kv = a.actual_seq_lengths_kv
    result = out.view(-1, out.size(-1))
    tensors = (
        rows(a.query),
        *([rows(a.query_rope)] if rope else []),
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
