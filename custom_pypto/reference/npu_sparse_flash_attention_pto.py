from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .checks import BLOCK, INT_MAX, INT_MIN, ROUNDING, SIZES, cache, of_sequences, row_error
from .sequences import selected_rows


def npu_sparse_flash_attention_pto(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    block_table: Tensor | None = None,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "PA_BSND",
    sparse_mode: int = 3,
    sinks: Tensor | None = None,
    return_softmax_lse: bool = False,
) -> Tensor | Any:  # a tuple with return_softmax_lse
    """Softmax attention of each token over the latent-cache rows that its indices select; a sink is
    one more logit, without a value."""
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    largest = query.new_full(query.shape[:-1], -torch.inf, dtype=torch.float32)
    total = torch.zeros_like(largest)
    latent = key.reshape(-1, key.size(-1))
    v = latent if value is None else value.reshape(-1, value.size(-1))
    k, q = latent, query
    if query_rope is not None:
        k = torch.cat([latent, key_rope.reshape(-1, key_rope.size(-1))], -1)
        q = torch.cat([query, query_rope], -1)
    q = q.flatten(0, -3)
    rows, maxima, sums = (x.flatten(0, query.dim() - 3) for x in (out, largest, total))
    for row, slots, _ in selected_rows(
        query,
        key,
        sparse_indices,
        layout_query=layout_query,
        layout_kv=layout_kv,
        actual_seq_lengths_query=actual_seq_lengths_query,
        actual_seq_lengths_kv=actual_seq_lengths_kv,
        block_table=block_table,
        sparse_mode=sparse_mode,
    ):
        logits = q[row].float() @ k[slots].float().T * scale_value
        if sinks is not None:
            logits = torch.cat([logits, sinks[:, None]], -1)
        probabilities = logits.softmax(-1)[:, : len(slots)]
        rows[row] = (probabilities @ v[slots].float()).to(out.dtype)
        # NaN reaches the sum only
        maxima[row] = logits.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(-1)
        shift = maxima[row].nan_to_num(neginf=0.0, posinf=torch.inf)
        sums[row] = (logits - shift[:, None]).exp().sum(-1)
    if not return_softmax_lse:
        return out
    # [B, N2, S1, N1] or [N2, T1, N1]
    return out, largest.unsqueeze(-3), total.unsqueeze(-3)


def checks(dtypes: list[torch.dtype]) -> Iterator[tuple]:
    yield from of_sequences(dtypes, SIZES, arguments)
    yield from of_sequences(dtypes, [([700, 3], 2, 640)], with_sinks, ", sinks, no RoPE")


def with_sinks(*sizes) -> dict:
    sinks = torch.randn(128, generator=torch.Generator().manual_seed(3))
    return arguments(*sizes) | dict(query_rope=None, key_rope=None, sinks=sinks)


def arguments(dtype: torch.dtype, lengths: list[int], S1: int, K: int) -> dict:
    g = torch.Generator().manual_seed(2)
    actual, table, blocks = cache(lengths, g)
    heads, latent, rope = 128, 512, 64
    indices = torch.full((len(lengths), S1, 1, K), -1, dtype=torch.int32)
    for b, n in enumerate(lengths):
        for i in range(S1):
            chosen = torch.randperm(max(n - S1 + i + 1, 0), generator=g)[:K].int()
            indices[b, i, 0, : len(chosen)] = chosen
    if K > 16:  # indices of keys that are not visible contribute nothing
        indices[..., 3], indices[..., 5], indices[..., 7] = INT_MIN, INT_MAX, max(lengths)
    return dict(
        query=torch.randn(len(lengths), S1, heads, latent, generator=g).to(dtype),
        key=torch.randn(blocks, BLOCK, 1, latent, generator=g).to(dtype),
        value=None,
        sparse_indices=indices,
        scale_value=192**-0.5,
        query_rope=torch.randn(len(lengths), S1, heads, rope, generator=g).to(dtype),
        key_rope=torch.randn(blocks, BLOCK, 1, rope, generator=g).to(dtype),
        block_table=table,
        actual_seq_lengths_kv=actual,
    )


def error(got: Tensor, expected: Tensor, mine: dict, theirs: dict) -> tuple[float, float]:
    # the probabilities are rounded too, before the product with the values
    return row_error(got, expected), 2 * ROUNDING[expected.dtype]
