"""npu_lightning_indexer_prolog_pto as a PyPTO program: the indexer's part of :mod:`.prolog` writes
queries and keys in the dtype of ``token_x``; then the programs of npu_quant_rows_pto and
npu_quant_index_update_pto rotate and quantize them.

Memory: ``T * (N1 + 1) * D`` elements in global memory, and the workspace of those programs.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pypto

from . import (
    F16,
    F32,
    I8,
    I32,
    PYPTO_DTYPES,
    Arguments,
    arguments,
    loop,
    npu_quant_index_update_pto,
    npu_quant_rows_pto,
    runtime_options,
)
from .prolog import PrologFacts, Tile, columns, rounded
from .pypto_versions import after_all, behind, jit, product_tile
from .tiling import PrologTiling


@dataclass(frozen=True, kw_only=True)
class Facts(PrologFacts):
    latent_dtype: str  # of q_norm and wq_b
    absent: tuple[str, ...]  # the scales of both, unless they are int8

    def missing_latent_rows(self, tokens: int) -> int:
        """The rows to append to the ``q_norm`` of ``tokens``."""
        rows = self.missing_rows(tokens)
        return rows + behind(tokens + rows, product_tile(self.latent_dtype))


class IndexTile(Tile):
    """A tile of tokens, from arguments with the names of this op."""

    def __init__(self, a: Arguments, tile, tiling: PrologTiling):
        same = dict(x=a.token_x, sin=a.sin_idx_rope, cos=a.cos_idx_rope, w_idx_qb=a.wq_b)
        super().__init__(Arguments(**vars(a) | same), tile, tiling)

    def index_heads(self, latent, h):
        if self.a.q_norm_scale is None:
            return super().index_heads(latent, h)
        a, rows, D = self.a, self.tiling.rows, self.a.q_index.shape[2]
        q, heads = self.up(latent, a.wq_b, D, h, self.tiling.index_n, I32)
        pypto.set_vec_tile_shapes(rows, heads * D)
        q = pypto.mul(pypto.cast(q, F32), self.view(a.q_norm_scale, 0, 1))
        q = pypto.mul(q, pypto.view(a.wq_b_scale, [1, heads * D], [0, h * D]))
        q = rounded(q, self.dtype)
        pypto.set_vec_tile_shapes(rows, heads, D)
        return self.by_head(q, heads)


def project(a: Arguments, tile: IndexTile, eps: float) -> None:
    """Writes ``q_index``, ``k_index`` and ``weights`` of a tile of tokens."""
    _, N1, D = a.q_index.shape
    weights = columns(tile.project(a.weights_proj, tile.tiling.side_n), 0, N1)
    weights = pypto.cast(pypto.mul(weights, (N1 * D) ** -0.5), F16)
    pypto.assemble(weights, [tile.start, 0], a.weights)
    key = rounded(tile.project(a.wk, tile.tiling.side_n), tile.dtype)
    angle = tile.angle()
    key = tile.index_key(key, a.ln_gamma_k, a.ln_beta_k, eps, angle)
    pypto.assemble(key, [tile.start, 0], a.k_index)
    tile.index_query(tile.view(a.q_norm, 0, a.q_norm.shape[1]), tile.by_token(angle))


def program(a: Arguments, facts: Facts) -> None:
    """Arguments as in the op's schema, with these views: scales, gamma and beta as ``[T, 1]`` and
    ``[1, .]``, slots ``[1, T * slot_words]`` int32, caches ``[slots, .]``. ``token_x`` and
    ``q_norm`` have the rows of whole tiles, ``weights_proj`` the columns of whole tiles. Written:
    ``query [T * N1, D]``, ``query_scale [T * N1, 1]``, ``weights [T, N1]``, the caches, and
    ``q_index [., N1, D]`` and ``k_index [., D]`` of whole tiles.
    """
    tiling, T = facts.tiling, a.cos_idx_rope.shape[0]
    M = tiling.tokens
    for i in loop("INDEX_PROLOG", (T + M - 1) // M):
        pypto.set_pass_options(**tiling.pass_options)  # of this loop only
        project(a, IndexTile(a, i, tiling), facts.eps)
    for _ in after_all("INDEX_QUANT"):
        count, N1, D = a.q_index.shape
        queries = pypto.reshape(a.q_index, [count * N1, D], inplace=True)
        npu_quant_rows_pto.program(
            Arguments(x=queries, hadamard=a.hadamard_q, rows=a.query, scales=a.query_scale)
        )
        npu_quant_index_update_pto.program(
            Arguments(
                x=a.k_index,
                hadamard=a.hadamard_k,
                slots=a.idx_k_cache_index,
                cache=a.idx_k_cache,
                scale_cache=a.idx_k_scale_cache,
            ),
            facts,
        )


@functools.cache
def kernel(facts: Facts) -> Callable:
    """The kernel of :func:`program`."""
    matrix, rows = [pypto.STATIC] * 2, [pypto.DYNAMIC, pypto.STATIC]
    dtypes = facts.dtype, facts.angle_dtype, facts.latent_dtype
    dtype, angle_dtype, latent = (PYPTO_DTYPES[name] for name in dtypes)

    @jit(runtime_options=runtime_options("idx_k_cache_index", ready_on_host=facts.ready_on_host))
    def lightning_indexer_prolog(
        token_x: pypto.Tensor(rows, dtype),
        q_norm: pypto.Tensor(rows, latent),
        q_norm_scale: pypto.Tensor(rows, F32),
        wq_b: pypto.Tensor(matrix, latent),
        wq_b_scale: pypto.Tensor(matrix, F32),
        wk: pypto.Tensor(matrix, dtype),
        weights_proj: pypto.Tensor(matrix, dtype),
        ln_gamma_k: pypto.Tensor(matrix, dtype),
        ln_beta_k: pypto.Tensor(matrix, dtype),
        cos_idx_rope: pypto.Tensor(rows, angle_dtype),
        sin_idx_rope: pypto.Tensor(rows, angle_dtype),
        hadamard_q: pypto.Tensor(matrix, dtype),
        hadamard_k: pypto.Tensor(matrix, dtype),
        idx_k_cache: pypto.Tensor(rows, I8),
        idx_k_scale_cache: pypto.Tensor(rows, F16),
        idx_k_cache_index: pypto.Tensor([pypto.STATIC, pypto.DYNAMIC], I32),
        q_index: pypto.Tensor([pypto.DYNAMIC, pypto.STATIC, pypto.STATIC], dtype),
        k_index: pypto.Tensor(rows, dtype),
        query: pypto.Tensor(rows, I8),
        query_scale: pypto.Tensor(rows, F16),
        weights: pypto.Tensor(rows, F16),
    ):
        program(arguments(locals(), facts.absent), facts)

    return lightning_indexer_prolog
