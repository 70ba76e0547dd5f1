"""npu_lightning_indexer_grad_pto as a PyPTO program.

Stages per query token:

1. vector: the cache rows that the indices name, and the places of their terms in the sums;
2. cube: the products of the query and these rows again, float32;
3. vector: the gradients of the products, and those of the weights;
4. cube: the gradients times the rows, for the query, and, transposed, times the query, a row of
   terms for each index;
5. vector: the query's gradient in its dtype; adds the rows of terms to the sums of
   :mod:`.row_sums`.

Behind all tokens, vector: the sums in the dtype of the keys.

Memory besides the results: sums of rows of D elements. Workspace per token in flight, in bytes:
K * (N1 * (4 + 2) + D * 4 + 24).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pypto

from . import (
    F32,
    I32,
    PYPTO_DTYPES,
    Arguments,
    arguments,
    begin_task,
    end_task,
    loop,
    runtime_options,
)
from .gradient_tiling import INDEX, GradientTiling
from .index_gradients import DScores, d_products, scaled, unscaled, weights_of
from .pypto_versions import after_all, behind, jit
from .row_sums import add_rows, parts_of, row_tiles, store_total, sums_of
from .selected_rows import KeyFacts, capacity, gather_rows, selected_rows
from .sequences import query_tiles

D_SCORES = 2  # the scope of the gradients of scores; that of the selected rows is 1


@dataclass(frozen=True, kw_only=True)
class Facts(KeyFacts):
    weights_dtype: str
    dy_dtype: str
    ready_on_host: bool
    tiling: GradientTiling = INDEX


class IndexBackward:
    """The stages from the gradients of a token's scores on.

    Args:
        a: ``query_index [T * rows, D]``, ``weights [T * rows, 1]``, ``key_index``, a cache,
            ``one_block``, ``sums_<part>``, and the results ``d_query_index [T * heads, D]``,
            ``d_weights [T * heads, 1]`` and ``d_key_index``.
    """

    def __init__(self, a: Arguments, heads: int, tiling: GradientTiling):
        self.a, self.heads, self.tiling = a, heads, tiling
        self.rows, self.dim = heads + behind(heads), a.key_index.shape[1]
        self.dtype, self.sums = a.key_index.dtype, sums_of(a, "sums")

    def splits(self, width: int) -> list[tuple[int, int]]:
        """``(indices per gather, parts of a row)`` of the right operands: keys of the products,
        keys of the query's gradient.
        """
        _, latents, rows, _ = self.tiling.splits(self.rows, self.dim, 0, width)
        return [latents, rows]

    def query(self, row):
        return pypto.view(self.a.query_index, [self.rows, self.dim], [row * self.rows, 0])

    def weights(self, row):
        return weights_of(self.a.weights, row * self.rows, self.rows)

    def products(self, row, index: list, width: int):
        pypto.set_cube_tile_shapes(*self.tiling.scores(self.rows, self.dim, 0, width))
        keys = gather_rows(self.a)(self.a.key_index, index, transposed=True)
        return pypto.matmul(self.query(row), keys, F32, a_trans=False, b_trans=True)

    def add(self, row, products, d_scores: DScores, weights, index, places, part: int) -> None:
        """Writes the gradients of the token and adds those of its keys."""
        a, heads, rows, dim, tiling = self.a, self.heads, self.rows, self.dim, self.tiling
        width = products.shape[1]
        tile = tiling.softmax_rows(width)
        terms, d_weights = d_products(products, d_scores, weights, self.dtype, tile)
        d_weights = pypto.cast(d_weights, a.d_weights.dtype)
        pypto.assemble(pypto.view(d_weights, [heads, 1], [0, 0]), [row * heads, 0], a.d_weights)

        pypto.set_cube_tile_shapes(*tiling.query(rows, dim, width))
        keys = gather_rows(a)(a.key_index, index, transposed=False)
        of_query = pypto.matmul(terms, keys, F32)
        of_query = unscaled(of_query, d_scores, tiling.rows_of(rows, dim))
        of_query = pypto.cast(of_query, self.dtype)
        of_heads = pypto.view(of_query, [heads, dim], [0, 0])
        pypto.assemble(of_heads, [row * heads, 0], a.d_query_index)

        pypto.set_cube_tile_shapes(*tiling.sums(rows, dim, width))
        of_keys = pypto.matmul(terms, self.query(row), F32, a_trans=True, b_trans=False)
        tile = tiling.rows_of(tiling.add_rows, dim)
        add_rows(self.sums[part], places, unscaled(of_keys, d_scores, tile), tile)

    def nothing(self, row) -> None:
        a, heads = self.a, self.heads
        for argument, width in ((a.d_query_index, self.dim), (a.d_weights, 1)):
            pypto.set_vec_tile_shapes(16, max(width, 16))
            zeros = pypto.full([heads, width], 0.0, argument.dtype)
            pypto.assemble(zeros, [row * heads, 0], argument)

    def results(self, name: str) -> None:
        """The sums over all parts, in the dtype of the cache."""
        d_key, size = self.a.d_key_index, self.tiling.result_rows
        tile = self.tiling.rows_of(self.tiling.result_tile, self.dim)
        for first, count in row_tiles(name, d_key.shape[0], size):
            store_total(self.sums, 0, d_key, first, count, size=size, tile=tile)


def given_gradients(a: Arguments, row, mask):
    """The row of ``dy``, 0 where the index is invalid."""
    width, given = mask.shape[1], a.dy.shape[1]
    pypto.set_vec_tile_shapes(1, width)
    dy = pypto.view(a.dy, [1, width], [row, 0], valid_shape=[1, given])
    if a.dy.dtype != F32:
        dy = pypto.cast(dy, F32)
    if given < width:
        dy = pypto.fillpad(dy, "constant", 0.0)
    return pypto.where(pypto.eq(mask, 1.0), dy, 0.0)


def program(a: Arguments, facts: Facts) -> None:
    """Writes the gradients.

    Args:
        a: the arguments of :func:`query_tiles`, of :func:`.selected_rows.selected_rows` and of
            :class:`IndexBackward`; ``dy [T, K]``.
    """
    a.key = a.key_index
    backward = IndexBackward(a, facts.heads, facts.tiling)
    tokens = a.indices.shape[0]
    for row, sequence, (visible,) in query_tiles(
        facts, a.query_lengths, a.key_lengths, tokens, capacity(a, facts), name="LIG"
    ):
        for part in parts_of("LIG", row, visible):
            pypto.set_pass_options(**facts.tiling.pass_options)  # of the calling loop
            found, places, mask = selected_rows(a, facts, row, sequence, visible, backward.splits)
            products = backward.products(row, found[0], mask.shape[1])
            begin_task(D_SCORES)
            weights = backward.weights(row)
            d_scores = scaled(given_gradients(a, row, mask), weights, backward.dim)
            end_task()
            backward.add(row, products, d_scores, weights, found[1], places, part)
        for _ in loop("LIG_NONE", visible <= 0):
            backward.nothing(row)
    for _ in after_all("LIG_RESULTS"):
        backward.results("LIG")


@functools.cache
def kernel(facts: Facts) -> Callable:
    """The kernel of :func:`program`."""
    D, S = pypto.DYNAMIC, pypto.STATIC
    dtype, weights_dtype = PYPTO_DTYPES[facts.dtype], PYPTO_DTYPES[facts.weights_dtype]
    control_flow = ["query_lengths"] + ["key_lengths"] * (facts.block_size > 0)
    options = runtime_options(*control_flow, ready_on_host=facts.ready_on_host, layout=facts.layout)

    @jit(runtime_options=options)
    def lightning_indexer_grad(
        query_index: pypto.Tensor([D, S], dtype),
        key_index: pypto.Tensor([D, S], dtype),
        weights: pypto.Tensor([D, S], weights_dtype),
        dy: pypto.Tensor([D, S], PYPTO_DTYPES[facts.dy_dtype]),
        indices: pypto.Tensor([D, S], I32),
        query_lengths: pypto.Tensor([D], I32),
        key_lengths: pypto.Tensor([D], I32),
        key_starts: pypto.Tensor([D], I32),
        block_table: pypto.Tensor([D, D], I32),
        one_block: pypto.Tensor([S, S], I32),
        sums_0: pypto.Tensor([S, S], F32),
        sums_1: pypto.Tensor([S, S], F32),
        sums_2: pypto.Tensor([S, S], F32),
        sums_3: pypto.Tensor([S, S], F32),
        d_query_index: pypto.Tensor([D, S], dtype),
        d_key_index: pypto.Tensor([D, S], dtype),
        d_weights: pypto.Tensor([D, S], weights_dtype),
    ):
        program(arguments(locals()), facts)

    return lightning_indexer_grad
