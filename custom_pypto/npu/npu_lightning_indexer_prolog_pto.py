"""``npu_lightning_indexer_prolog_pto`` on an NPU."""

import torch
from torch import Tensor

from .common import CUBE, Arguments, Launch, Limits, kernel, name, padded, program, rows

OP = "npu_lightning_indexer_prolog_pto"


def check(a: Arguments) -> None:
    limits = Limits(OP, a)
    limits.dtype("token_x")
    dim, heads = a.wk.size(1), a.weights_proj.size(1)
    limits.require(dim == 128, "wk.size(1)", "128", dim)
    limits.require(heads <= 64, "weights_proj.size(1)", "at most 64", heads)
    for argument, width, step in (
        ("token_x.size(1)", a.token_x.size(1), 16),
        ("q_norm.size(1)", a.q_norm.size(1), _rows_of_latent(a)),
    ):
        legal = width > 0 and width % step == 0
        limits.require(legal, argument, f"a positive multiple of {step}", width)
    limits.contiguous("idx_k_cache", "idx_k_scale_cache")


def _rows_of_latent(a: Arguments) -> int:
    """Rows and columns of the blocks in which products load ``q_norm``."""
    return 32 if a.q_norm.dtype == torch.int8 else CUBE


def run(
    launch: Launch, a: Arguments, out: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    query, query_scale, weights = out
    if query.numel() == 0:
        return out
    if a.idx_k_cache.numel() == 0:  # every slot is outside
        a.idx_k_cache = a.idx_k_cache.new_empty(1, CUBE, 1, query.size(2))
        a.idx_k_scale_cache = a.idx_k_scale_cache.new_empty(1, CUBE, 1)
        a.idx_k_cache_index = torch.full_like(a.idx_k_cache_index, -1)
    if a.sin_idx_rope.dtype != a.cos_idx_rope.dtype:
        a.sin_idx_rope, a.cos_idx_rope = a.sin_idx_rope.float(), a.cos_idx_rope.float()
    run_program = kernel(
        OP,
        dtype=name(a.token_x.dtype),
        angle_dtype=name(a.cos_idx_rope.dtype),
        w8a8=a.q_norm_scale is not None,
        slot_words=a.idx_k_cache_index.element_size() // 4,
        eps=a.layernorm_epsilon_k,
        hidden=a.token_x.size(1),
        tokens=a.token_x.size(0),
        ready_on_host=Limits(OP, a).ready_on_host("idx_k_cache_index"),
    )
    tensors = _tensors(a, query, query_scale, weights)
    written = (*tensors[13:15], *tensors[-3:])  # the caches and the outputs
    launch(run_program, tensors, written)
    return out


def _tensors(
    a: Arguments, query: Tensor, query_scale: Tensor, weights: Tensor
) -> tuple[Tensor, ...]:
    """The program's arguments, in its order."""
    tokens, heads, dim = query.shape
    missing = -tokens % program(OP).rows_at_once(tokens=tokens, hidden=a.token_x.size(1))
    absent = a.cos_idx_rope.new_empty(1, 1, dtype=torch.float32)
    w8a8 = a.q_norm_scale is not None
    return (
        padded(rows(a.token_x), rows=missing),
        padded(rows(a.q_norm), rows=missing + -(tokens + missing) % _rows_of_latent(a)),
        a.q_norm_scale.contiguous().view(-1, 1) if w8a8 else absent,
        a.wq_b.contiguous(),
        a.wq_b_scale.contiguous().view(1, -1) if w8a8 else absent,
        a.wk.contiguous(),
        padded(a.weights_proj.contiguous(), columns=-heads % CUBE),
        a.ln_gamma_k.contiguous().view(1, -1),
        a.ln_beta_k.contiguous().view(1, -1),
        rows(a.cos_idx_rope),
        rows(a.sin_idx_rope),
        a.hadamard_q.contiguous(),
        a.hadamard_k.contiguous(),
        rows(a.idx_k_cache),
        a.idx_k_scale_cache.view(-1, 1),
        a.idx_k_cache_index.contiguous().view(1, -1).view(torch.int32),
        # queries and keys before quantisation, in whole tiles
        a.token_x.new_empty(tokens + missing, heads, dim),
        a.token_x.new_empty(tokens + missing, dim),
        query.view(-1, dim),
        query_scale.view(-1, 1),
        weights,
    )
