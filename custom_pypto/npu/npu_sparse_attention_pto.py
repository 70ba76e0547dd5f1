"""``npu_sparse_attention_pto`` on an NPU."""

import torch
from torch import Tensor

from .common import CUBE, Arguments, Launch, Limits, kernel, name, padded, program, rows

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


def run(launch: Launch, a: Arguments, out: Tensor) -> Tensor:
    if out.numel() == 0:
        return out
    if a.kv_cache.numel() == 0:
        return out.zero_()
    if a.block_table.numel() == 0:  # nothing is visible, but the caches are written
        a.block_table = a.act_seqs.new_zeros(len(a.act_seqs), 1)
        a.act_seqs = torch.zeros_like(a.act_seqs)
    if a.sin.dtype != a.cos.dtype:
        a.sin, a.cos = a.sin.float(), a.cos.float()
    nope, rope = a.w_uk.size(1), a.kr_cache.size(-1)
    run_program = kernel(
        OP,
        dtype=name(a.x.dtype),
        angle_dtype=name(a.sin.dtype),
        slot_words=a.cache_index.element_size() // 4,
        heads=a.w_uk.size(0),
        index_heads=a.w_idx_proj.size(1),
        block_size=a.kv_cache.size(1),
        scale=(nope + rope) ** -0.5 if a.softmax_scale is None else a.softmax_scale,
        eps=a.eps,
        sparse_count=a.sparse_count,
        hidden=a.x.size(-1),
        tokens=a.x.size(0) * a.x.size(1),
        batch=a.x.size(0),
        table_width=a.block_table.size(1),
        ready_on_host=Limits(OP, a).ready_on_host("cache_index", "act_seqs", "block_table"),
    )
    caches = [rows(cache) for cache in (a.kv_cache, a.kr_cache, a.index_k_cache)]
    result = out.view(-1, out.size(-1))
    launch(run_program, _tensors(a, result, *caches), (*caches, result))
    return out


def _tensors(
    a: Arguments, result: Tensor, kv_cache: Tensor, kr_cache: Tensor, index_k_cache: Tensor
) -> tuple[Tensor, ...]:
    """The program's arguments, in its order."""
    tokens, (heads, _, latent) = a.x.size(0) * a.x.size(1), a.w_uk.shape
    rope, index_heads, index_dim = a.kr_cache.size(-1), a.w_idx_proj.size(1), a.w_idx_k.size(1)
    at_once = program(OP).rows_at_once(tokens=tokens, hidden=a.x.size(-1))
    # what follows the last token's queries is loaded with them, if they do not fill tiles
    longest = tokens + (CUBE if heads % CUBE or index_heads % CUBE else 0)
    missing = -tokens % at_once
    return (
        padded(rows(a.x), rows=missing),
        a.w_dq.contiguous(),
        a.w_uq_qr.contiguous(),
        rows(a.w_uk),
        a.w_dkv_kr.contiguous(),
        a.gamma_cq.contiguous().view(1, -1),
        a.gamma_ckv.contiguous().view(1, -1),
        rows(a.sin),
        rows(a.cos),
        a.cache_index.contiguous().view(1, -1).view(torch.int32),
        kv_cache,
        kr_cache,
        a.w_idx_qb.contiguous(),
        a.w_idx_k.contiguous(),
        padded(a.w_idx_proj.contiguous(), columns=-index_heads % CUBE),
        a.in_gamma_k.contiguous().view(1, -1),
        a.in_beta_k.contiguous().view(1, -1),
        index_k_cache,
        # results that one stage of the program passes to the next
        a.x.new_empty(tokens + missing, a.w_uq_qr.size(1)),
        a.x.new_empty(longest, heads * latent),
        a.x.new_empty(longest, heads, rope),
        a.x.new_empty(longest, index_heads, index_dim),
        a.x.new_empty(tokens, index_heads, dtype=torch.float32),
        a.act_seqs.contiguous(),
        a.block_table.contiguous(),
        a.x.new_empty(at_once, a.sparse_count, dtype=torch.int32),
        result,
    )
