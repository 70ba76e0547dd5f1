"""Lightning indexer of DeepSeek-V3.2 (arXiv 2512.02556) as a PyPTO program.

``score[j] = sum_h weights[h] * relu(query[h] . key[j])``, then the positions of the best
``sparse_count`` scores of each query token. Stages, per tile of tokens of one sequence:

1. cube: ``query [tokens * N1, D] x block^T`` for each block of keys, float32. The tokens of a tile
   share the load of a block.
2. vector: ReLU, weights and the sum over heads: a row of scores per token and chunk of keys.
3. vector: top-k of the row; what a token does not see is -inf there. A sequence of one chunk is
   done; the chunks of a longer one leave ``width`` candidates each (``sparse_count`` rounded up).
4. vector: top-k over the candidates of up to ``fan`` chunks, again over the winners if the table
   can hold more chunks than that.

A sequence costs what its own length asks for: the number of chunks follows from it, and the last
chunk is scored in the smaller of two static sizes if that holds it.

Equal scores: candidates stand in the order of their chunks, so that the lower position is first as
far as PyPTO's top-k keeps the order of equals, which it does not promise.

Workspace of a tile in flight, in bytes, with c chunks in the sequence and C in the block table:
``tokens * (4 * c * (N1 + 2) * chunk + 8 * C * width)``, plus ``1 / fan`` of the latter per further
level of merging. Above a ``sparse_count`` of 4096 a merge does not fit UB: one chunk only.
"""

import functools
from collections.abc import Callable

import pypto

from . import DTYPES, runtime_options
from .sequences import query_tiles
from .tiling import IndexerTiling, indexer_tiling

F32, I32 = pypto.DT_FP32, pypto.DT_INT32
LOWEST, NOTHING = -3.4028234663852886e38, float("-inf")


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def widest(visible):
    return functools.reduce(lambda most, keys: most.max(keys), visible)


def selector(
    query,
    weights,
    key,
    block_table,
    *,
    heads: int,
    block_size: int,
    sparse_count: int,
    tiling: IndexerTiling,
) -> Callable:
    """``select(row, sequence, visible, write)``, which builds the selection of a tile of tokens.

    ``write(g, value, place)`` builds what becomes of the result of token ``g`` of the tile: scores,
    best first, and their positions, both ``[1, width]`` with ``width`` the ``sparse_count`` rounded
    up to 32. Where a token sees fewer keys the score is below ``LOWEST``. It is not called for a
    tile whose tokens see nothing.

    Args:
        query: ``[T * N1, D]``.
        weights: ``[T * N1, 1]``, float32 or the dtype of ``query``.
        key: ``[blocks * block_size, D]``.
        block_table: ``[B, W]`` int32; the first ``tiling.chunks * tiling.chunk`` keys count.
    """
    dim, blocks = query.shape[1], key.shape[0] // block_size
    width = round_up(sparse_count, 32)  # the sort works on groups of 32
    chunk = round_up(max(tiling.chunk, width), block_size)
    sizes = sorted({round_up(max(chunk // part, width), block_size) for part in (tiling.part, 1)})
    # the positions of all candidates of a merge are in UB at once: 128 KiB
    fan = max((tiling.fan_in if width <= 3072 else tiling.fan_in // 2) // width, 2)

    def repeat(count, name):
        return pypto.loop(0, count, 1, name=f"LI_{name}", idx_name=f"li_{name.lower()}")

    def scores(row, sequence, first, size, visible):
        """For each token of the tile its scores ``[1, size]`` of the keys from ``first`` on."""
        rows = [pypto.tensor([1, size], F32, f"scores{g}") for g in range(len(visible))]
        q = pypto.view(query, [len(rows) * heads, dim], [row * heads, 0])
        w = [pypto.view(weights, [heads, 1], [(row + g) * heads, 0]) for g in range(len(rows))]
        # beyond the sequence: its last block once more, what its scores are does not count
        last = (widest(visible) - 1) // block_size
        step = max(tiling.keys // block_size, 1) * block_size
        for start in range(0, size, step):
            keys = min(step, size - start)
            logits = pypto.tensor([len(rows) * heads, keys], F32, "logits")
            pypto.set_cube_tile_shapes([tiling.m] * 2, [dim] * 2, [tiling.n] * 2)
            for offset in range(0, keys, block_size):
                column = last.min((first + (start + offset)) // block_size)
                block = block_table[sequence, column].max(0).min(blocks - 1)
                k = pypto.view(key, [block_size, dim], [block * block_size, 0])
                pypto.assemble(pypto.matmul(q, k, F32, b_trans=True), [0, offset], logits)
            for g, row_K in enumerate(rows):
                pypto.set_vec_tile_shapes(heads, 16)
                w_H = w[g] if weights.dtype == F32 else pypto.cast(w[g], F32)
                pypto.set_vec_tile_shapes(heads, tiling.keys)
                logits_HK = pypto.view(logits, [heads, keys], [g * heads, 0])
                terms_HK = pypto.mul(pypto.relu(logits_HK), w_H)
                # a score of -inf is a score: -inf means no key from here on
                score_K = pypto.maximum(pypto.sum(terms_HK, dim=0, keepdim=True), LOWEST)
                pypto.assemble(score_K, [0, start], row_K)
        return rows

    def best(row, valid):
        """Values and places of the ``width`` best among the first ``valid`` of a row."""
        size = row.shape[1]
        pypto.set_vec_tile_shapes(1, min(size, tiling.sort))
        row = pypto.view(row, [1, size], [0, 0], valid_shape=[1, valid])
        # not left to top-k, which wants ``width`` valid elements
        row = pypto.fillpad(row, "constant", NOTHING)
        return pypto.topk(row, k=width, dim=-1, largest=True)

    def positions(places, chosen, span):
        """Positions of the ``chosen`` candidates; each ``width`` of them are from ``span`` keys."""
        pypto.set_vec_tile_shapes(1, width)
        # in float32, exact below 2^24: integers cannot be divided
        part = pypto.floor(pypto.mul(pypto.add(pypto.cast(chosen, F32), 0.5), 1 / width))
        start = pypto.cast(pypto.mul(part, float(span)), I32)
        return pypto.add(pypto.gather(places, 1, chosen), start)

    def size_for(keys):
        """The smallest size that holds so many keys, as a loop over what may be built for it."""
        if len(sizes) == 1 or pypto.cond(keys <= sizes[0]):
            yield sizes[0]
        else:
            yield sizes[1]

    def ranked(row, sequence, first, visible, most, name):
        """``(g, values, places)``: of each token the ``width`` best keys from ``first`` on."""
        tile, left = len(visible), [(keys - first).max(0) for keys in visible]
        copies = [pypto.tensor([1, sizes[-1]], F32, f"copy{g}") for g in range(tile)]
        for _ in repeat(1, f"{name}_SCORE{tile}"):
            for size in size_for(most - first):
                rows = scores(row, sequence, first, size, visible)
                if tile == 1:
                    yield 0, *best(rows[0], left[0].min(size))
                    continue
                # whole rows are handed to the loops below
                pypto.set_vec_tile_shapes(1, min(size, tiling.sort))
                for row_K, copy in zip(rows, copies, strict=True):
                    pypto.assemble(pypto.clone(row_K), [0, 0], copy)
        # a loop per token: of two valid shapes in one graph the compiler loses one
        # (InferParamIndex), and keys that a token does not see get in
        for g in range(tile if tile > 1 else 0):
            for _ in repeat(1, f"{name}_RANK{tile}_{g}"):
                for size in size_for(most - first):
                    scores_K = pypto.view(copies[g], [1, size], [0, 0])
                    yield g, *best(scores_K, left[g].min(size))

    def candidates(chunks, level, tile):
        """Per token the values and the places of ``width`` candidates of each chunk."""
        shape = [1, (chunks if chunks <= fan else round_up(chunks, fan)) * width]
        values = [pypto.tensor(shape, F32, f"values{level}_{g}") for g in range(tile)]
        return values, [pypto.tensor(shape, I32, f"places{level}_{g}") for g in range(tile)]

    def select(row, sequence, visible, write):
        pypto.set_pass_options(**tiling.pass_options)  # of the loop that this is called in
        tile, most = len(visible), widest(visible)

        # each case in a loop of its own: conditions side by side multiply the paths to compile
        for _ in repeat((most > 0) * (most <= chunk), f"CHUNK{tile}"):
            for g, value, place in ranked(row, sequence, 0, visible, most, "CHUNK"):
                pypto.set_vec_tile_shapes(1, width)
                write(g, value, place)

        if tiling.chunks == 1:
            return
        long, chunks, span = most > chunk, tiling.chunks, chunk
        count = (most + chunk - 1) // chunk * long
        values, places = candidates(chunks, 0, tile)
        for c in repeat(count, f"CHUNKS{tile}"):
            parts = ranked(row, sequence, c * chunk, visible, most, "CHUNKS")
            for g, value, place in parts:
                pypto.set_vec_tile_shapes(1, width)
                pypto.assemble(pypto.clone(value), [0, c * width], values[g])
                pypto.assemble(pypto.clone(place), [0, c * width], places[g])

        level = 0
        while chunks > fan:
            level, chunks = level + 1, -(-chunks // fan)
            best_values, best_places = candidates(chunks, level, tile)
            group = [1, fan * width]
            for j in repeat((count + fan - 1) // fan, f"MERGE{level}_{tile}"):
                at, valid = [0, j * fan * width], (count - j * fan).min(fan) * width
                for g in range(tile):
                    for _ in repeat(1, f"MERGE{level}_{tile}_{g}"):
                        value, chosen = best(pypto.view(values[g], group, at), valid)
                        place = positions(pypto.view(places[g], group, at), chosen, span)
                        pypto.assemble(pypto.clone(value), [0, j * width], best_values[g])
                        pypto.assemble(place, [0, j * width], best_places[g])
            values, places = best_values, best_places
            count, span = (count + fan - 1) // fan, span * fan
        for g in range(tile):
            for _ in repeat(long, f"MERGE{tile}_{g}"):
                value, chosen = best(values[g], count * width)
                write(g, value, positions(places[g], chosen, span))

    return select


def write_indices(indices, row, g, value, place):
    """The selection of token ``row + g``: -1 for what only fills up."""
    # by the value: a second valid shape in one graph is lost by the compiler
    place = pypto.where(pypto.lt(value, LOWEST), -1.0, pypto.cast(place, F32))
    place = pypto.view(pypto.cast(place, I32), [1, indices.shape[1]], [0, 0])
    pypto.assemble(place, [row + g, 0], indices)


def capacity(block_table, *, block_size: int, sparse_count: int, tiling: IndexerTiling):
    """Keys of a sequence that its row of the block table and the chunks can hold."""
    chunk = round_up(max(tiling.chunk, round_up(sparse_count, 32)), block_size)
    return pypto.min(block_table.shape[1] * block_size, tiling.chunks * chunk)


def program(
    query,
    weights,
    key,
    query_lengths,
    key_lengths,
    block_table,
    indices,
    *,
    heads: int,
    block_size: int,
    sparse_count: int,
    layout: str,
    ragged: bool,
    sparse_mode: int,
    tiling: IndexerTiling,
) -> None:
    """Fills every row of ``indices [T, sparse_count]``: best first, then -1.

    The other arguments are those of :func:`selector` and :func:`query_tiles`.
    """
    sizes = dict(block_size=block_size, sparse_count=sparse_count, tiling=tiling)
    select = selector(query, weights, key, block_table, heads=heads, **sizes)
    for row, sequence, visible in query_tiles(
        query_lengths,
        key_lengths,
        indices.shape[0],
        capacity(block_table, **sizes),
        layout=layout,
        ragged=ragged,
        sparse_mode=sparse_mode,
        name="LI",
        tile=tiling.tokens,
    ):
        tile, most = len(visible), widest(visible)

        for _ in pypto.loop(0, most <= 0, 1, name=f"LI_NONE{tile}", idx_name=f"li_none{tile}"):
            pypto.set_vec_tile_shapes(1, round_up(sparse_count, 32))
            for g in range(tile):
                pypto.assemble(pypto.full([1, sparse_count], -1, I32), [row + g, 0], indices)
        select(row, sequence, visible, functools.partial(write_indices, indices, row))


def kernel(
    *,
    dtype: str,
    weights_dtype: str,
    heads: int,
    block_size: int,
    tokens: int,
    batch: int,
    table_width: int,
    ready_on_host: bool,
    **facts,
) -> Callable:
    """The kernel of :func:`program`, whose arguments it takes, for a call with these static facts.

    One binary serves every number of tokens and sequences of a class of :func:`indexer_tiling`, and
    every block table up to the next power of two.
    """
    tiling = indexer_tiling(
        tokens=tokens, batch=batch, heads=heads, block_size=block_size, table_width=table_width
    )
    return _kernel(
        dtype=DTYPES[dtype],
        weights_dtype=DTYPES[weights_dtype],
        heads=heads,
        block_size=block_size,
        tiling=tiling,
        ready_on_host=ready_on_host,
        **facts,
    )


@functools.cache
def _kernel(*, dtype, weights_dtype, tiling: IndexerTiling, ready_on_host: bool, **facts):
    D, S = pypto.DYNAMIC, pypto.STATIC

    @pypto.frontend.jit(
        runtime_options=runtime_options(
            "query_lengths",
            "key_lengths",
            "block_table",
            ready_on_host=ready_on_host,
            layout=facts["layout"],
        ),
    )
    def npu_lightning_indexer_pto(
        query: pypto.Tensor([D, S], dtype),
        weights: pypto.Tensor([D, S], weights_dtype),
        key: pypto.Tensor([D, S], dtype),
        query_lengths: pypto.Tensor([D], I32),
        key_lengths: pypto.Tensor([D], I32),
        block_table: pypto.Tensor([D, D], I32),
        indices: pypto.Tensor([D, S], I32),
    ):
        program(
            query,
            weights,
            key,
            query_lengths,
            key_lengths,
            block_table,
            indices,
            tiling=tiling,
            **facts,
        )

    return npu_lightning_indexer_pto
