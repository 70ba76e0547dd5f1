"""``npu_sparse_attention_pto`` on an NPU."""

from typing import Any

import torch
from torch import Tensor

from .common import Arguments, KernelCall, Limits, name, padded, program, rows, words

OP = "npu_sparse_attention_pto"


def check(a: Arguments) -> None:
    limits = Limits(OP, a)
    limits.dtype("x")
    heads, index_heads, index_dim = a.w_uk.size(0), a.w_idx_proj.size(1), a.w_idx_k.size(1)
    limits.require(index_dim == 128, "w_idx_k.size(1)", "128", index_dim)
    limits.require(index_heads <= 64, "w_idx_proj.size(1)", "at most 64", index_heads)
    limits.require(heads <= 128, "w_uk.size(0)", "at most 128", heads)
    widths = {
        "x.size(2)": a.x.size(-1),
        "w_dq.size(1)": a.w_dq.size(1),
        "w_uk.size(1)": a.w_uk.size(1),
        "w_uk.size(2)": a.w_uk.size(2),
        "kr_cache.size(3)": a.kr_cache.size(-1),
    }
    for argument, width in widths.items():
        legal = width > 0 and width % 16 == 0
        limits.require(legal, argument, "a positive multiple of 16", width)
    keys = a.block_table.size(1) * a.kv_cache.size(1)
    limits.sortable(keys)
    limits.checkable(keys, a.kv_cache.size(0))
    limits.contiguous("kv_cache", "kr_cache", "index_k_cache")


def kernel_call(a: Arguments, out: Tensor) -> KernelCall | None:
    if out.numel() == 0:
        return None
    if a.kv_cache.numel() == 0:
        out.zero_()
        return None
    if a.block_table.numel() == 0:  # nothing is visible, but the caches are written
        a.block_table = a.act_seqs.new_zeros(len(a.act_seqs), 1)
        a.act_seqs = torch.zeros_like(a.act_seqs)
    if a.sin.dtype != a.cos.dtype:
        a.sin, a.cos = a.sin.float(), a.cos.float()
    facts = _facts(a)
    results = dict(
        kv_cache=rows(a.kv_cache),
        kr_cache=rows(a.kr_cache),
        index_k_cache=rows(a.index_k_cache),
        out=out.view(-1, out.size(-1)),
    )
    tensors = _inputs(a, facts) | _between(a, facts) | results
    return KernelCall(facts, tensors)


def _facts(a: Arguments) -> Any:
    nope, rope, tokens = a.w_uk.size(1), a.kr_cache.size(-1), a.x.size(0) * a.x.size(1)
    kernels = program(OP)
    select = kernels.SelectorFacts(
        heads=a.w_idx_proj.size(1),
        block_size=a.kv_cache.size(1),
        sparse_count=a.sparse_count,
        tokens=tokens,
        batch=a.x.size(0),
        table_width=a.block_table.size(1),
        most_shared=1,  # tiles of one token
    )
    attend = kernels.AttenderFacts(
        heads=a.w_uk.size(0),
        block_size=a.kv_cache.size(1),
        scale=(nope + rope) ** -0.5 if a.softmax_scale is None else a.softmax_scale,
        tokens=tokens,
        table_width=a.block_table.size(1),
    )
    return kernels.Facts(
        dtype=name(a.x.dtype),
        angle_dtype=name(a.sin.dtype),
        slot_words=a.cache_index.element_size() // 4,
        eps=a.eps,
        hidden=a.x.size(-1),
        tokens=tokens,
        select=select,
        attend=attend,
        ready_on_host=Limits(OP, a).ready_on_host("cache_index", "act_seqs", "block_table"),
    )


def _inputs(a: Arguments, facts: Any) -> dict[str, Tensor | None]:
    """The inputs of the program, without the caches."""
    x, columns = rows(a.x), facts.missing_columns(a.w_idx_proj.size(1))
    return dict(
        x=padded(x, rows=facts.missing_rows(len(x))),
        w_dq=a.w_dq.contiguous(),
        w_uq_qr=a.w_uq_qr.contiguous(),
        w_uk=rows(a.w_uk),
        w_dkv_kr=a.w_dkv_kr.contiguous(),
        gamma_cq=a.gamma_cq.contiguous().view(1, -1),
        gamma_ckv=a.gamma_ckv.contiguous().view(1, -1),
        sin=rows(a.sin),
        cos=rows(a.cos),
        cache_index=words(a.cache_index),
        w_idx_qb=a.w_idx_qb.contiguous(),
        w_idx_k=a.w_idx_k.contiguous(),
        w_idx_proj=padded(a.w_idx_proj.contiguous(), columns=columns),
        in_gamma_k=a.in_gamma_k.contiguous().view(1, -1),
        in_beta_k=a.in_beta_k.contiguous().view(1, -1),
        act_seqs=a.act_seqs.contiguous(),
        block_table=a.block_table.contiguous(),
    )


def _between(a: Arguments, facts: Any) -> dict[str, Tensor | None]:
    """Results that one stage of the program passes to the next."""
    tokens, (heads, _, latent) = a.x.size(0) * a.x.size(1), a.w_uk.shape
    rope, index_heads, index_dim = a.kr_cache.size(-1), a.w_idx_proj.size(1), a.w_idx_k.size(1)
    longest = facts.query_rows(tokens)
    return dict(
        q_heads=a.x.new_empty(tokens + facts.missing_rows(tokens), a.w_uq_qr.size(1)),
        q_latent=a.x.new_empty(longest, heads * latent),
        q_rope=a.x.new_empty(longest, heads, rope),
        q_index=a.x.new_empty(longest, index_heads, index_dim),
        index_weights=a.x.new_empty(tokens, index_heads, dtype=torch.float32),
        indices=a.x.new_empty(facts.rows_at_once, a.sparse_count, dtype=torch.int32),
    )
