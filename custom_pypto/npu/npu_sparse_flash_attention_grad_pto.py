"""``npu_sparse_flash_attention_grad_pto`` on an NPU."""

import torch
from torch import Tensor

from .common import Arguments, KernelCall, Limits, name, program, query_lengths, rows
from .pages import counts, spans

OP = "npu_sparse_flash_attention_grad_pto"
OUTPUTS = "d_query", "d_key", "d_value", "d_query_rope", "d_key_rope", "d_sinks"


def check(a: Arguments) -> None:
    limits = Limits(OP, a)
    limits.dtype("query")
    limits.heads(128)
    limits.contiguous("key", "value", "key_rope")
    if is_paged(a):
        # a row of the table is checked beside the indices, in the memory of one vector core
        width, remedy = a.block_table.size(1), "use larger blocks or a smaller table"
        limits.require(width <= 8192, "block_table.size(1)", "at most 8192", width, remedy)
    limits.require(
        most_keys(a) + cache_rows(a) <= 2**24 - 2**13,
        "key",
        "of fewer than 16 million rows, the keys of a sequence in addition",
        f"{cache_rows(a)} rows and {most_keys(a)} keys",
        "use a smaller cache or table",
    )


def is_paged(a: Arguments) -> bool:
    return (a.layout_kv or a.layout) == "PA_BSND"


def cache_rows(a: Arguments) -> int:
    return a.key.size(0) if a.key.dim() == 3 else a.key.size(0) * a.key.size(1)


def most_keys(a: Arguments) -> int:
    """Keys that one sequence can have."""
    return a.block_table.size(1) * a.key.size(1) if is_paged(a) else a.key.size(-3)


def kernel_call(a: Arguments, results: tuple[Tensor, ...]) -> KernelCall | None:
    K = a.sparse_indices.size(-1)
    if a.query.numel() == 0 or a.key.numel() == 0 or most_keys(a) == 0 or K == 0:
        for gradient in results:
            gradient.zero_()
        return None
    given = dict(zip(OUTPUTS, results, strict=True))
    written = {n: rows(x) for n, x in given.items() if x.numel()}
    if a.sinks is not None:  # the program adds to it
        written["d_sinks"] = given["d_sinks"].zero_().view(1, -1)
    kernels, paged = program(OP), is_paged(a)
    facts = kernels.Facts(
        dtype=name(a.query.dtype),
        heads=a.query.size(-2),
        scale=a.scale_value,
        block_size=a.key.size(1) if paged else 0,
        table_width=a.block_table.size(1) if paged else 1,
        layout=a.layout,
        ragged=a.actual_seq_qlen is not None,
        sparse_mode=a.sparse_mode,
        rope=a.query_rope is not None,
        own_value=a.value is not None,
        sinks=a.sinks is not None,
        ready_on_host=Limits(OP, a).ready_on_host("actual_seq_qlen", "actual_seq_kvlen"),
    )
    inputs = _of_tokens(a, facts) | _of_keys(a) | _sums(a, facts)
    return KernelCall(facts, dict.fromkeys(OUTPUTS) | inputs | written, written=tuple(written))


def _of_tokens(a: Arguments, facts) -> dict[str, Tensor | None]:
    heads, missing = a.query.size(-2), facts.rows - a.query.size(-2)

    def padded(x: Tensor) -> Tensor:
        """``[tokens, heads, W]`` with whole tiles of heads, the last ones zeros."""
        return torch.nn.functional.pad(x.reshape(-1, heads, x.size(-1)), (0, 0, 0, missing))

    def statistic(x: Tensor) -> Tensor:
        return rows(padded(x.unsqueeze(-1)))

    rope, sinks = a.query_rope, a.sinks
    return dict(
        query_and_d_out=rows(torch.cat([padded(a.query), padded(a.d_out)], 1)),
        query_rope=None if rope is None else rows(padded(rope)),
        softmax_max=statistic(a.softmax_max),
        softmax_sum=statistic(a.softmax_sum),
        indices=rows(a.sparse_indices),
        sinks=None if sinks is None else statistic(sinks),
    )


def _of_keys(a: Arguments) -> dict[str, Tensor | None]:
    """The cache, and the lengths and first rows of the sequences in it."""
    lengths, table = a.actual_seq_kvlen, a.block_table
    starts = a.sparse_indices.new_zeros(1)  # not read with pages
    layout = a.layout_kv or a.layout
    if layout == "TND":
        starts, lengths = spans(lengths, len(a.key))
    elif layout == "BSND":
        batch, most = a.key.shape[:2]
        starts = torch.arange(0, batch * most, most, dtype=torch.int32, device=a.key.device)
        lengths = counts(lengths, a.key)
    tokens = a.sparse_indices.numel() // a.sparse_indices.size(-1)
    return dict(
        key=rows(a.key),
        key_rope=None if a.key_rope is None else rows(a.key_rope),
        value=rows(a.key if a.value is None else a.value),
        query_lengths=query_lengths(a.actual_seq_qlen, a.layout, tokens, lengths),
        key_lengths=lengths.contiguous(),
        key_starts=starts,
        block_table=None if table is None else table.contiguous(),
        one_block=a.sparse_indices.new_zeros(1, 1),
    )


def _sums(a: Arguments, facts) -> dict[str, Tensor | None]:
    kernels = program(OP)
    count = kernels.sums_rows(cache_rows(a), a.sparse_indices.size(-1))
    latent = a.key.size(-1)
    rope = 0 if a.key_rope is None else a.key_rope.size(-1)

    def zeros(rows: int, width: int) -> Tensor:
        return a.key.new_zeros(rows, width, dtype=torch.float32)

    tokens = a.sparse_indices.numel() // a.sparse_indices.size(-1)
    own = a.value is not None
    found = {f"sums_{part}": zeros(count, latent + rope) for part in range(kernels.PARTS)}
    for part in range(kernels.PARTS):
        found[f"value_sums_{part}"] = zeros(count, latent) if own else None
    sinks = None if a.sinks is None else zeros(tokens * facts.rows, 1)
    return found | dict(sink_terms=sinks)
