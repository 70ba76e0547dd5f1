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


def spans(lengths: Tensor | None, layout: str, batch: int, capacity: int) -> list[tuple[int, int]]:
    """``(start, length)`` of each sequence: start in the packed dimension for TND, else 0."""
    if layout != "TND":
        given = [capacity] * batch if lengths is None else lengths.tolist()
        return [(0, min(max(n, 0), capacity)) for n in given]
    found, start = [], 0
    for prefix in lengths.tolist():
        end = min(max(prefix, start), capacity)
        found.append((start, end - start))
        start = end
    return found


def query_tokens(
    query: Tensor,
    layout: str,
    lengths_query: Tensor | None,
    lengths_key: list[int],
    sparse_mode: int,
) -> Iterator[QueryToken]:
    """Every query token that is not padding."""
    batch, per_sequence = len(lengths_key), query.size(0 if layout == "TND" else 1)
    for b, (start, len_q) in enumerate(spans(lengths_query, layout, batch, per_sequence)):
        first_row = start if layout == "TND" else b * per_sequence
        for i in range(len_q):
            len_k = lengths_key[b]
            visible = len_k if sparse_mode == 0 else min(max(len_k - len_q + i + 1, 0), len_k)
            yield QueryToken(first_row + i, b, visible)


def key_slots(
    cache: Tensor, layout: str, lengths: Tensor | None, block_table: Tensor | None, batch: int
) -> list[Tensor]:
    """Per sequence, the row of every position in the flattened cache; -1 if it does not exist."""
    if layout == "PA_BSND":
        blocks, block_size = cache.shape[:2]
        position = torch.arange(block_table.size(1) * block_size)
        slots = []
        for table, n in zip(block_table, lengths.tolist(), strict=True):
            p = position[: min(max(n, 0), len(position))]
            block = table.long()[p // block_size]
            exists = (block >= 0) & (block < blocks)
            slots.append(torch.where(exists, block * block_size + p % block_size, -1))
        return slots
    capacity = cache.size(0 if layout == "TND" else 1)
    return [
        torch.arange(n) + (start if layout == "TND" else b * capacity)
        for b, (start, n) in enumerate(spans(lengths, layout, batch, capacity))
    ]
