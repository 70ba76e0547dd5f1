from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .checks import BLOCK, SIZES, cache, of_sequences
from .sequences import keys_of, query_tokens, selected_rows


def scores(query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """``sum_h weights[h] * relu(query[h] . keys[j])`` of one token, in float32."""
    # + 0.0 turns -0 into +0, which must tie
    return weights.float() @ torch.relu(query.float() @ keys.float().T) + 0.0


def npu_lightning_indexer_pto(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "PA_BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    cmp_ratio: int = 1,
    return_value: bool = False,
) -> Tensor | Any:  # a tuple with return_value
    """The best ``sparse_count`` positions by :func:`scores`; ties by ascending position."""
    q, k, w = query.flatten(0, -3), key.reshape(-1, key.size(-1)), weights.flatten(0, -2)
    indices = selection(
        lambda row, slots: scores(q[row], k[slots], w[row]),
        query,
        key,
        actual_seq_lengths_query,
        actual_seq_lengths_key,
        block_table,
        layout_query,
        layout_key,
        sparse_count,
        sparse_mode,
        cmp_ratio,
    )
    if not return_value:
        return indices
    values = torch.full_like(indices, -torch.inf, dtype=query.dtype)
    for row, slots, columns in selected_rows(
        query,
        key,
        indices,
        layout_query=layout_query,
        layout_kv=layout_key,
        actual_seq_lengths_query=actual_seq_lengths_query,
        actual_seq_lengths_kv=actual_seq_lengths_key,
        block_table=block_table,
        sparse_mode=sparse_mode,
        cmp_ratio=cmp_ratio,
    ):
        values.flatten(0, -3)[row, 0, columns] = scores(q[row], k[slots], w[row]).to(query.dtype)
    return indices, values


def selection(
    scores: Callable[[int, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    lengths_query: Tensor | None,
    lengths_key: Tensor | None,
    block_table: Tensor | None,
    layout_query: str,
    layout_key: str,
    sparse_count: int,
    sparse_mode: int,
    cmp_ratio: int = 1,
) -> Tensor:
    """The best positions of each query token by ``scores(row, slots)``, in which ``row`` is that of
    the token and ``slots`` are those of keys, in the flattened query and cache."""
    batch = len(lengths_query) if layout_query == "TND" else query.size(0)
    keys = keys_of(key, layout_key, lengths_key, block_table, batch, cmp_ratio)
    out = query.new_full((*query.shape[:-2], 1, sparse_count), -1, dtype=torch.int32)
    rows = out.view(-1, 1, sparse_count)
    tokens = [k.tokens for k in keys]
    for token in query_tokens(query, layout_query, lengths_query, tokens, sparse_mode, cmp_ratio):
        slot = keys[token.sequence].slots[: token.visible]
        position = (slot >= 0).nonzero().squeeze(1)
        score = scores(token.row, slot[position])
        # torch.sort ranks NaN first; stable: ties by ascending position
        best = torch.sort(score, descending=True, stable=True).indices[:sparse_count]
        rows[token.row, 0, : len(best)] = position[best].int()
    return out


def checks(dtypes: list[torch.dtype]) -> Iterator[tuple]:
    yield from of_sequences(dtypes, SIZES, arguments)
    yield from of_sequences(dtypes, [([2050, 3], 2, 128)], compressed, ", cmp_ratio 4")


def compressed(*sizes) -> dict:
    return arguments(*sizes) | dict(cmp_ratio=4)


def arguments(dtype: torch.dtype, lengths: list[int], S1: int, K: int) -> dict:
    g = torch.Generator().manual_seed(1)
    actual, table, blocks = cache(lengths, g)
    heads, dim = 64, 128
    return dict(
        query=torch.randn(len(lengths), S1, heads, dim, generator=g).to(dtype),
        key=torch.randn(blocks, BLOCK, 1, dim, generator=g).to(dtype),
        weights=torch.randn(len(lengths), S1, heads, generator=g),
        actual_seq_lengths_key=actual,
        block_table=table,
        sparse_count=K,
    )


def error(got: Tensor, expected: Tensor, mine: dict, theirs: dict) -> tuple[float, float]:
    q, k = theirs["query"].flatten(0, 1).double(), theirs["key"].flatten(0, -2).double()
    w = theirs["weights"].flatten(0, 1).double()

    def scored(row: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        rows = k[slots]
        return w[row] @ torch.relu(q[row] @ rows.T), w[row].abs() @ (q[row].abs() @ rows.abs().T)

    return selection_error(got, expected, theirs, scored)


def selection_error(
    got: Tensor, expected: Tensor, call: dict, scored: Callable
) -> tuple[float, float]:
    """The largest excess of a missed score, or of a score over the one before it in its row.

    ``scored(row, slots)`` returns scores and the sums of the magnitudes of their terms.
    """
    lengths, ratio = call["actual_seq_lengths_key"], call.get("cmp_ratio", 1)
    batch, tokens = call["query"].shape[:2]
    keys = keys_of(call["key"], "PA_BSND", lengths, call["block_table"], batch, ratio)
    worst = 0.0
    for b, i in torch.cartesian_prod(torch.arange(batch), torch.arange(tokens)).tolist():
        row, best = got[b, i, 0].tolist(), expected[b, i, 0].tolist()
        count = sum(p >= 0 for p in best)
        visible = max(keys[b].tokens - tokens + i + 1, 0) // ratio
        chosen = row[:count]
        legal = len(set(chosen)) == count and all(0 <= p < visible for p in chosen)
        if not legal or set(row[count:]) - {-1}:
            return torch.inf, 0.0
        score, magnitude = scored(b * tokens + i, keys[b].slots[:visible])
        scale = float(magnitude.amax()) if visible else 1.0
        missed, extra = sorted(set(best) - set(row)), sorted(set(row) - set(best))
        if missed:
            worst = max(worst, float(score[missed].max() - score[extra].min()) / scale)
        if count > 1:  # best first
            worst = max(worst, float(score[chosen].diff().max()) / scale)
    # float32 sums of some hundred products
    return worst, 2**-20
