"""Scores of a lightning indexer, ``score[j] = sum_h weights[h] * relu(query[h] . key[j])``."""

import functools

import pypto

from . import F32, Arguments, begin_task, end_task
from .tiling import IndexerTiling

LOWEST = -3.4028234663852886e38


def in_float32(x):
    return x if x.dtype == F32 else pypto.cast(x, F32)


def widest(visible):
    return functools.reduce(lambda most, keys: most.max(keys), visible)


class IndexScores:
    """Rows of scores of a tile of tokens, one of :func:`.sequences.query_tiles`. A subclass loads
    the keys, in :meth:`logits`.

    Args:
        a: ``query [T * N1, D]``, ``weights [T * N1, 1]``, float32 or the dtype of ``query``.
        step: keys per product and per tile of the weighted sum.
    """

    product = F32  # dtype of query times key

    def __init__(self, a: Arguments, heads: int, tiling: IndexerTiling, step: int):
        self.a, self.heads, self.tiling, self.step = a, heads, tiling, step

    def logits(self, q, sequence, first, keys, visible):
        """``q`` times the ``keys`` keys of a sequence from ``first`` on."""
        raise NotImplementedError

    def scores(self, row, sequence, first, size, visible) -> list:
        """Per token of the tile, the scores ``[1, size]`` of the keys from ``first`` on."""
        a, heads, step = self.a, self.heads, self.step
        rows = [pypto.tensor([1, size], F32, f"scores{g}") for g in range(len(visible))]
        q = pypto.view(a.query, [len(rows) * heads, a.query.shape[1]], [row * heads, 0])
        w = [self.factors((row + g) * heads) for g in range(len(rows))]
        part = self.tiling.tiles * step  # keys per vector task
        for begin in range(0, size, part):
            end = min(begin + part, size)
            logits = [
                self.logits(q, sequence, first + start, min(step, end - start), visible)
                for start in range(begin, end, step)
            ]
            for g, row_K in enumerate(rows):
                pypto.assemble(self.weighted(logits, g, w[g], begin), [0, begin], row_K)
        return rows

    def factors(self, at) -> list:
        """``[N1, 1]`` each, whose product weights the heads of the token at row ``at``."""
        return [pypto.view(self.a.weights, [self.heads, 1], [at, 0])]

    def weighted(self, logits, g, w, begin):
        """Scores of token ``g`` from tiles of logits, for the keys of the chunk from ``begin`` on.

        One task: it loads ``w`` once and writes once, since each written piece costs an edge to its
        reader.
        """
        heads = self.heads
        begin_task()
        pypto.set_vec_tile_shapes(heads, 16)
        w_H = functools.reduce(pypto.mul, (in_float32(factor) for factor in w))
        pypto.set_vec_tile_shapes(heads, self.tiling.keys)
        score_K = pypto.tensor([1, sum(tile.shape[1] for tile in logits)], F32, "score")
        for i, tile in enumerate(logits):
            logits_HK = pypto.view(tile, [heads, tile.shape[1]], [g * heads, 0])
            terms_HK = pypto.mul(pypto.relu(in_float32(logits_HK)), w_H)
            sums_K = pypto.sum(terms_HK, dim=0, keepdim=True)
            pypto.assemble(sums_K, [0, i * self.step], score_K)
        pypto.set_vec_tile_shapes(1, score_K.shape[1])
        # scores of -inf become LOWEST: from here on -inf means no key
        score_K = pypto.maximum(self.by_key(score_K, begin), LOWEST)
        end_task()
        return score_K

    def by_key(self, score_K, begin):
        """The scores of keys from ``begin`` on, for a subclass to multiply."""
        return score_K
