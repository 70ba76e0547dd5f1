"""The cache rows that the indices of a query token name, for programs that add to these rows."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pypto

from . import F32, I32, Arguments, begin_task, end_task
from .npu_sparse_flash_attention_pto import checked_indices, checked_table
from .pypto_versions import behind, gathered, number, pieces
from .sequences import MOST_ROWS, QueryFacts
from .tiling import power_of_two


@dataclass(frozen=True, kw_only=True)
class KeyFacts(QueryFacts):
    """The facts of query tokens and their keys. A binary serves every block table up to the next
    power of two.
    """

    dtype: str
    heads: int  # of the query
    block_size: int  # 0: the keys are not paged
    table_width: int  # of the block table, then rounded up

    def __post_init__(self):
        object.__setattr__(self, "table_width", max(power_of_two(self.table_width), 64))

    @property
    def rows(self) -> int:
        """Rows of a token in the inputs by head: whole tiles, behind the heads of zeros."""
        return self.heads + behind(self.heads)


def capacity(a: Arguments, facts: KeyFacts):
    """Rows that one sequence can have."""
    rows = a.block_table.shape[1] * facts.block_size if facts.block_size else a.key.shape[0]
    return pypto.min(rows, MOST_ROWS)  # int64, as query_tiles needs it


def selected_rows(a: Arguments, facts: KeyFacts, row, sequence, visible, splits: Callable) -> tuple:
    """``(rows, places, mask)`` of the indices of the token ``row``.

    An index is invalid behind the first -1 and outside of what the token sees. Its row in the cache
    is that of a valid index, its place one behind the cache that no other index has.

    Args:
        a: ``indices [T, K]`` and ``block_table [B, W]`` int32, of which the latter is not read
            without pages; ``key_starts [B]`` int32, not read with pages; ``key``, the cache.
        splits: ``splits(width)`` returns the arguments of calls of :func:`pieces`.
    Returns:
        The pieces of the rows for each split; places, int32 ``[width]``; float32 ``[1, width]``,
        1 where valid, else 0. ``width`` is K, padded.
    """
    cache = a.key.shape[0]
    begin_task()
    last = number(visible - 1)
    index, mask = checked_indices(a.indices, row, last)
    width = index.shape[1]
    # from ``last``, here and below, so that all is connected and stays in one task
    last_row = pypto.sub(number(visible - 1 + cache - 1), last)
    if facts.block_size:
        last_block = pypto.sub(number(visible - 1 + cache // facts.block_size - 1), last)
        table = checked_table(a.block_table, sequence, last_block, facts.table_width)
        rows = paged(index, table, float(facts.block_size))
    else:
        start = pypto.sub(number(visible - 1 + a.key_starts[sequence].max(0)), last)
        pypto.set_vec_tile_shapes(1, width)
        rows = pypto.add(index, start)
    rows = pypto.minimum(rows, last_row)
    pypto.set_vec_tile_shapes(width)
    order = pypto.reshape(pypto.arange(1.0, float(width + 1), 1.0), [1, width])
    pypto.set_vec_tile_shapes(1, width)
    others = pypto.add(order, last_row)
    places = pypto.cast(pypto.where(pypto.eq(mask, 1.0), rows, others), I32)
    found = [pieces(rows, *split) for split in splits(width)]
    end_task()
    # in a task of its own: one that holds it and the gathers' indices depends on itself
    return found, pypto.reshape(places, [width]), mask


def gather_rows(a: Arguments) -> Callable:
    """:func:`.pypto_versions.gathered` from the rows of any cache, with ``one_block [1, 1]``, 0."""
    table = pypto.view(a.one_block, [1, 1], [0, 0])
    return functools.partial(gathered, table=table, block_size=MOST_ROWS)


def paged(index, table, size: float):
    """The cache rows of the positions ``index``, ``[1, K]`` float32, from a row of block ids.

    float32 is exact for the products and differences of whole numbers below 2^24, but a quotient
    may be the next whole number.
    """
    width = index.shape[1]
    pypto.set_vec_tile_shapes(1, width)
    block = pypto.floor(pypto.mul(index, 1 / size))
    offset = pypto.sub(index, pypto.mul(block, size))
    over = pypto.where(pypto.lt(offset, 0.0), 1.0, 0.0)
    under = pypto.where(pypto.lt(offset, size), 0.0, 1.0)
    block = pypto.add(pypto.sub(block, over), under)
    offset = pypto.sub(index, pypto.mul(block, size))
    ids = pypto.gather(table, 1, pypto.cast(block, I32))
    return pypto.add(pypto.mul(pypto.cast(ids, F32), size), offset)
