"""Which query token belongs to which sequence and which keys it sees, as PyPTO loops.

The counterpart of :mod:`custom_pypto.reference.sequences`. Lengths are data: each is clamped to
what the tensors hold before it bounds a loop or becomes an address, so that no value can lead
outside a tensor.
"""

from collections.abc import Iterator

import pypto


def query_tokens(*lengths_and_sizes, **facts) -> Iterator[tuple]:
    """``(row, sequence, visible)`` of every query token: :func:`query_tiles` of one token each."""
    for row, sequence, (visible,) in query_tiles(*lengths_and_sizes, **facts):
        yield row, sequence, visible


def query_tiles(
    query_lengths,
    key_lengths,
    tokens,
    capacity,
    *,
    layout: str,
    ragged: bool,
    sparse_mode: int,
    name: str,
    tile: int = 1,
    after_all: bool = False,
) -> Iterator[tuple]:
    """``(row, sequence, visible)`` of consecutive query tokens, in nested loops.

    The tokens of a tile belong to one sequence: what is left of it after tiles of ``tile`` tokens
    comes as tiles of one. Code that iterates is built once for each of the two sizes.

    Args:
        query_lengths: ``[B]`` int32, lengths for BSND, non-decreasing prefix sums for TND.
        key_lengths: ``[B]`` int32.
        tokens: query tokens, padding included.
        capacity: keys that the block table of one sequence can hold.
        ragged: whether ``query_lengths`` counts for BSND; without it every row is a token.
        name: prefix of the loops' names.
        tile: tokens per tile.
        after_all: start when every task of the program so far is done. Without it a loop that reads
            an argument with a dynamic first dim waits only for the iteration that wrote it last.

    Yields:
        The row of the first token in the flattened query; its sequence; a list: for each token the
        number of keys it sees, 0 for padding, whose rows are visited too so that the caller can
        write them.
    """
    batch = key_lengths.shape[0]
    packed = layout == "TND"
    # TND: one sequence more, without keys, owns the rows behind the last sequence
    for b in pypto.loop(
        0,
        batch + packed,
        1,
        name=f"{name}_B",
        idx_name=f"{name.lower()}_b",
        submit_before_loop=after_all,
    ):
        if packed:
            start = query_lengths[(b - 1).max(0)].max(0).min(tokens) * b.min(1)
            end = query_lengths[b.min(batch - 1)].max(start).min(tokens)
            end = end + (tokens - end) * (b - batch + 1).max(0)
            rows = len_q = end - start
            owns_keys = (batch - b).min(1)
        else:
            rows = len_q = tokens // batch
            if ragged:
                len_q = query_lengths[b].max(0).min(rows)
            start, owns_keys = b * rows, 1
        sequence = b.min(batch - 1)
        len_k = key_lengths[sequence].max(0).min(capacity) * owns_keys
        tiled = rows // tile * tile
        ranges = [(tile, 0, tiled), (1, tiled, rows)] if tile > 1 else [(1, 0, rows)]
        for size, first, last in ranges:
            idx_name = f"{name.lower()}_s{size}"
            for i in pypto.loop(first, last, size, name=f"{name}_S{size}", idx_name=idx_name):
                visible = []
                for j in range(size):
                    keys = len_k
                    if sparse_mode != 0:
                        keys = (len_k - len_q + i + j + 1).max(0).min(len_k)
                    if ragged and not packed:
                        keys = keys * (len_q - i - j).max(0).min(1)
                    keys.as_variable()
                    visible.append(keys)
                yield start + i, sequence, visible
