"""What the programs of the int8 writers share: tiles of tokens, the quantiser, rows by slot."""

from collections.abc import Iterator

import pypto

from . import loop
from .pypto_versions import div

TOKENS = 16  # per tile
FLOAT = pypto.DT_FP32


def tiles(tokens, name: str) -> Iterator[tuple]:
    """``(first token, tokens)`` of each tile, in a loop."""
    for i in loop(name, (tokens + TOKENS - 1) // TOKENS):
        start = i * TOKENS
        yield start, (tokens - start).min(TOKENS)


def loaded(x, start, rows):
    """A tile of ``x``, of which ``rows`` rows are valid."""
    width = x.shape[1]
    pypto.set_vec_tile_shapes(TOKENS, width)
    return pypto.view(x, [TOKENS, width], [start, 0], valid_shape=[rows, width])


def quantised(x) -> tuple:
    """``(int8, float32 scales)`` of the rows of ``x``, ``[n, W]`` and ``[n, 1]``."""
    pypto.set_vec_tile_shapes(*x.shape)
    x = pypto.cast(x, FLOAT)
    largest = pypto.maximum(pypto.amax(pypto.abs(x), dim=-1, keepdim=True), 1e-4)
    # of two tensors: 127 / x of a number is its reciprocal times 127, which rounds twice
    steps = pypto.add(pypto.mul(largest, 0.0), 127.0)
    y = pypto.mul(x, div(steps, largest))
    # by way of the integers: casts to int8 exist from float16 only
    y = pypto.cast(y, pypto.DT_INT32, pypto.CastMode.CAST_RINT)
    y = pypto.cast(pypto.cast(y, pypto.DT_FP16), pypto.DT_INT8, pypto.CastMode.CAST_TRUNC)
    return y, div(largest, steps)


def write_rows(written: list[tuple], slots, start, rows, *, slot_words: int) -> None:
    """``cache[slot] = row`` for each pair ``(rows, cache)``, where the slot of a token exists.

    Args:
        written: rows of whole blocks of 32 bytes, of which the first ones are those of the cache.
        slots: ``[1, T * slot_words]`` int32, int64 slots as two words, the low one first.
        rows: valid ones of the tile.
    """
    count = written[0][1].shape[0]
    for i in loop("QUANT_ROW", rows):
        word = (start + i) * slot_words
        slot, *high = (slots[0, word + j] for j in range(slot_words))
        exists = (slot >= 0) * (slot < count)
        for half_word in high:
            exists = exists * (half_word == 0)
        slot = slot.max(0).min(count - 1)
        for source, cache in written:
            width = source.shape[1]
            pypto.set_vec_tile_shapes(1, width)
            # no row where the slot is outside
            valid = [exists, cache.shape[1]]
            row = pypto.view(source, [1, width], [i, 0], valid_shape=valid)
            pypto.assemble(pypto.clone(row), [slot, 0], cache)
