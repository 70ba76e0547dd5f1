"""npu_dense_lightning_indexer_grad_kl_loss_pto as a PyPTO program.

Stages, per tile of query tokens of one sequence and per tile of its keys:

1. cube: the attention's scores ``query x key^T`` and the indexer's products, float32;
2. vector: ``p = sum_h P / N1`` from the attention's statistics, the indexer's scores and its
   softmax q, ``dI = q - p`` and the tile's part of the loss, all float32;
3. vector: gradients of the products (:mod:`.index_gradients`), rounded to the dtype, and weights;
4. cube: gradients times keys, for the query, and gradients times queries, a row for each key;
5. vector: the first ones are added to sums of the tokens, the rows to those of :mod:`.row_sums`.

Behind all tiles, vector: the sums in the dtypes of the results, and the loss.

Memory besides the results, in bytes: ``2 * (rows + chunk) * (L + R + D)`` for a copy of the keys,
``T * N1 * 2 * (L + R)`` for one of the queries, and the sums of rows of D elements. Workspace of a
tile in flight: ``tokens * chunk * (4 * N1 + 6 * N) + 4 * D * (chunk + tokens * N)``.
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
from .every_key import DenseFacts, DenseScores
from .gradient_tiling import EVERY_KEY, GradientTiling
from .index_gradients import DScores, d_products, index_scores, scaled, unscaled, weights_of
from .index_scores import LOWEST, widest
from .pypto_versions import after_all, behind, computed, jit
from .row_sums import add_rows, parts_of, row_tiles, store_sum, store_total, sums_of
from .sequences import MOST_ROWS, query_tiles
from .tiling import cube_tile, power_of_two

SCORES, PRODUCTS, ATTENTION, DIVERGENCE = 10, 20, 30, 40  # tasks


@dataclass(frozen=True, kw_only=True)
class Facts(DenseFacts):
    """The static facts of a call."""

    attention_heads: int
    scale: float
    sums: GradientTiling = EVERY_KEY

    @property
    def rows(self) -> int:
        """Rows of a token in the inputs by head of the indexer, those behind them zeros."""
        return self.heads + behind(self.heads)

    @property
    def attention_rows(self) -> int:
        return self.attention_heads + behind(self.attention_heads)


class DenseDivergence:
    """``tokens(row, sequence, visible)`` adds the terms of a tile of tokens, ``results()`` writes
    what is of all tokens.
    """

    def __init__(self, a: Arguments, facts: Facts):
        self.a, self.facts, self.tiling = a, facts, facts.tiling
        self.index, self.heads, self.size = DenseScores(a, facts), facts.rows, facts.tiling.chunk
        self.dim, self.dtype = a.query.shape[1], a.query.dtype
        self.sums = sums_of(a, "sums")

    def tokens(self, row, sequence, visible) -> None:
        options = self.facts.sums.pass_options
        pypto.set_pass_options(**options)  # of the calling loop
        tile, size, name = len(visible), self.size, f"KL{len(visible)}"
        d_query = pypto.tensor([tile * self.heads, self.dim], F32, "d_query")
        d_weights = pypto.tensor([tile * self.heads, 1], F32, "d_weights")
        loss = pypto.tensor([tile, 1], F32, "loss")
        for _ in loop(f"{name}_START", 1):
            for x, rows in ((d_query, self.heads), (d_weights, self.heads), (loss, tile)):
                pypto.set_vec_tile_shapes(rows, max(x.shape[1], 16))
                x.move(pypto.full(x.shape, 0.0, F32))
        for c in loop(f"{name}_KEYS", (widest(visible) + size - 1) // size):
            first = self.a.key_starts[sequence] + c * size
            terms = pypto.tensor([size, self.dim], F32, "terms")
            unit = pypto.tensor([1, self.dim], F32, "unit")
            for _ in loop(f"{name}_TILE", 1):
                self.tile(row, visible, c * size, first, (d_query, d_weights, loss), terms, unit)
            for part in parts_of(name, row // tile, widest(visible)):
                pypto.set_pass_options(**options)
                places, rows = pypto.view(self.a.places, [size], [first]), self.facts.sums.add_rows
                of_keys = unscaled(terms, DScores(None, None, unit), rows)
                add_rows(self.sums[part], places, of_keys, rows)
        for _ in loop(f"{name}_END", 1):
            self.store(row, tile, d_query, d_weights, loss)

    def tile(self, row, visible, position, first, sums, terms, unit) -> None:
        """Adds the terms of a tile of keys to those of its tokens, and makes those of its keys."""
        tile, size, heads = len(visible), self.size, self.heads
        q = pypto.view(self.a.query, [tile * heads, self.dim], [row * heads, 0])
        k = pypto.view(self.a.key, [size, self.dim], [first, 0])
        p = self.attention(row, tile, first)
        pypto.set_cube_tile_shapes([self.tiling.m] * 2, [self.dim] * 2, [self.tiling.n] * 2)
        products = pypto.matmul(q, k, F32, b_trans=True)
        of_token = [pypto.view(products, [heads, size], [g * heads, 0]) for g in range(tile)]
        log_q = pypto.tensor([tile, size], F32, "log_q")
        for g in range(tile):
            begin_task(SCORES + g)
            weights = weights_of(self.a.weights, (row + g) * heads, heads)
            scores = index_scores(of_token[g], weights)
            pypto.set_vec_tile_shapes(1, size)
            lse = pypto.view(self.a.index_lse, [1, 1], [row + g, 0])
            pypto.assemble(pypto.sub(scores, lse), [g, 0], log_q)
        begin_task(DIVERGENCE)
        loss, d_scores = self.divergence(visible, position, p, log_q)
        all_weights = weights_of(self.a.weights, row * heads, tile * heads)
        whole = scaled(d_scores, all_weights, self.dim)
        pypto.assemble(whole.unit, [0, 0], unit)
        of_products = pypto.tensor([tile * heads, size], self.dtype, "of_products")
        of_weights = pypto.tensor([tile * heads, 1], F32, "of_weights")
        rows = 8  # weights of fewer heads start between multiples of 32 bytes
        for g in range(tile):
            begin_task(PRODUCTS + g)
            weights = weights_of(self.a.weights, (row + g) * heads, heads)
            values, large = (pypto.view(x, [1, size], [g, 0]) for x in whole[:2])
            one = DScores(values, large, whole.unit)
            found = d_products(of_token[g], one, weights, self.dtype, rows)
            pypto.assemble(found[0], [g * heads, 0], of_products)
            pypto.assemble(found[1], [g * heads, 0], of_weights)
        end_task()

        pypto.set_cube_tile_shapes(*self.facts.sums.query(tile * heads, self.dim, size))
        of_query = pypto.matmul(of_products, k, F32)
        of_query = unscaled(of_query, whole, 64)
        # apart: the tiles of keys wait for each other here only
        for x, total in zip((of_query, of_weights, loss), sums, strict=True):
            self.add(x, total)
        pypto.set_cube_tile_shapes(*self.facts.sums.sums(tile * heads, self.dim, size))
        of_keys = pypto.matmul(of_products, q, F32, a_trans=True, b_trans=False)
        pypto.assemble(of_keys, [0, 0], terms)

    def attention(self, row, tile: int, first):
        """``[tile, chunk]``: the mean over the heads of the probabilities of a tile of keys."""
        a, heads, size = self.a, self.facts.attention_rows, self.size
        width = a.attended.shape[1]
        q = pypto.view(a.attending, [tile * heads, width], [row * heads, 0])
        k = pypto.view(a.attended, [size, width], [first, 0])
        pypto.set_cube_tile_shapes(*cube_tile(128, width, 256, columns=size))
        logits = pypto.matmul(q, k, F32, b_trans=True)
        p = pypto.tensor([tile, size], F32, "p")
        for g in range(tile):
            begin_task(ATTENTION + g)
            pypto.set_vec_tile_shapes(heads, min(2**14 // power_of_two(heads), size))
            of_token = pypto.view(logits, [heads, size], [g * heads, 0])
            lse = pypto.view(a.attention_lse, [heads, 1], [(row + g) * heads, 0])
            each = pypto.exp(pypto.sub(pypto.mul(of_token, self.facts.scale), lse))
            total = pypto.sum(each, dim=0, keepdim=True)
            pypto.set_vec_tile_shapes(1, size)  # one task
            pypto.assemble(pypto.mul(total, 1 / self.facts.attention_heads), [g, 0], p)
        end_task()
        return p

    def divergence(self, visible, position, p, log_q):
        """Losses of the tokens, ``[tile, 1]``, and gradients of the scores, ``[tile, chunk]``."""
        tile, size = p.shape
        pypto.set_vec_tile_shapes(1, size)
        mask = pypto.tensor([tile, size], F32, "mask")
        for g, keys in enumerate(visible):
            pypto.assemble(pypto.clone(self.index.mask(keys, position)), [g, 0], mask)
        seen = pypto.eq(mask, 1.0)
        log_q = pypto.where(seen, log_q, LOWEST)
        p = pypto.where(seen, p, 0.0)
        log_p = pypto.log(pypto.where(pypto.gt(p, 0.0), p, 1.0))
        terms = pypto.mul(p, pypto.sub(log_p, pypto.where(seen, log_q, 0.0)))
        return pypto.sum(terms, dim=-1, keepdim=True), pypto.sub(pypto.exp(log_q), p)

    def add(self, terms, sums) -> None:
        rows, columns = terms.shape
        pypto.set_vec_tile_shapes(min(rows, 64), max(columns, 16))
        sums.move(pypto.add(sums, terms))

    def store(self, row, tile: int, d_query, d_weights, loss) -> None:
        """Writes what is of the tokens alone."""
        a, heads = self.a, self.facts.heads
        for g in range(tile):
            for sums, argument in ((d_query, a.d_query), (d_weights, a.d_weights)):
                columns = sums.shape[1]
                pypto.set_vec_tile_shapes(64, max(columns, 16))
                of_heads = computed(pypto.view(sums, [heads, columns], [g * self.heads, 0]))
                result = pypto.cast(of_heads, argument.dtype)
                pypto.assemble(result, [(row + g) * heads, 0], argument)
            pypto.set_vec_tile_shapes(1, 16)
            one = computed(pypto.view(loss, [1, 1], [g, 0]))
            pypto.assemble(one, [0, row + g], a.loss_terms)

    def results(self) -> None:
        """The gradient of the keys, and the loss."""
        a, sums = self.a, self.facts.sums
        size, tile = sums.result_rows, sums.result_tile
        for first, count in row_tiles("KL", a.d_key.shape[0], size):
            store_total(self.sums, 0, a.d_key, first, count, size=size, tile=tile)
        store_sum("KL", a.loss_terms, a.loss)


def program(a: Arguments, facts: Facts) -> None:
    """Writes loss and gradients.

    Args:
        a: those of :class:`.every_key.DenseScores` and :func:`query_tiles`; ``attending
            [T * attention_rows, L + R]`` and ``attended [rows + chunk, L + R]``, the attention's
            queries and keys; ``attention_lse [T * attention_rows, 1]`` and ``index_lse [T, 1]``,
            the logarithms of sums of exponentials; ``places [rows + chunk]`` int32, each row's
            number; ``sums_<part>`` and ``loss [1, 1]``, zeros; ``loss_terms [1, T]``; ``d_query
            [T * heads, D]``, ….
    """
    divergence = DenseDivergence(a, facts)
    tokens, capacity = a.loss_terms.shape[1], pypto.min(a.d_key.shape[0], MOST_ROWS)
    for tile in query_tiles(
        facts, a.query_lengths, a.key_lengths, tokens, capacity, name="KL", tile=facts.tiling.tokens
    ):
        divergence.tokens(*tile)
    for _ in after_all("KL_RESULTS"):
        divergence.results()


@functools.cache
def kernel(facts: Facts) -> Callable:
    """The kernel of :func:`program`."""
    D, S = pypto.DYNAMIC, pypto.STATIC
    dtype, weights_dtype = PYPTO_DTYPES[facts.dtype], PYPTO_DTYPES[facts.weights_dtype]
    options = runtime_options(ready_on_host=False, iterations=128 // facts.tiling.tokens)

    @jit(runtime_options=options)
    def dense_lightning_indexer_grad_kl_loss(
        attending: pypto.Tensor([D, S], dtype),
        attended: pypto.Tensor([D, S], dtype),
        attention_lse: pypto.Tensor([D, S], F32),
        query: pypto.Tensor([D, S], dtype),
        key: pypto.Tensor([D, S], dtype),
        weights: pypto.Tensor([D, S], weights_dtype),
        index_lse: pypto.Tensor([D, S], F32),
        query_lengths: pypto.Tensor([D], I32),
        key_lengths: pypto.Tensor([D], I32),
        key_starts: pypto.Tensor([D], I32),
        ramp: pypto.Tensor([S, S], F32),
        places: pypto.Tensor([D], I32),
        loss_terms: pypto.Tensor([S, D], F32),
        sums_0: pypto.Tensor([S, S], F32),
        sums_1: pypto.Tensor([S, S], F32),
        sums_2: pypto.Tensor([S, S], F32),
        sums_3: pypto.Tensor([S, S], F32),
        d_query: pypto.Tensor([D, S], dtype),
        d_key: pypto.Tensor([D, S], dtype),
        d_weights: pypto.Tensor([D, S], weights_dtype),
        loss: pypto.Tensor([S, S], F32),
    ):
        program(arguments(locals()), facts)

    return dense_lightning_indexer_grad_kl_loss
