"""``npu_quant_lightning_indexer_pto`` on an NPU."""

from torch import Tensor

from .common import Arguments, Launch, Limits, kernel, name, padded, query_lengths, rows

OP = "npu_quant_lightning_indexer_pto"
CUBE = 32  # int8: PyPTO 0.2.0 loads the operands of a product in tiles of so many rows


def check(a: Arguments) -> None:
    limits = Limits(OP, a)
    limits.paged("layout_key")
    dim = a.query.size(-1)
    limits.require(dim == 128, f"query.size({a.query.dim() - 1})", "128", dim)
    limits.heads(64)
    # else the last tile of a block is loaded from behind it
    block_size = a.key.size(1)
    limits.require(block_size % CUBE == 0, "key.size(1)", f"a multiple of {CUBE}", block_size)
    limits.contiguous("key", "key_dequant_scale")
    keys = a.block_table.size(1) * block_size
    limits.sortable(keys)
    # positions and block ids go through float32
    blocks = a.key.size(0)
    limits.require(blocks <= 2**24 - 2**13, "key.size(0)", "at most 16 million", blocks)
    at_most = "of at most 16 million keys"
    limits.require(keys <= 2**24, "block_table", at_most, keys, "use a smaller table")


def run(launch: Launch, a: Arguments, out: Tensor) -> Tensor:
    tokens, (batch, width) = out.numel() // a.sparse_count, a.block_table.shape
    if tokens == 0:
        return out
    if a.key.numel() == 0 or a.block_table.numel() == 0:
        return out.fill_(-1)
    program = kernel(
        OP,
        weights_dtype=name(a.weights.dtype),
        scale_dtype=name(a.query_dequant_scale.dtype),
        heads=a.query.size(-2),
        block_size=a.key.size(1),
        sparse_count=a.sparse_count,
        layout=a.layout_query,
        ragged=a.actual_seq_lengths_query is not None,
        sparse_mode=a.sparse_mode,
        tokens=tokens,
        batch=batch,
        table_width=width,
        cache_blocks=a.key.size(0),
        ready_on_host=Limits(OP, a).ready_on_host(
            "actual_seq_lengths_query", "actual_seq_lengths_key", "block_table"
        ),
    )
    lengths_key = a.actual_seq_lengths_key
    indices = out.view(-1, a.sparse_count)
    partial = a.query.size(-2) % CUBE != 0
    tensors = (
        padded(rows(a.query), rows=CUBE - 1 if partial else 0),
        a.weights.contiguous().view(-1, 1),
        a.query_dequant_scale.contiguous().view(-1, 1),
        rows(a.key),
        a.key_dequant_scale.view(-1, a.key.size(1)),
        query_lengths(a.actual_seq_lengths_query, a.layout_query, tokens, lengths_key),
        lengths_key.contiguous(),
        a.block_table.contiguous(),
        indices,
    )
    launch(program, tensors, (indices,))
    return out
