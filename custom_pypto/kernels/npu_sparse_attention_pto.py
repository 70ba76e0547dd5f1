"""DeepSeek-V3.2's attention (arXiv 2512.02556) from hidden states on, as one PyPTO program: the
prologs, then selection and attention, built by the functions of the single ops.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import pypto

from . import F32, I32, PYPTO_DTYPES, Arguments, arguments, loop, runtime_options
from . import prolog as prologs
from .npu_lightning_indexer_pto import Selector, SelectorFacts, write_indices
from .npu_sparse_flash_attention_pto import AttenderFacts, attender
from .pypto_versions import after_all, behind, jit


@dataclass(frozen=True, kw_only=True)
class Facts(prologs.PrologFacts):
    select: SelectorFacts
    attend: AttenderFacts

    def query_rows(self, tokens: int) -> int:
        """The rows of queries to allocate: a product may load a tile behind the last token."""
        whole = behind(self.attend.heads) == behind(self.select.heads) == 0
        return tokens if whole else tokens + 16


def program(a: Arguments, facts: Facts) -> None:
    """The op: the prologs; then, per tile of tokens, selection, ``w_uk`` and attention.

    Args:
        a: those of :func:`.prolog.prolog`, ``act_seqs [B]`` and ``block_table [B, W]``; written:
            ``indices [rows_at_once, sparse_count]`` int32, of one tile, and ``out [T * N1, L]``.
    """
    prologs.prolog(a, facts)
    tokens, M = a.sin.shape[0], facts.tiling.tokens
    for tile in loop("DSA_TILE", (tokens + M - 1) // M):
        # a tile waits for all caches and queries, and for the tile before to read ``indices``
        for _ in after_all("DSA_AFTER_ALL"):
            select_and_attend(a, tile, facts)


def select_and_attend(a: Arguments, tile, facts: Facts) -> None:
    """Selection of all tokens of a tile, their queries times ``w_uk``, then their attention.

    In this order the selection's vector tasks overlap the products with ``w_uk``. A token's
    attention waits for its own row of ``indices``, because both dims of that argument are static.
    """
    tiling = facts.tiling
    first = tile * tiling.tokens
    count = (a.sin.shape[0] - first).min(tiling.tokens)
    select = Selector(
        Arguments(
            query=as_rows(a.q_index, a.q_index.shape[2]),
            weights=as_rows(a.index_weights, 1),
            key=a.index_k_cache,
            block_table=a.block_table,
        ),
        facts.select,
    )
    for i in loop("DSA_SELECT", count):
        sequence, visible = seen(a, first + i, select.capacity)
        write = functools.partial(write_indices, a.indices, i)
        select(first + i, sequence, [visible], write)
    prologs.absorb(a, tile, tiling)
    attend = attender(
        Arguments(
            # a view taken here: an earlier one would not wait for the products with w_uk
            query=as_rows(a.q_latent, a.kv_cache.shape[1]),
            query_rope=as_rows(a.q_rope, a.q_rope.shape[2]),
            key=a.kv_cache,
            key_rope=a.kr_cache,
            value=a.kv_cache,
            indices=a.indices,
            block_table=a.block_table,
            sinks=None,
            out=a.out,
            softmax_max=None,
            softmax_sum=None,
        ),
        facts.attend,
    )
    for i in loop("DSA_ATTEND", count):
        sequence, visible = seen(a, first + i, select.capacity)
        attend(first + i, sequence, visible, i)


def as_rows(x, width):
    """``x`` as ``[rows, width]``."""
    count = x.shape[0] * (math.prod(x.shape[1:]) // width)
    return pypto.reshape(x, [count, width], inplace=True)


def seen(a: Arguments, token, capacity) -> tuple:
    """A token's sequence and the number of keys it sees: ``sparse_mode=3``."""
    S1 = a.sin.shape[0] // a.act_seqs.shape[0]
    sequence = token // S1
    keys = a.act_seqs[sequence].max(0).min(capacity)
    keys = (keys - S1 + token % S1 + 1).max(0).min(keys)
    keys.as_variable()
    return sequence, keys


@functools.cache
def kernel(facts: Facts) -> Callable:
    """The kernel of :func:`program`."""
    matrix, rows = [pypto.STATIC] * 2, [pypto.DYNAMIC, pypto.STATIC]
    heads = [pypto.DYNAMIC, pypto.STATIC, pypto.STATIC]
    dtype, angle_dtype = PYPTO_DTYPES[facts.dtype], PYPTO_DTYPES[facts.angle_dtype]
    control_flow = "cache_index", "act_seqs", "block_table"

    @jit(runtime_options=runtime_options(*control_flow, ready_on_host=facts.ready_on_host))
    def sparse_attention(
        x: pypto.Tensor(rows, dtype),
        w_dq: pypto.Tensor(matrix, dtype),
        w_uq_qr: pypto.Tensor(matrix, dtype),
        w_uk: pypto.Tensor(matrix, dtype),
        w_dkv_kr: pypto.Tensor(matrix, dtype),
        gamma_cq: pypto.Tensor(matrix, dtype),
        gamma_ckv: pypto.Tensor(matrix, dtype),
        sin: pypto.Tensor(rows, angle_dtype),
        cos: pypto.Tensor(rows, angle_dtype),
        cache_index: pypto.Tensor([pypto.STATIC, pypto.DYNAMIC], I32),
        kv_cache: pypto.Tensor(rows, dtype),
        kr_cache: pypto.Tensor(rows, dtype),
        w_idx_qb: pypto.Tensor(matrix, dtype),
        w_idx_k: pypto.Tensor(matrix, dtype),
        w_idx_proj: pypto.Tensor(matrix, dtype),
        in_gamma_k: pypto.Tensor(matrix, dtype),
        in_beta_k: pypto.Tensor(matrix, dtype),
        index_k_cache: pypto.Tensor(rows, dtype),
        q_heads: pypto.Tensor(rows, dtype),
        q_latent: pypto.Tensor(rows, dtype),
        q_rope: pypto.Tensor(heads, dtype),
        q_index: pypto.Tensor(heads, dtype),
        index_weights: pypto.Tensor(rows, F32),
        act_seqs: pypto.Tensor([pypto.DYNAMIC], I32),
        block_table: pypto.Tensor([pypto.DYNAMIC, pypto.DYNAMIC], I32),
        indices: pypto.Tensor(matrix, I32),
        out: pypto.Tensor(rows, dtype),
    ):
        program(arguments(locals()), facts)

    return sparse_attention
