"""DeepSeek-V3.2's attention (arXiv 2512.02556) from hidden states on, as one PyPTO program: the
prologs, then selection and attention, built by the same functions as those of the single ops.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import pypto

from . import DTYPES, runtime_options
from .npu_lightning_indexer_pto import capacity, selector, write_indices
from .npu_sparse_flash_attention_pto import attender, checked
from .prolog import prolog
from .sequences import query_tokens
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
CACHES = 10, 11, 17  # kv_cache, kr_cache, index_k_cache among the arguments of the prolog


def program(
    *arguments,
    heads: int,
    index_heads: int,
    block_size: int,
    table_width: int,
    scale: float,
    sparse_count: int,
    index_tiling: IndexerTiling,
    attention_tiling: AttentionTiling,
    tiling: PrologTiling,
    prolog_only: bool,
    **facts,
):
    """The op: prolog, then selection and attention token by token.

    Args:
        arguments: those of :func:`prolog`, then ``act_seqs [B]``, ``block_table [B, W]``, and
            written: ``indices [T, sparse_count]`` int32 and ``out [T * N1, L]``.
    """
    *prolog_arguments, act_seqs, block_table, indices, out = arguments
    kv_cache, kr_cache, index_k_cache = (prolog_arguments[i] for i in CACHES)
    q_latent, q_rope, q_index, index_weights = prolog_arguments[-4:]
    prolog(*prolog_arguments, tiling=tiling, **facts)
    if prolog_only:
        return

    def rows(x, width):
        count = x.shape[0] * (math.prod(x.shape[1:]) // width)
        return pypto.reshape(x, [count, width], inplace=True)

    sizes = dict(block_size=block_size, sparse_count=sparse_count, tiling=index_tiling)
    select = selector(
        rows(q_index, q_index.shape[2]),
        rows(index_weights, 1),
        index_k_cache,
        block_table,
        heads=index_heads,
        **sizes,
    )
    attend = attender(
        rows(q_latent, kv_cache.shape[1]),
        rows(q_rope, q_rope.shape[2]),
        kv_cache,
        kr_cache,
        kv_cache,
        out,
        heads=heads,
        block_size=block_size,
        scale=scale,
        tiling=attention_tiling,
    )
    blocks = kv_cache.shape[0] // block_size

    # One token at a time: of an argument with a dynamic dim PyPTO makes a reader wait for the last
    # writer only, which for the row that a token selects is the token itself. For all that the
    # prolog wrote the first token waits by ``after_all``.
    for row, sequence, visible in query_tokens(
        act_seqs,
        act_seqs,
        indices.shape[0],
        capacity(block_table, **sizes),
        layout="BSND",
        ragged=False,
        sparse_mode=3,
        name="DSA",
        after_all=True,
    ):
        select(row, sequence, [visible], functools.partial(write_indices, indices, row))
        # a loop of its own: what it reads was written by the one before
        for _ in pypto.loop(0, 1, 1, name="DSA_ATTEND", idx_name="dsa_once"):
            selected = functools.partial(
                checked,
                indices,
                block_table,
                row,
                sequence,
                visible,
                blocks,
                table_width,
                apart=attention_tiling.table_apart,
            )
            attend(row, visible, selected)


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

    ``prolog_only`` leaves out what comes after the prolog, to measure that alone.

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
        program(
            x,
            w_dq,
            w_uq_qr,
            w_uk,
            w_dkv_kr,
            gamma_cq,
            gamma_ckv,
            sin,
            cos,
            cache_index,
            kv_cache,
            kr_cache,
            w_idx_qb,
            w_idx_k,
            w_idx_proj,
            in_gamma_k,
            in_beta_k,
            index_k_cache,
            q_latent,
            q_rope,
            q_index,
            index_weights,
            act_seqs,
            block_table,
            indices,
            out,
            **facts,
        )

    return npu_sparse_attention_pto
