"""The keys of one sequence after the other, read in tiles by programs over every visible key."""

from dataclasses import InitVar, dataclass, field, replace

import pypto

from . import F32, Arguments
from .index_scores import IndexScores
from .pypto_versions import behind
from .sequences import QueryFacts
from .tiling import IndexerTiling, indexer_tiling

MOST_KEYS = 2048  # per tile: their float32 scores, by row of 4 tokens, fit UB several times


@dataclass(frozen=True, kw_only=True)
class DenseFacts(QueryFacts):
    """The facts of an indexer over every visible key. One binary serves every number of tokens and
    sequences of a class of :func:`.tiling.indexer_tiling`, and up to the next power of two as many
    keys as fill a tile.
    """

    dtype: str  # of query and key
    weights_dtype: str
    heads: int
    tokens: InitVar[int]
    batch: InitVar[int]
    keys: InitVar[int]  # of the longest sequence
    tiling: IndexerTiling = field(init=False)

    def __post_init__(self, tokens: int, batch: int, keys: int):
        tiling = indexer_tiling(
            tokens=tokens, batch=batch, heads=self.heads, block_size=1, table_width=max(keys, 128)
        )
        tiling = replace(tiling, chunk=min(tiling.chunk, MOST_KEYS), chunks=1)
        object.__setattr__(self, "tiling", tiling)

    @property
    def rows_behind_query(self) -> int:
        """The rows to append to ``query``: a product loads rows behind the last token."""
        return behind(self.heads)


class DenseScores(IndexScores):
    """Scores of tiles of :attr:`IndexerTiling.chunk` keys.

    Args:
        a: those of :class:`IndexScores`; ``key [rows + chunk, D]``, the rows of a sequence from
            ``key_starts[b]`` on; ``ramp [1, 2 * chunk]`` float32, first ``chunk`` ones, then zeros.
    """

    def __init__(self, a: Arguments, facts: DenseFacts):
        super().__init__(a, facts.heads, facts.tiling, min(facts.tiling.keys, facts.tiling.chunk))
        self.size = facts.tiling.chunk

    def logits(self, q, sequence, first, keys, visible):
        a, tiling, dim = self.a, self.tiling, self.a.query.shape[1]
        pypto.set_cube_tile_shapes([tiling.m] * 2, [dim] * 2, [tiling.n] * 2)
        k = pypto.view(a.key, [keys, dim], [a.key_starts[sequence] + first, 0])
        return pypto.matmul(q, k, F32, b_trans=True)

    def mask(self, keys, first):
        """``[1, chunk]``: 1 for each key of a tile that is one of the first ``keys``, else 0."""
        left = (keys - first).max(0).min(self.size)
        return pypto.view(self.a.ramp, [1, self.size], [0, self.size - left])
