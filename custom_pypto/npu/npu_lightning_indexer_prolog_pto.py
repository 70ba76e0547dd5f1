"""``npu_lightning_indexer_prolog_pto`` on an NPU."""

from typing import Any

import torch
from torch import Tensor

from .common import Arguments, KernelCall, Limits, name, padded, program, rows, words

OP = "npu_lightning_indexer_prolog_pto"


def check(a: Arguments) -> None:
    limits = Limits(OP, a)
    limits.dtype("token_x")
    dim, heads = a.wk.size(1), a.weights_proj.size(1)
    limits.require(dim == 128, "wk.size(1)", "128", dim)
    limits.require(heads <= 64, "weights_proj.size(1)", "at most 64", heads)
    for argument, width, step in (
        ("token_x.size(1)", a.token_x.size(1), 16),
        ("q_norm.size(1)", a.q_norm.size(1), 32 // a.q_norm.element_size()),
    ):
        legal = width > 0 and width % step == 0
        limits.require(legal, argument, f"a positive multiple of {step}", width)
    limits.contiguous("idx_k_cache", "idx_k_scale_cache")


def kernel_call(a: Arguments, out: tuple[Tensor, Tensor, Tensor]) -> KernelCall | None:
    query, query_scale, weights = out
    if query.numel() == 0:
        return None
    if a.idx_k_cache.numel() == 0:  # every slot is outside
        a.idx_k_cache = a.idx_k_cache.new_empty(1, 16, 1, query.size(2))
        a.idx_k_scale_cache = a.idx_k_scale_cache.new_empty(1, 16, 1)
        a.idx_k_cache_index = torch.full_like(a.idx_k_cache_index, -1)
    if a.sin_idx_rope.dtype != a.cos_idx_rope.dtype:
        a.sin_idx_rope, a.cos_idx_rope = a.sin_idx_rope.float(), a.cos_idx_rope.float()
    facts = program(OP).Facts(
        dtype=name(a.token_x.dtype),
        angle_dtype=name(a.cos_idx_rope.dtype),
        latent_dtype=name(a.q_norm.dtype),
        absent=("q_norm_scale", "wq_b_scale") if a.q_norm_scale is None else (),
        slot_words=a.idx_k_cache_index.element_size() // 4,
        eps=a.layernorm_epsilon_k,
        hidden=a.token_x.size(1),
        tokens=a.token_x.size(0),
        ready_on_host=Limits(OP, a).ready_on_host("idx_k_cache_index"),
    )
    results = dict(
        idx_k_cache=rows(a.idx_k_cache),
        idx_k_scale_cache=a.idx_k_scale_cache.view(-1, 1),
        query=query.view(-1, query.size(2)),
        query_scale=query_scale.view(-1, 1),
        weights=weights,
    )
    tensors = _inputs(a, facts) | _between(a, facts, query) | results
    return KernelCall(facts, tensors)


def _inputs(a: Arguments, facts: Any) -> dict[str, Tensor | None]:
    """The inputs of the program, without the caches."""
    tokens, heads = len(a.token_x), a.weights_proj.size(1)
    w8a8 = not facts.absent
    return dict(
        token_x=padded(rows(a.token_x), rows=facts.missing_rows(tokens)),
        q_norm=padded(rows(a.q_norm), rows=facts.missing_latent_rows(tokens)),
        q_norm_scale=a.q_norm_scale.contiguous().view(-1, 1) if w8a8 else None,
        wq_b=a.wq_b.contiguous(),
        wq_b_scale=a.wq_b_scale.contiguous().view(1, -1) if w8a8 else None,
        wk=a.wk.contiguous(),
        weights_proj=padded(a.weights_proj.contiguous(), columns=facts.missing_columns(heads)),
        ln_gamma_k=a.ln_gamma_k.contiguous().view(1, -1),
        ln_beta_k=a.ln_beta_k.contiguous().view(1, -1),
        cos_idx_rope=rows(a.cos_idx_rope),
        sin_idx_rope=rows(a.sin_idx_rope),
        hadamard_q=a.hadamard_q.contiguous(),
        hadamard_k=a.hadamard_k.contiguous(),
        idx_k_cache_index=words(a.idx_k_cache_index),
    )


def _between(a: Arguments, facts: Any, query: Tensor) -> dict[str, Tensor | None]:
    """Queries and keys before quantization, in whole tiles."""
    tokens, heads, dim = query.shape
    count = tokens + facts.missing_rows(tokens)
    return dict(
        q_index=a.token_x.new_empty(count, heads, dim), k_index=a.token_x.new_empty(count, dim)
    )
