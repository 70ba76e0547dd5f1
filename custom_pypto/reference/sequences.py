"""Locates the query tokens of each sequence, their visible keys, and the cache rows of the keys.

Lengths, prefix sums and block ids are not trusted: lengths are clamped to the tensors' sizes,
prefix sums to a non-decreasing series, and a position whose block id is outside the cache does not
exist.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class QueryToken:
    """One query token: its row in the flattened query, its sequence, and the keys it sees."""

    row: int  # in query.flatten over tokens
    sequence: int
    visible: int  # keys [0, visible) of the sequence


def spans(
    lengths: Tensor | None, layout: str, batch: int, capacity: int, ratio: int = 1
) -> list[tuple[int, int]]:
    """``(first row, tokens)`` of each sequence, with one row per ``ratio`` tokens: the first row in
    the packed dimension for TND, else 0."""
    if layout != "TND":
        given = [capacity * ratio] * batch if lengths is None else lengths.tolist()
        return [(0, min(max(n, 0), capacity * ratio + ratio - 1)) for n in given]
    found, before, row = [], 0, 0
    for prefix in lengths.tolist():
        tokens = min(max(prefix - before, 0), (capacity - row) * ratio + ratio - 1)
        found.append((row, tokens))
        before += tokens
        row += tokens // ratio
    return found


def query_tokens(
    query: Tensor,
    layout: str,
    lengths_query: Tensor | None,
    lengths_key: list[int],
    sparse_mode: int,
    cmp_ratio: int = 1,
) -> Iterator[QueryToken]:
    """Every query token that is not padding; ``lengths_key`` are the tokens of the keys."""
    batch, per_sequence = len(lengths_key), query.size(0 if layout == "TND" else 1)
    for b, (start, len_q) in enumerate(spans(lengths_query, layout, batch, per_sequence)):
        first_row = start if layout == "TND" else b * per_sequence
        for i in range(len_q):
            len_k = lengths_key[b]
            seen = len_k if sparse_mode == 0 else min(max(len_k - len_q + i + 1, 0), len_k)
            yield QueryToken(first_row + i, b, seen // cmp_ratio)


@dataclass
class Keys:
    """The keys of one sequence."""

    slots: Tensor  # the row of each position in the flattened cache; -1 if it does not exist
    tokens: int  # which they hold, and a remainder less than cmp_ratio


def keys_of(
    cache: Tensor,
    layout: str,
    lengths: Tensor | None,
    block_table: Tensor | None,
    batch: int,
    cmp_ratio: int = 1,
) -> list[Keys]:
    """The keys of every sequence, one per ``cmp_ratio`` tokens; ``lengths`` count tokens."""
    if layout == "PA_BSND":
        blocks, block_size = cache.shape[:2]
        capacity = block_table.size(1) * block_size
    else:
        capacity = cache.size(0 if layout == "TND" else 1)
    found = []
    for b, (start, tokens) in enumerate(spans(lengths, layout, batch, capacity, cmp_ratio)):
        position = torch.arange(tokens // cmp_ratio)
        if layout == "PA_BSND":
            block = block_table[b].long()[position // block_size]
            exists = (block >= 0) & (block < blocks)
            slots = torch.where(exists, block * block_size + position % block_size, -1)
        else:
            slots = position + (start if layout == "TND" else b * capacity)
        found.append(Keys(slots, tokens))
    return found


def visible_rows(
    query: Tensor,
    key: Tensor,
    *,
    layout_query: str,
    layout_kv: str,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_kv: Tensor | None,
    block_table: Tensor | None,
    sparse_mode: int,
    cmp_ratio: int = 1,
) -> Iterator[tuple[int, Tensor]]:
    """Of each token that is not padding: its row in the flattened query, and the rows in the
    flattened cache of the keys that it sees; -1 where a key does not exist."""
    batch = len(actual_seq_lengths_query) if layout_query == "TND" else query.size(0)
    keys = keys_of(key, layout_kv, actual_seq_lengths_kv, block_table, batch, cmp_ratio)
    tokens = [k.tokens for k in keys]
    for token in query_tokens(
        query, layout_query, actual_seq_lengths_query, tokens, sparse_mode, cmp_ratio
    ):
        yield token.row, keys[token.sequence].slots[: token.visible]


def selected_rows(
    query: Tensor, key: Tensor, sparse_indices: Tensor, **sequences
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Of each token that attends to a key: its row in the flattened query, the rows of its keys in
    the flattened cache, and the columns of their indices; ``sequences`` as :func:`visible_rows`."""
    indices = sparse_indices.flatten(0, -3)[:, 0].long()
    for row, visible in visible_rows(query, key, **sequences):
        index = indices[row]
        before_end = (index == -1).cumsum(0) == 0  # -1 ends the row
        columns = (before_end & (index >= 0) & (index < len(visible))).nonzero()[:, 0]
        slots = visible[index[columns]]
        if (exist := slots >= 0).any():
            yield row, slots[exist], columns[exist]
