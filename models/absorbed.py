"""Absorption: latents as keys and values of every head (arXiv:2405.04434, section 2.1).

With ``kv_b_proj.weight`` as ``W_UK`` and ``W_UV``, ``q . (W_UK c) = (W_UK^T q) . c`` and ``sum_j
p_j W_UV c_j = W_UV sum_j p_j c_j``. Upstream transformers expands all latents instead.

Shapes: T tokens, H heads, L ``kv_lora_rank``, R ``qk_rope_head_dim``, K selected positions.
"""

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import custom_pypto

from .one_op import of_groups

# torch multiplies bfloat16 fast only where a CPU does
HAS_BF16 = torch.ops.custom_pypto.has_bf16()
EINSUM_COPIES = 16  # rows up to which torch.einsum copies the weight


class Part(NamedTuple):
    """Consecutive tokens of sequences laid end to end, and the keys of these sequences up to
    them."""

    queries: slice
    keys: slice
    query_ends: Tensor  # [sequences] int32, counted from the first token of the slice
    key_ends: Tensor


@functools.cache  # once in a process
def advise_on_bfloat16() -> None:
    """For models in bfloat16 on the CPU: says where torch multiplies it row by row."""
    if not HAS_BF16:
        logging.getLogger("custom_pypto").warning(
            "use_custom_pypto: this CPU has no bfloat16 instructions, and torch.nn.Linear is "
            "several times slower in bfloat16 than in float32 on prompts; load the model with "
            "weights='stored', 'int8' or 'int4', or with dtype=torch.float32"
        )


def indices_of(part: Part, indices: Tensor) -> Tensor:
    """Those of the part's tokens; if ``indices`` has no columns, all positions that exist."""
    if indices.size(-1):
        return indices[part.queries]
    longest = int(part.key_ends.diff(prepend=part.key_ends.new_zeros(1)).max())
    every = torch.arange(longest, dtype=torch.int32, device=indices.device)
    return every.expand(part.queries.stop - part.queries.start, 1, longest)


def absorbed_query(q_nope: Tensor, weight: Tensor) -> Tensor:
    """``W_UK^T q``, ``[.., H, L]``."""
    return of_heads(q_nope, weight[:, : q_nope.size(-1)].transpose(1, 2))


def of_heads(x: Tensor, weight: Tensor) -> Tensor:
    """``[.., H, B]``: rows ``[.., H, A]`` times the matrix of their head, of ``[H, B, A]``."""
    wanted = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    on_cpu = x.device.type == "cpu" and x.dtype == weight.dtype == torch.bfloat16
    whole = x.size(-1) % 32 == 0 and weight.size(1) % 16 == 0
    if on_cpu and whole and not wanted:
        if not HAS_BF16 or x.shape[:-2].numel() <= EINSUM_COPIES:
            return of_groups(x, weight)
    return torch.einsum("...ha,hba->...hb", x, weight).contiguous()


def first_derivative(backward: Callable) -> Callable:
    """A ``backward`` that rejects ``create_graph``: torch's ``once_differentiable`` loses the
    second derivative silently where ``torch.autograd.grad`` asks for some tensors only."""

    @functools.wraps(backward)
    def rejecting(ctx, *gradients):
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "patched model: create_graph must be False on the ops (they have no second "
                "derivative), got True; call models.use_custom_pypto(model, "
                'training="upstream")'
            )
        return backward(ctx, *gradients)

    return rejecting


class AbsorbedAttention(torch.autograd.Function):
    """Sparse attention from queries ``[T, H, nope]`` to outputs ``[T, H, v]`` of the heads, and the
    softmax's maxima and sums ``[1, T, H]`` float32, which have no gradient.

    The absorbed query, four times as wide as the query, exists for a part at a time: the backward
    computes it again. All tensors have one dtype, but ``sinks`` and the statistics.

    Args:
        q_rope: ``[T, H, R]``, or None.
        weight: ``[H, nope + v, L]``.
        latent: ``[T, 1, L]`` keys and values.
        k_rope: ``[T, 1, R]``, or None.
        sinks: ``[H]`` float32, or None.
        indices: ``[T, 1, K]`` int32 positions within the sequence; K = 0: all that a token sees.
        parts: of the tokens, in their order.
    """

    @staticmethod
    def forward(ctx, q_nope, q_rope, weight, latent, k_rope, sinks, indices, scaling, parts):
        w_uv = weight[:, q_nope.size(-1) :]
        results = []
        for part in parts:
            output, *statistics = custom_pypto.npu_sparse_flash_attention_pto(
                absorbed_query(q_nope[part.queries], weight),
                latent[part.keys],
                None,
                indices_of(part, indices),
                scaling,
                query_rope=None if q_rope is None else q_rope[part.queries],
                key_rope=None if k_rope is None else k_rope[part.keys],
                actual_seq_lengths_query=part.query_ends,
                actual_seq_lengths_kv=part.key_ends,
                layout_query="TND",
                layout_kv="TND",
                sinks=sinks,
                return_softmax_lse=True,
            )
            heads = torch.einsum("thl,hvl->thv", output, w_uv)
            # only the gradient of the weight needs the output in latent space
            results.append((heads, output if ctx.needs_input_grad[2] else None, *statistics))
        heads, outputs, maxima, sums = zip(*results, strict=True)
        outputs = torch.cat(outputs) if ctx.needs_input_grad[2] else None
        heads, maxima, sums = torch.cat(heads), torch.cat(maxima, 1), torch.cat(sums, 1)
        ctx.save_for_backward(
            q_nope, q_rope, weight, latent, k_rope, sinks, indices, outputs, maxima, sums
        )
        ctx.scaling, ctx.parts = scaling, parts
        ctx.mark_non_differentiable(maxima, sums)
        ctx.set_materialize_grads(False)
        return heads, maxima, sums

    @staticmethod
    @first_derivative
    def backward(ctx, d_heads, *_):
        if d_heads is None:  # only the indexer has a loss
            return (None,) * 9
        q_nope, q_rope, weight, latent, k_rope, sinks, indices, outputs, *statistics = (
            ctx.saved_tensors
        )
        w_uk, w_uv = weight.split([q_nope.size(-1), d_heads.size(-1)], 1)
        d_q_nope, d_q_rope = [], []
        # in float32: parts add to the same rows
        d_weight, d_latent, d_k_rope, d_sinks = (
            None if x is None else torch.zeros_like(x, dtype=torch.float32)
            for x in (None if outputs is None else weight, latent, k_rope, sinks)
        )
        for part in ctx.parts:
            d_part = d_heads[part.queries]
            d_output = torch.einsum("thv,hvl->thl", d_part, w_uv).contiguous()
            d_absorbed, d_key, _, d_rope, d_key_rope, d_sink = (
                custom_pypto.npu_sparse_flash_attention_grad_pto(
                    absorbed_query(q_nope[part.queries], weight),
                    latent[part.keys],
                    None,
                    indices_of(part, indices),
                    d_output,
                    d_output,  # in place of the output, which the op does not read
                    *(x[:, part.queries] for x in statistics),
                    ctx.scaling,
                    query_rope=None if q_rope is None else q_rope[part.queries],
                    key_rope=None if k_rope is None else k_rope[part.keys],
                    actual_seq_qlen=part.query_ends,
                    actual_seq_kvlen=part.key_ends,
                    layout="TND",
                    sinks=sinks,
                )
            )
            d_q_nope.append(torch.einsum("thl,hdl->thd", d_absorbed, w_uk))
            d_q_rope.append(d_rope)
            d_latent[part.keys] += d_key
            if k_rope is not None:
                d_k_rope[part.keys] += d_key_rope
            if sinks is not None:
                d_sinks += d_sink
            if outputs is not None:
                d_w_uk = torch.einsum("thd,thl->hdl", q_nope[part.queries], d_absorbed)
                d_w_uv = torch.einsum("thv,thl->hvl", d_part, outputs[part.queries])
                d_weight += torch.cat([d_w_uk, d_w_uv], 1)
        return (
            torch.cat(d_q_nope),
            None if q_rope is None else torch.cat(d_q_rope),
            None if outputs is None else d_weight.to(weight.dtype),
            d_latent.to(latent.dtype),
            None if k_rope is None else d_k_rope.to(k_rope.dtype),
            d_sinks,
            *[None] * 3,
        )


def constant_keys(pools: dict[str, Tensor], *others: Tensor | None) -> dict[str, Tensor]:
    """``pools`` for a call with these queries and sinks. Where one of all has a gradient and a pool
    has none, as where queries alone have adapters, its rows are constants; the op, which cannot
    know that their gradient may go, gets leaves."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return pools
    if not any(x is not None and x.requires_grad for x in (*others, *pools.values())):
        return pools
    return {
        name: pool.detach().requires_grad_()
        if pool.is_floating_point() and not pool.requires_grad
        else pool
        for name, pool in pools.items()
    }
