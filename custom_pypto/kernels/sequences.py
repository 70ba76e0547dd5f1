"""The sequence and the visible keys of each query token, as PyPTO loops.

The counterpart of :mod:`custom_pypto.reference.sequences`. Lengths are data: each is clamped to
what the tensors hold before it bounds a loop or becomes an address, so that no value can lead
outside a tensor.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from . import loop

# The most rows of a cache, which float32 still counts exactly. Also the block size of gathers: any
# cache is then one block, so an index is a row.
MOST_ROWS = 1 << 24


@dataclass(frozen=True, kw_only=True)
class QueryFacts:
    """The facts of query tokens and their visible keys."""

    layout: str  # BSND or TND
    ragged: bool  # whether query_lengths counts for BSND; without it every row is a token
    sparse_mode: int  # 0: every key is visible; 3: the mask is causal and right-aligned
    cmp_ratio: int = 1  # tokens per key


def query_rows(facts: QueryFacts, query_lengths, b, batch, tokens) -> tuple:
    """A sequence's first row, number of rows, rows without padding, and whether its keys count."""
    if facts.layout != "TND":
        rows = tokens // batch
        valid = query_lengths[b].max(0).min(rows) if facts.ragged else rows
        return b * rows, rows, valid, 1
    # an extra sequence without keys owns the rows behind the last sequence
    start = query_lengths[(b - 1).max(0)].max(0).min(tokens) * b.min(1)
    end = query_lengths[b.min(batch - 1)].max(start).min(tokens)
    end = end + (tokens - end) * (b - batch + 1).max(0)
    return start, end - start, end - start, (batch - b).min(1)


def query_tiles(
    facts: QueryFacts, query_lengths, key_lengths, tokens, capacity, *, name: str, tile: int = 1
) -> Iterator[tuple]:
    """``(row, sequence, visible)`` of consecutive query tokens, in nested loops.

    The tokens of a tile belong to one sequence; the remainder after tiles of ``tile`` tokens comes
    as tiles of one token. The caller's loop is the body of the innermost loop, which PyPTO records
    once for each of the two sizes.

    Args:
        query_lengths: ``[B]`` int32, lengths for BSND, non-decreasing prefix sums for TND.
        key_lengths: ``[B]`` int32, tokens. A key is visible if all of its tokens are.
        tokens: query tokens, padding included.
        capacity: keys that the block table of one sequence can hold.
        name: prefix of the loops' names.
        tile: tokens per tile.

    Yields:
        The row of the first token in the flattened query; its sequence; the list of the tokens'
        numbers of visible keys. Padding comes too, with 0 keys, for the caller to write its rows.
    """
    batch, ratio = key_lengths.shape[0], facts.cmp_ratio
    # for a ratio above 1 ``capacity`` must be the result of a min or max, which are int64; dims and
    # elements of tensors are int32 in PyPTO's control flow
    most = capacity * ratio + ratio - 1
    sequences = batch + (facts.layout == "TND")
    for b in loop(f"{name}_B", sequences):
        start, rows, len_q, owns_keys = query_rows(facts, query_lengths, b, batch, tokens)
        sequence = b.min(batch - 1)
        len_k = key_lengths[sequence].max(0).min(most) * owns_keys
        tiled = rows // tile * tile
        ranges = [(tile, 0, tiled), (1, tiled, rows)] if tile > 1 else [(1, 0, rows)]
        for size, first, last in ranges:
            for i in loop(f"{name}_S{size}", first, last, size):
                visible = []
                for j in range(size):
                    keys = len_k
                    if facts.sparse_mode != 0:
                        keys = (len_k - len_q + i + j + 1).max(0).min(len_k)
                    keys = keys // ratio
                    if facts.ragged and facts.layout != "TND":
                        keys = keys * (len_q - i - j).max(0).min(1)
                    keys.as_variable()
                    visible.append(keys)
                yield start + i, sequence, visible
