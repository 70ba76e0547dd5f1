"""DeepSeek-V3.2's attention (arXiv 2512.02556) from hidden states on, as one PyPTO program: the
prologs, then selection and attention, built by the functions of the single ops.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import pypto

from . import DTYPES, Arguments, runtime_options
from . import prolog as prologs
from .npu_lightning_indexer_pto import Selector, write_indices
from .npu_sparse_flash_attention_pto import attender
from .sequences import query_tiles
from .tiling import (
    AttentionTiling,
    IndexerTiling,
    PrologTiling,
    attention_tiling,
    indexer_tiling,
    power_of_two,
    prolog_tiling,
)

FLOAT, I32 = pypto.DT_FP32, pypto.DT_INT32


def program(
    a: Arguments, *, eps: float, slot_words: int, tiling: PrologTiling, prolog_only: bool, **facts
) -> None:
    """The op: prolog, then selection and attention token by token.

    Args:
        a: what :func:`.prolog.prolog` takes, ``act_seqs [B]`` and ``block_table [B, W]``; written:
            ``indices [T, sparse_count]`` int32 and ``out [T * N1, L]``.
    """
    prologs.prolog(a, eps=eps, slot_words=slot_words, tiling=tiling)
    if not prolog_only:
        select_and_attend(a, **facts)


def select_and_attend(
    a: Arguments,
    *,
    heads: int,
    index_heads: int,
    block_size: int,
    table_width: int,
    scale: float,
    sparse_count: int,
    index_tiling: IndexerTiling,
    attention_tiling: AttentionTiling,
) -> None:
    """Selection and attention, which read the prolog's results from global memory."""

    def rows(x, width):
        count = x.shape[0] * (math.prod(x.shape[1:]) // width)
        return pypto.reshape(x, [count, width], inplace=True)

    select = Selector(
        Arguments(
            query=rows(a.q_index, a.q_index.shape[2]),
            weights=rows(a.index_weights, 1),
            key=a.index_k_cache,
            block_table=a.block_table,
        ),
        heads=index_heads,
        block_size=block_size,
        sparse_count=sparse_count,
        tiling=index_tiling,
    )
    attend = attender(
        Arguments(
            query=rows(a.q_latent, a.kv_cache.shape[1]),
            query_rope=rows(a.q_rope, a.q_rope.shape[2]),
            key=a.kv_cache,
            key_rope=a.kr_cache,
            value=a.kv_cache,
            indices=a.indices,
            block_table=a.block_table,
            out=a.out,
        ),
        heads=heads,
        block_size=block_size,
        table_width=table_width,
        scale=scale,
        tiling=attention_tiling,
    )
    # One token at a time: PyPTO makes a reader of an argument with a dynamic dim wait for the last
    # writer only, and the last writer of a token's selection is the token itself. With
    # ``after_all`` the first token waits for everything that the prolog wrote.
    lengths, tokens = a.act_seqs, a.indices.shape[0]
    sequences = dict(layout="BSND", ragged=False, sparse_mode=3)
    for row, sequence, visible in query_tiles(
        lengths, lengths, tokens, select.capacity, **sequences, name="DSA", after_all=True
    ):
        select(row, sequence, visible, functools.partial(write_indices, a.indices, row))
        # a loop of its own: it reads the results of the loop before
        for _ in pypto.loop(1, name="DSA_ATTEND", idx_name="dsa_once"):
            attend(row, sequence, *visible)


def rows_at_once(*, tokens: int, hidden: int) -> int:
    """``x`` must have a multiple of so many rows, of which the first ``tokens`` count."""
    return prologs.rows_at_once(prolog_tiling(tokens=tokens, hidden=hidden))


def kernel(
    *,
    dtype: str,
    angle_dtype: str,
    heads: int,
    index_heads: int,
    block_size: int,
    hidden: int,
    tokens: int,
    batch: int,
    table_width: int,
    prolog_only: bool = False,
    **facts,
) -> Callable:
    """The kernel of :func:`program`, whose arguments it takes, for a call with these static facts.

    ``prolog_only`` omits everything after the prolog, to measure the prolog alone.

    One binary serves every number of tokens of a class of :func:`prolog_tiling`,
    :func:`attention_tiling` and :func:`indexer_tiling`, and every block table up to the next power
    of two.
    """
    return _kernel(
        dtype=DTYPES[dtype],
        angle_dtype=DTYPES[angle_dtype],
        heads=heads,
        index_heads=index_heads,
        block_size=block_size,
        table_width=max(power_of_two(table_width), 64),
        tiling=prolog_tiling(tokens=tokens, hidden=hidden),
        # one token at a time
        index_tiling=replace(
            indexer_tiling(
                tokens=tokens,
                batch=batch,
                heads=index_heads,
                block_size=block_size,
                table_width=table_width,
            ),
            tokens=1,
        ),
        attention_tiling=attention_tiling(tokens=tokens, fused=True),
        prolog_only=prolog_only,
        **facts,
    )


@functools.cache
def _kernel(*, dtype, angle_dtype, ready_on_host: bool, **facts):
    matrix, rows = [pypto.STATIC] * 2, [pypto.DYNAMIC, pypto.STATIC]
    heads = [pypto.DYNAMIC, pypto.STATIC, pypto.STATIC]

    @pypto.frontend.jit(
        runtime_options=runtime_options(
            "cache_index", "act_seqs", "block_table", ready_on_host=ready_on_host
        ),
    )
    def npu_sparse_attention_pto(
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
        q_latent: pypto.Tensor(rows, dtype),
        q_rope: pypto.Tensor(heads, dtype),
        q_index: pypto.Tensor(heads, dtype),
        index_weights: pypto.Tensor(rows, FLOAT),
        act_seqs: pypto.Tensor([pypto.DYNAMIC], I32),
        block_table: pypto.Tensor([pypto.DYNAMIC, pypto.DYNAMIC], I32),
        indices: pypto.Tensor(rows, I32),
        out: pypto.Tensor(rows, dtype),
    ):
        program(Arguments(**locals()), **facts)

    return npu_sparse_attention_pto
