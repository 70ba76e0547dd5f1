"""Float32 sums of rows that several query tokens add to, by atomic stores.

Additions to one destination run one after another, in the order of the tokens. To let tokens run in
parallel there are ``PARTS`` destinations: token t adds to number t % ``PARTS``, and
:func:`store_total` sums them. The bits of a sum are the same in every run: the task graph orders
the tokens of a destination, and a token adds to a row once, unless its indices name a row twice.

Memory in bytes, for rows of W elements: PARTS * :func:`sums_rows` * W * 4.
"""

import functools
from collections.abc import Iterator

import pypto

from . import I32, Arguments, loop
from .pypto_versions import padded_indices
from .tiling import power_of_two, round_up

PARTS = 4  # destinations of the sums


def sums_rows(rows: int, count: int) -> int:
    """Rows of the sums over a cache, with one for each of ``count`` indices that may be invalid.

    PyPTO needs a static destination. Rounded up to one of 4 sizes per power of two, so that a
    binary serves many caches.
    """
    rows += padded_indices(count)
    step = max(power_of_two(rows) // 8, 64)
    return round_up(rows, step)


def sums_of(a: Arguments, prefix: str) -> list:
    """The destinations, arguments ``<prefix>_<part>``, of each part; static, zeros."""
    return [getattr(a, f"{prefix}_{part}") for part in range(PARTS)]


def parts_of(name: str, row, visible) -> Iterator[int]:
    """The part that the token ``row`` adds to, if it sees a key.

    Each is a loop of its own: conditions side by side multiply the paths to compile.
    """
    for part in range(PARTS):
        for _ in loop(f"{name}_PART{part}", (visible > 0) * (row % PARTS == part)):
            yield part


def add_rows(sums, places, rows, tile: int) -> None:
    """Adds ``rows`` to those of ``sums`` at ``places``, ``tile`` rows at a time."""
    pypto.set_vec_tile_shapes(tile)
    pypto.index_put_(sums, (places,), rows, accumulate=True)


def row_tiles(name: str, rows, size: int) -> Iterator[tuple]:
    """The first row and the number of rows of each tile of ``size``."""
    for i in loop(f"{name}_ROWS", (rows + size - 1) // size):
        yield i * size, (rows - i * size).min(size)


def store_total(sums: list, column: int, argument, first, count, *, size: int, tile: int) -> None:
    """The total of the parts in the columns of ``argument``, from ``column`` on, in its dtype: of
    ``count`` rows of ``size`` from ``first`` on.
    """
    shape = [size, argument.shape[1]]
    pypto.set_vec_tile_shapes(tile, shape[1])
    valid = [count, shape[1]]
    parts = [pypto.view(part, shape, [first, column], valid_shape=valid) for part in sums]
    total = pypto.cast(functools.reduce(pypto.add, parts), argument.dtype)
    pypto.assemble(total, [first, 0], argument)


def store_sum(name: str, terms, total) -> None:
    """Adds ``terms [1, T]``, one of each token, to ``total [1, 1]``, 1024 at a time in order."""
    tokens, size = terms.shape[1], 1024
    for i in loop(f"{name}_SUM", (tokens + size - 1) // size):
        pypto.set_vec_tile_shapes(1, size)
        valid = [1, (tokens - i * size).min(size)]
        tile = pypto.view(terms, [1, size], [0, i * size], valid_shape=valid)
        found = pypto.sum(tile, dim=-1, keepdim=True)
        pypto.set_vec_tile_shapes(16)
        pypto.index_put_(total, (pypto.full([1], 0, I32),), found, accumulate=True)
