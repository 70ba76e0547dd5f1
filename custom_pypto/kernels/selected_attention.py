"""Scores of an attention over the cache rows that the indices of a query token name, as a stage of
programs that need them again.
"""

from collections.abc import Callable

import pypto

from . import F32
from .gradient_tiling import GradientTiling
from .npu_sparse_flash_attention_pto import beside


def attention_scores(
    query: list, caches: list, rows: list, gather: Callable, tiling: GradientTiling
):
    """``[heads, indices]`` float32, not scaled.

    Args:
        query: ``[heads, L]`` of the token, and ``[heads, R]`` if there is RoPE.
        caches: ``key``, and ``key_rope``.
        rows: for each cache the rows by :func:`.pypto_versions.pieces`, in the splits of
            :meth:`GradientTiling.splits` for scores.
        gather: :func:`.pypto_versions.gathered` with the table of all rows.
    """
    heads, latent = query[0].shape
    width = sum(piece.shape[1] for piece in rows[0][0])
    rope = query[1].shape[1] if len(query) > 1 else 0
    pypto.set_cube_tile_shapes(*tiling.scores(heads, latent, rope, width))
    q = query[0]
    keys = [gather(x, found, transposed=True) for x, found in zip(caches, rows, strict=True)]
    k = keys[0]
    if len(keys) > 1:
        q, k = beside(q, query[1], "query"), beside(k, keys[1], "keys")
    return pypto.matmul(q, k, F32, a_trans=False, b_trans=True)
