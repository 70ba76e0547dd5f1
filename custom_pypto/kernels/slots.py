"""Rows of caches that are written by slot."""

from dataclasses import dataclass

import pypto

from . import loop


@dataclass(frozen=True, kw_only=True)
class SlotFacts:
    slot_words: int  # int32 words per slot: 1, or 2 of an int64 one, the low word first


def write_rows(name: str, written: list[tuple], slots, start, rows, *, slot_words: int) -> None:
    """``cache[slot] = row`` for each pair ``(rows, cache)``, where the slot of a token exists.

    Args:
        name: of the loop over the tokens.
        written: rows of whole blocks of 32 bytes, which begin with the elements of a cache row.
        slots: ``[1, T * slot_words]`` int32.
        rows: number of valid rows of the tile.
    """
    count = written[0][1].shape[0]
    for i in loop(name, rows):
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
