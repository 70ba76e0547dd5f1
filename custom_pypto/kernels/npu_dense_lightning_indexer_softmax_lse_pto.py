"""Statistics of the softmax of an indexer's scores over every visible key, as a PyPTO program.

Stages, per tile of query tokens of one sequence and per tile of its keys:

1. cube: ``query [tokens * N1, D] x keys^T``, float32; the tokens share the load of the keys;
2. vector: ReLU, weights and the sum over heads: a row of scores per token;
3. vector: the maximum and the sum of exponentials of the tiles so far.

Workspace of a tile of tokens in flight, in bytes: ``tokens * 4 * (N1 + 1) * chunk``, whatever the
number of keys.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pypto

from . import F32, I32, PYPTO_DTYPES, Arguments, arguments, loop, runtime_options
from .every_key import DenseFacts, DenseScores
from .index_scores import LOWEST, widest
from .pypto_versions import infinite_where, jit
from .sequences import MOST_ROWS, query_tiles


@dataclass(frozen=True, kw_only=True)
class Facts(DenseFacts):
    """The static facts of a call."""


class Statistics:
    """``tokens(row, sequence, visible)`` writes those of a tile of tokens."""

    def __init__(self, a: Arguments, facts: Facts):
        self.a, self.tiling, self.index = a, facts.tiling, DenseScores(a, facts)

    def tokens(self, row, sequence, visible) -> None:
        pypto.set_pass_options(**self.tiling.pass_options)  # of the calling loop
        tile, size = len(visible), self.index.size
        top = [pypto.tensor([1, 1], F32, f"top{g}") for g in range(tile)]
        total = [pypto.tensor([1, 1], F32, f"total{g}") for g in range(tile)]
        for _ in loop(f"LSE_START{tile}", 1):
            pypto.set_vec_tile_shapes(1, 16)
            for g in range(tile):
                top[g].move(pypto.full([1, 1], LOWEST, F32))
                total[g].move(pypto.full([1, 1], 0.0, F32))
        for c in loop(f"LSE_KEYS{tile}", (widest(visible) + size - 1) // size):
            rows = self.index.scores(row, sequence, c * size, size, visible)
            for g, score_K in enumerate(rows):
                mask = self.index.mask(visible[g], c * size)
                self.add(score_K, mask, top[g], total[g])
        for _ in loop(f"LSE_END{tile}", 1):
            pypto.set_vec_tile_shapes(1, 16)
            for g in range(tile):
                largest, sums = (
                    pypto.view(top[g], [1, 1], [0, 0]),
                    pypto.view(total[g], [1, 1], [0, 0]),
                )
                largest = infinite_where(pypto.lt(sums, 0.5), largest)
                pypto.assemble(largest, [row + g, 0], self.a.softmax_max)
                pypto.assemble(pypto.mul(sums, 1.0), [row + g, 0], self.a.softmax_sum)

    def add(self, score_K, mask, top, total) -> None:
        """Adds a tile of keys to the statistics of a token."""
        pypto.set_vec_tile_shapes(1, score_K.shape[1])
        seen = pypto.eq(mask, 1.0)
        score_K = pypto.where(seen, score_K, LOWEST)
        before = top
        now = pypto.maximum(before, pypto.amax(score_K, dim=-1, keepdim=True))
        terms_K = pypto.mul(pypto.exp(pypto.sub(score_K, now)), mask)
        sums = pypto.mul(total, pypto.exp(pypto.sub(before, now)))
        sums = pypto.add(sums, pypto.sum(terms_K, dim=-1, keepdim=True))
        top.move(now)
        total.move(sums)


def program(a: Arguments, facts: Facts) -> None:
    """Writes ``softmax_max`` and ``softmax_sum [T, 1]``: -inf and 0 for a token without a key.

    The other arguments are those of :class:`.every_key.DenseScores` and :func:`query_tiles`.
    """
    statistics = Statistics(a, facts)
    tokens, capacity = a.softmax_max.shape[0], pypto.min(a.key.shape[0], MOST_ROWS)
    lengths = a.query_lengths, a.key_lengths
    for tile in query_tiles(
        facts, *lengths, tokens, capacity, name="LSE", tile=facts.tiling.tokens
    ):
        statistics.tokens(*tile)


@functools.cache
def kernel(facts: Facts) -> Callable:
    """The kernel of :func:`program`."""
    D, S = pypto.DYNAMIC, pypto.STATIC
    dtype, weights_dtype = PYPTO_DTYPES[facts.dtype], PYPTO_DTYPES[facts.weights_dtype]
    options = runtime_options(ready_on_host=False, iterations=128 // facts.tiling.tokens)

    @jit(runtime_options=options)
    def dense_lightning_indexer_softmax_lse(
        query: pypto.Tensor([D, S], dtype),
        weights: pypto.Tensor([D, S], weights_dtype),
        key: pypto.Tensor([D, S], dtype),
        query_lengths: pypto.Tensor([D], I32),
        key_lengths: pypto.Tensor([D], I32),
        key_starts: pypto.Tensor([D], I32),
        ramp: pypto.Tensor([S, S], F32),
        softmax_max: pypto.Tensor([D, S], F32),
        softmax_sum: pypto.Tensor([D, S], F32),
    ):
        program(arguments(locals()), facts)

    return dense_lightning_indexer_softmax_lse
