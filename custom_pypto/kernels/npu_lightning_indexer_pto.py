"""Lightning indexer of DeepSeek-V3.2 (arXiv 2512.02556) as a PyPTO program.

``score[j] = sum_h weights[h] * relu(query[h] . key[j])``, then the positions of the best
``sparse_count`` scores of each query token. Stages, per tile of tokens of one sequence:

1. cube: ``query [tokens * N1, D] x block^T`` for each block of keys, float32. The tokens of a tile
   share the load of a block.
2. vector: ReLU, weights and the sum over heads: a row of scores per token and chunk of keys.
3. vector: top-k of the row, where invisible keys are -inf. A sequence of one chunk is done; the
   chunks of a longer one leave ``width`` candidates each (``sparse_count`` rounded up).
4. vector: top-k over the candidates of up to ``fan`` chunks, again over the winners if the table
   can hold more chunks than that.

Cost follows the length of each sequence: it sets the number of chunks, and the last chunk is scored
in the smaller of two static sizes if it fits.

Ties: candidates are in the order of their chunks, so that a stable top-k puts the lower position
first. PyPTO does not guarantee stability.

Workspace of a tile in flight, in bytes, with c chunks in the sequence and C in the block table:
``tokens * (4 * c * (N1 + 1) * chunk + 8 * C * width)``, plus ``1 / fan`` of the latter per
further level of merging. Above a ``sparse_count`` of 4096 a merge does not fit UB: one chunk only.
"""

import functools
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field

import pypto

from . import F32, I32, PYPTO_DTYPES, Arguments, arguments, end_task, loop, runtime_options
from .index_scores import LOWEST, IndexScores, widest
from .pypto_versions import (
    begin_sort,
    behind,
    infinite_where,
    jit,
    padded_row,
    places_or_minus_one,
    product_tile,
)
from .sequences import QueryFacts, query_tiles
from .tiling import IndexerTiling, indexer_tiling, round_up


@dataclass(frozen=True, kw_only=True)
class SelectorFacts:
    """The facts of :class:`Selector`. One binary serves every number of tokens and sequences of a
    class of :func:`indexer_tiling`, and every block table up to the next power of two.
    """

    heads: int
    block_size: int
    sparse_count: int
    tokens: InitVar[int]
    batch: InitVar[int]
    table_width: InitVar[int]
    most_shared: InitVar[int] = 4  # tokens of a tile
    tiling: IndexerTiling = field(init=False)

    def __post_init__(self, tokens: int, batch: int, table_width: int, most_shared: int):
        tiling = indexer_tiling(
            tokens=tokens,
            batch=batch,
            heads=self.heads,
            block_size=self.block_size,
            table_width=table_width,
            most_shared=most_shared,
        )
        object.__setattr__(self, "tiling", tiling)


@dataclass(frozen=True, kw_only=True)
class Facts(SelectorFacts, QueryFacts):
    """The static facts of a call; the indexer of int8 keys has more."""

    dtype: str  # of query and key
    weights_dtype: str
    ready_on_host: bool
    values: bool = False  # whether the scores are results, too

    @property
    def rows_behind_query(self) -> int:
        """The rows to append to ``query``: a product loads rows behind the last token."""
        tile = product_tile(self.dtype)
        return tile - 1 if behind(self.heads, tile) else 0


class Selector(IndexScores):
    """``select(row, sequence, visible, write)`` builds the selection of a tile of tokens.

    The tile is one of :func:`query_tiles`. ``write(g, value, place)`` builds the use of the result
    of its token ``g``: scores, best first, and their positions, both ``[1, width]`` with ``width``
    the ``sparse_count`` rounded up to 32. Scores of padding are below ``LOWEST``. Tiles without
    visible keys get no ``write``.

    Args:
        a: ``query [T * N1, D]``, ``weights [T * N1, 1]``, float32 or the dtype of ``query``,
            ``key [blocks * block_size, D]``, ``block_table [B, W]`` int32, of which the first
            ``capacity`` keys count.
    """

    def __init__(self, a: Arguments, facts: SelectorFacts):
        block_size, tiling = facts.block_size, facts.tiling
        super().__init__(a, facts.heads, tiling, max(tiling.keys // block_size, 1) * block_size)
        self.facts, self.block_size = facts, block_size
        self.width = width = round_up(facts.sparse_count, 32)  # the sort works on groups of 32
        self.chunk = chunk = round_up(max(tiling.chunk, width), block_size)
        sizes = (round_up(max(chunk // part, width), block_size) for part in (tiling.part, 1))
        self.sizes = sorted(set(sizes))
        # the positions of all candidates of a merge are in UB at once: 128 KiB
        self.fan = max((tiling.fan_in if width <= 3072 else tiling.fan_in // 2) // width, 2)
        # keys of a sequence that its row of the block table and the chunks can hold
        self.capacity = pypto.min(a.block_table.shape[1] * block_size, tiling.chunks * chunk)

    def __call__(self, row, sequence, visible, write) -> None:
        pypto.set_pass_options(**self.tiling.pass_options)  # of the calling loop
        tile, most = len(visible), widest(visible)
        # each case in a loop of its own: conditions side by side multiply the paths to compile
        for _ in loop(f"LI_CHUNK{tile}", (most > 0) * (most <= self.chunk)):
            self.select_in_chunk(row, sequence, 0, visible, write)
        if self.tiling.chunks == 1:
            return

        long = most > self.chunk
        count = (most + self.chunk - 1) // self.chunk * long
        candidates = self.candidate_rows(0, self.tiling.chunks, tile)
        for c in loop(f"LI_CHUNKS{tile}", count):
            keep = functools.partial(self.keep, *candidates, c)
            self.select_in_chunk(row, sequence, c * self.chunk, visible, keep)
        values, places, count, span = self.merged(*candidates, count)
        for g in range(tile):
            for _ in loop(f"LI_MERGE{tile}_{g}", long):
                value, chosen = self.top_k(values[g], count * self.width)
                write(g, value, self.positions(places[g], chosen, span))

    def select_in_chunk(self, row, sequence, first, visible, write) -> None:
        """The selection among the keys of the chunk that starts at key ``first``."""
        size = self.size_for(widest(visible) - first)
        rows = self.scores(row, sequence, first, size, visible)
        for g, (row_K, keys) in enumerate(zip(rows, visible, strict=True)):
            begin_sort(g)
            self.rank(g, row_K, (keys - first).max(0), write)
            end_task()

    def size_for(self, keys) -> int:
        """The smallest row size that holds ``keys`` keys.

        PyPTO records the body of the calling loop once per possible size.
        """
        if len(self.sizes) == 1 or pypto.cond(keys <= self.sizes[0]):
            return self.sizes[0]
        return self.sizes[1]

    def logits(self, q, sequence, first, keys, visible):
        a, block_size, tiling = self.a, self.block_size, self.tiling
        dim, blocks = a.query.shape[1], a.key.shape[0] // block_size
        pypto.set_cube_tile_shapes([tiling.m] * 2, [dim] * 2, [tiling.n] * 2)
        logits = pypto.tensor([q.shape[0], keys], self.product, "logits")
        last = (widest(visible) - 1) // block_size
        for offset in range(0, keys, block_size):
            # beyond the sequence: its last block once more, whose scores are ignored
            column = last.min((first + offset) // block_size)
            block = a.block_table[sequence, column].max(0).min(blocks - 1)
            k = pypto.view(a.key, [block_size, dim], [block * block_size, 0])
            pypto.assemble(pypto.matmul(q, k, self.product, b_trans=True), [0, offset], logits)
        return logits

    def rank(self, g, scores, left, write) -> None:
        """Writes the best of a row, of which the first ``left`` scores are keys of token ``g``."""
        value, place = self.top_k(scores, left.min(scores.shape[1]))
        pypto.set_vec_tile_shapes(1, self.width)
        write(g, value, place)

    def top_k(self, row, valid) -> tuple:
        """Values and places of the ``width`` best among the first ``valid`` of a row."""
        pypto.set_vec_tile_shapes(1, min(row.shape[1], self.tiling.sort))
        return pypto.topk(padded_row(row, valid), k=self.width, dim=-1, largest=True)

    def candidate_rows(self, level, chunks, tile) -> tuple[list, list]:
        """Per token, the values and places of ``width`` candidates of each chunk."""
        shape = [1, (chunks if chunks <= self.fan else round_up(chunks, self.fan)) * self.width]
        values = [pypto.tensor(shape, F32, f"values{level}_{g}") for g in range(tile)]
        return values, [pypto.tensor(shape, I32, f"places{level}_{g}") for g in range(tile)]

    def keep(self, values, places, c, g, value, place) -> None:
        """Stores the candidates of token ``g`` from chunk ``c``."""
        pypto.assemble(pypto.clone(value), [0, c * self.width], values[g])
        pypto.assemble(pypto.clone(place), [0, c * self.width], places[g])

    def merged(self, values, places, count) -> tuple:
        """Candidates that fit one top-k, their number of chunks, and keys per chunk."""
        tile, fan, width = len(values), self.fan, self.width
        level, chunks, span = 0, self.tiling.chunks, self.chunk
        while chunks > fan:
            level, chunks = level + 1, -(-chunks // fan)
            top_values, top_places = self.candidate_rows(level, chunks, tile)
            group = [1, fan * width]
            for j in loop(f"LI_MERGE{level}_{tile}", (count + fan - 1) // fan):
                at, valid = [0, j * fan * width], (count - j * fan).min(fan) * width
                for g in range(tile):
                    for _ in loop(f"LI_MERGE{level}_{tile}_{g}", 1):
                        value, chosen = self.top_k(pypto.view(values[g], group, at), valid)
                        place = self.positions(pypto.view(places[g], group, at), chosen, span)
                        pypto.assemble(pypto.clone(value), [0, j * width], top_values[g])
                        pypto.assemble(place, [0, j * width], top_places[g])
            values, places = top_values, top_places
            count, span = (count + fan - 1) // fan, span * fan
        return values, places, count, span

    def positions(self, places, chosen, span):
        """Positions of the ``chosen`` candidates; ``width`` in a row come from ``span`` keys."""
        pypto.set_vec_tile_shapes(1, self.width)
        # in float32, exact below 2^24: integers cannot be divided
        part = pypto.floor(pypto.mul(pypto.add(pypto.cast(chosen, F32), 0.5), 1 / self.width))
        start = pypto.cast(pypto.mul(part, float(span)), I32)
        return pypto.add(pypto.gather(places, 1, chosen), start)


def write_indices(indices, row, g, value, place):
    """Writes the selection of token ``row + g``, padded with -1."""
    place = places_or_minus_one(place, value, LOWEST)
    pypto.assemble(pypto.view(place, [1, indices.shape[1]], [0, 0]), [row + g, 0], indices)


def write_selection(a: Arguments, row, g, value, place) -> None:
    """The indices, and the values unless these are None."""
    write_indices(a.indices, row, g, value, place)
    if a.values is not None:
        value = infinite_where(pypto.lt(value, LOWEST), value)
        value = pypto.cast(value, a.values.dtype)
        pypto.assemble(pypto.view(value, [1, a.values.shape[1]], [0, 0]), [row + g, 0], a.values)


def write_nothing(a: Arguments, row, count: int) -> None:
    nothing = pypto.full([1, count], -1, I32)
    pypto.assemble(nothing, [row, 0], a.indices)
    if a.values is not None:
        zeros = pypto.full([1, count], 0.0, F32)
        value = infinite_where(pypto.eq(zeros, 0.0), zeros)
        pypto.assemble(pypto.cast(value, a.values.dtype), [row, 0], a.values)


def program(a: Arguments, facts: Facts, selector: Callable = Selector) -> None:
    """Fills every row of ``indices [T, sparse_count]``: best first, then -1; and of ``values``,
    their scores and -inf, or None.

    The other arguments are those of :class:`Selector` and :func:`query_tiles`.
    """
    select = selector(a, facts)
    tokens, tile = a.indices.shape[0], facts.tiling.tokens
    lengths = a.query_lengths, a.key_lengths
    for row, sequence, visible in query_tiles(
        facts, *lengths, tokens, select.capacity, name="LI", tile=tile
    ):
        for _ in loop(f"LI_NONE{len(visible)}", widest(visible) <= 0):
            pypto.set_vec_tile_shapes(1, select.width)
            for g in range(len(visible)):
                write_nothing(a, row + g, facts.sparse_count)
        select(row, sequence, visible, functools.partial(write_selection, a, row))


def options(facts: Facts) -> dict:
    """Options of the kernels of both indexers."""
    return runtime_options(
        "query_lengths",
        "key_lengths",
        "block_table",
        ready_on_host=facts.ready_on_host,
        layout=facts.layout,
        iterations=128 // facts.tiling.tokens,
    )


@functools.cache
def kernel(facts: Facts) -> Callable:
    """The kernel of :func:`program`."""
    D, S = pypto.DYNAMIC, pypto.STATIC
    dtype, weights_dtype = PYPTO_DTYPES[facts.dtype], PYPTO_DTYPES[facts.weights_dtype]

    @jit(runtime_options=options(facts))
    def lightning_indexer(
        query: pypto.Tensor([D, S], dtype),
        weights: pypto.Tensor([D, S], weights_dtype),
        key: pypto.Tensor([D, S], dtype),
        query_lengths: pypto.Tensor([D], I32),
        key_lengths: pypto.Tensor([D], I32),
        block_table: pypto.Tensor([D, D], I32),
        indices: pypto.Tensor([D, S], I32),
        values: pypto.Tensor([D, S], dtype),
    ):
        program(arguments(locals(), () if facts.values else ("values",)), facts)

    return lightning_indexer
