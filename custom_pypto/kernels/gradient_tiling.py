"""Tile settings of the programs of gradients, as those of :mod:`.tiling`."""

from dataclasses import dataclass, replace
from math import gcd

from .tiling import largest_divisor, round_up, score_tiles


@dataclass(frozen=True)
class GradientTiling:
    """Settings of the programs of gradients; any gives right results.

    The defaults are the best of some twenty that were estimated for the gradient of attention, 64
    tokens of 128 heads. Edges of the task graph decide: large tasks, which share what they load.
    """

    score_keys: int = 256  # per score tile
    columns: int = 256  # of the query's gradient per tile
    query_keys: int = 256  # keys whose dS are copied into L1 at once
    rows: int = 4  # heads per softmax tile
    # per tile of terms: more keys than columns, since a task that adds rows waits for each tile of
    # its columns
    term_keys: int = 256
    term_columns: int = 128
    add_rows: int = 32  # per tile of terms that is added; 64 fill UB, and tasks stay single tiles
    result_rows: int = 128  # of the cache per iteration
    result_tile: int = 32
    l1_reuse: int = 32  # cube tiles that share an operand per task: all of a token's
    vec_nbuffer: int = 4  # vector tiles per task: more of them make tokens wait longer in line

    def splits(self, heads: int, latent: int, rope: int, width: int) -> list[tuple[int, int]]:
        """``(indices per gather, parts of a row)`` of the right operands: rope and latents of the
        scores, latents and rope of the query's gradient. A tile takes a part.
        """
        _, (_, k), (_, n) = self.scores(heads, latent, rope, width)
        _, (_, keys), (_, columns) = self.query(heads, latent, width)
        _, _, (_, rope_columns) = self.query(heads, rope, width)
        return [
            (n, max(rope // k, 1)),
            (n, latent // k),
            (keys, latent // columns),
            (keys, max(rope // rope_columns, 1)),
        ]

    def scores(self, heads: int, latent: int, rope: int, width: int) -> tuple[list[int], ...]:
        """Cube tiles ([m], [k], [n]) of ``[heads, latent + rope] @ [latent + rope, width]``."""
        return score_tiles(heads, latent, rope, min(self.score_keys, width))

    def query(self, heads: int, columns: int, width: int) -> tuple[list[int], ...]:
        """Those of ``[heads, width] @ [width, columns]``."""
        k, n = min(128, width), gcd(self.columns, columns)
        return [heads, heads], [k, min(self.query_keys, round_up(width, k))], [n, n]

    def sums(self, heads: int, columns: int, width: int) -> tuple[list[int], ...]:
        """Those of ``[heads, width]^T @ [heads, columns]``."""
        m, n = largest_divisor(width, 16, self.term_keys), gcd(self.term_columns, columns)
        return [m, m], [largest_divisor(heads, 16, 128), heads], [n, n]

    def rows_of(self, most: int, columns: int) -> int:
        """``most``, or fewer float32 rows of ``columns`` that fit UB: 64 KiB."""
        fitting = max(1, 2**14 // columns)
        return min(most, 1 << (fitting.bit_length() - 1))

    def softmax_rows(self, width: int) -> int:
        """``rows``, or fewer where float32 rows of ``width`` would not fit UB."""
        most = max(1, min(128, 2**13 // width))
        return min(self.rows, 1 << (most.bit_length() - 1))

    @property
    def pass_options(self) -> dict:
        return {
            "cube_l1_reuse_setting": {-1: self.l1_reuse},
            "vec_nbuffer_setting": {-1: self.vec_nbuffer},
        }


# An indexer's rows are short: more of them per task. Estimated for 64 tokens of 64 heads of 128
# dims; 16 vector tiles per task are better with PyPTO 0.2.0, and with CANN 9.1 far worse.
INDEX = GradientTiling(add_rows=128, result_rows=512, result_tile=128, vec_nbuffer=8)
# of a divergence over every key: tasks of 4 tokens are merged, and fit L1
EVERY_KEY = replace(INDEX, l1_reuse=4)
