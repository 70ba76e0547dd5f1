"""``npu_kv_quant_sparse_flash_attention_pto`` on an NPU."""

from torch import Tensor

from .common import CUBE, Arguments, Launch, Limits, kernel, name, padded, query_lengths, rows

OP = "npu_kv_quant_sparse_flash_attention_pto"
LATENT, ROPE = 512, 64


def check(a: Arguments) -> None:
    limits = Limits(OP, a)
    limits.dtype("query")
    limits.paged("layout_kv")
    limits.heads(128)
    limits.require(a.rope_head_dim == ROPE, "rope_head_dim", f"{ROPE}", a.rope_head_dim)
    last, width = a.query.dim() - 1, LATENT + ROPE
    limits.require(
        a.query.size(last) == width, f"query.size({last})", f"{width}", a.query.size(last)
    )
    limits.contiguous("key")
    limits.checkable(a.block_table.size(1) * a.key.size(1), a.key.size(0))


def run(launch: Launch, a: Arguments, out: Tensor) -> Tensor:
    count = a.sparse_indices.size(-1)
    if out.numel() == 0:
        return out
    if a.key.numel() == 0 or a.block_table.numel() == 0 or count == 0:
        return out.zero_()
    tokens, heads = a.sparse_indices.numel() // count, a.query.size(-2)
    program = kernel(
        OP,
        dtype=name(a.query.dtype),
        heads=heads,
        block_size=a.key.size(1),
        scale=a.scale_value,
        layout=a.layout_query,
        ragged=a.actual_seq_lengths_query is not None,
        sparse_mode=a.sparse_mode,
        tokens=tokens,
        table_width=a.block_table.size(1),
        cache_rows=a.key.size(0) * a.key.size(1),
        ready_on_host=Limits(OP, a).ready_on_host(
            "actual_seq_lengths_query", "actual_seq_lengths_kv"
        ),
    )
    matrix = out.view(-1, out.size(-1))
    tensors = (
        padded(rows(a.query), rows=-heads % CUBE),
        rows(a.key),
        rows(a.sparse_indices),
        query_lengths(a.actual_seq_lengths_query, a.layout_query, tokens, a.actual_seq_lengths_kv),
        a.actual_seq_lengths_kv.contiguous(),
        a.block_table.contiguous(),
        matrix,
    )
    launch(program, tensors, (matrix,))
    return out
