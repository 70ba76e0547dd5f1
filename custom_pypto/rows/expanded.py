"""Expansion: keys and values of every head from the latents, as in upstream transformers.

A pair of a query and a key costs ``nope + R + v`` products per head, where absorption takes ``2 L +
R``: 320 and 1088 in DeepSeek-V3.2. But all keys are expanded, and multiplied with every
query, selected or not. So expansion is for prompts of some thousand tokens.

In bfloat16 it is an op where the CPU multiplies that fast, else torch's attention in float32.

Shapes: B batch, S new tokens, n cached tokens, H heads, L ``kv_lora_rank``, R
``qk_rope_head_dim``, K selected positions.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import layer_ops, npu

FEWEST_TOKENS = 64  # of a prompt; callers leave fewer to absorption
TOKENS = 256  # that attend at once
HEADS = 16  # that are expanded at once


class Heads(NamedTuple):
    """What the heads of a layer attend with."""

    q_nope: Tensor  # [.., H, nope]
    q_rope: Tensor | None  # [.., H, R], rotated
    weight: Tensor  # [H, nope + v, L] of kv_b_proj
    scaling: float
    sinks: Tensor | None  # [H] float32
    expands: bool = True  # whether expansion, with other last bits, is allowed


def is_cheaper(heads: Heads, indices: Tensor, keys: int) -> bool:
    """Whether expansion of ``keys`` rows takes fewer products than absorption."""
    if npu.on_cpu or heads.sinks is not None or not heads.expands:
        return False
    nope, value, rope = widths(heads)
    latent, tokens = heads.weight.size(2), indices.size(1)
    width = nope + rope + value if in_bfloat16(heads) else 2 * padded_width(heads)
    expanded = keys * (nope + value) * latent + pairs(tokens, keys, keys) * width
    selected = pairs(tokens, keys, indices.size(-1))
    return expanded < tokens * (nope + value) * latent + selected * (2 * latent + rope)


def pairs(tokens: int, keys: int, most: int) -> int:
    """Pairs of the last ``tokens`` of ``keys`` tokens and up to ``most`` keys that each sees."""
    whole = min(max(keys - most, 0), tokens)  # tokens that see as many
    rest = tokens - whole
    return whole * most + rest * (keys - tokens) + rest * (rest + 1) // 2


def in_bfloat16(heads: Heads) -> bool:
    """Whether the op multiplies: where this CPU has fast instructions for bfloat16."""
    halves = {heads.q_nope.dtype, heads.weight.dtype} == {torch.bfloat16}
    return halves and heads.weight.size(2) % 32 == 0 and torch.ops.custom_pypto.multiplies_bf16()


def widths(heads: Heads) -> tuple[int, int, int]:
    """``nope``, v and R."""
    nope = heads.q_nope.size(-1)
    return nope, heads.weight.size(1) - nope, 0 if heads.q_rope is None else heads.q_rope.size(-1)


def padded_width(heads: Heads) -> int:
    """scaled_dot_product_attention has one for keys and values."""
    nope, value, rope = widths(heads)
    return max(nope + rope, value)


def attend_expanded(
    heads: Heads, indices: Tensor, lengths: Tensor, first: Callable
) -> Tensor | None:
    """:func:`expanded_attention`, or None where it is not cheaper or cannot be.

    Args:
        lengths: ``[B]``, the keys of each sequence with the new ones.
        first: copies of the first latents ``[B, n, L]`` and RoPE keys ``[B, n, R]``, from n.
    """
    size, keys = indices.size(1), int(lengths.max())
    if torch.is_grad_enabled() or not is_cheaper(heads, indices, keys):
        return None
    latent, rope = first(count=keys)
    unwritten = (torch.arange(keys, device=indices.device) >= lengths[:, None]).unsqueeze(-1)
    for rows in (latent, rope):
        if rows is not None and not rows.masked_fill_(unwritten, 0).isfinite().all():
            return None  # a NaN would reach tokens that do not select its row
    ends = lengths[:, None] + torch.arange(1 - size, 1, device=indices.device)
    return expanded_attention(heads, indices, ends, latent, rope)


def expanded_attention(
    heads: Heads, indices: Tensor, ends: Tensor, latent: Tensor, k_rope: Tensor | None
) -> Tensor | None:
    """The outputs ``[B, S, H, v]`` of the heads, in the dtype of the queries; None in bfloat16 if a
    token names a key twice.

    Args:
        heads: without sinks.
        indices: ``[B, S, 1, K]`` int32, as for ``npu_sparse_flash_attention_pto``.
        ends: ``[B, S]``, the number of keys that a token sees, at most n.
        latent: ``[B, n, L]``, finite.
        k_rope: ``[B, n, R]``, finite, or None.
    """
    if not in_bfloat16(heads) or latent.dtype != torch.bfloat16:
        return in_float32(heads, indices.squeeze(2), ends, latent, k_rope)
    output, once = layer_ops.expanded_attention(
        heads.q_nope,
        heads.q_rope,
        latent,
        k_rope,
        heads.weight,
        indices.squeeze(2),
        ends.long(),
        heads.scaling,
    )
    return output if once else None


def in_float32(
    heads: Heads, indices: Tensor, ends: Tensor, latent: Tensor, k_rope: Tensor | None
) -> Tensor:
    """:func:`expanded_attention` by torch; ``indices`` are ``[B, S, K]``."""
    blocks = list(zip(indices.split(TOKENS, 1), ends.split(TOKENS, 1), strict=True))
    biases = [log_of_counts(*block) for block in blocks]
    nope, value, rope = widths(heads)
    width = padded_width(heads)

    def padded(x: Tensor) -> Tensor:
        return F.pad(x, (0, width - x.size(-1))).transpose(1, 2)

    outputs = []
    with torch.autocast("cpu", enabled=False):
        for first in range(0, len(heads.weight), HEADS):
            some = slice(first, first + HEADS)
            both = F.linear(latent.float(), heads.weight[some].flatten(0, 1).float())
            k, v = both.unflatten(-1, (-1, nope + value)).split([nope, value], -1)
            q = heads.q_nope[:, :, some].float()
            if k_rope is not None:
                q = torch.cat([q, heads.q_rope[:, :, some].float()], -1)
                k = torch.cat([k, k_rope.float().unsqueeze(2).expand(*k.shape[:3], rope)], -1)
            q, k, v = padded(q), padded(k), padded(v)
            parts = [
                F.scaled_dot_product_attention(
                    part,
                    k[:, :, : bias.size(-1)],
                    v[:, :, : bias.size(-1)],
                    bias,
                    scale=heads.scaling,
                )
                for part, bias in zip(q.split(TOKENS, 2), biases, strict=True)
            ]
            outputs.append(torch.cat(parts, 2).transpose(1, 2)[..., :value].to(heads.q_nope.dtype))
    return torch.cat(outputs, 2)


def log_of_counts(indices: Tensor, ends: Tensor) -> Tensor:
    """The bias of scores ``[B, 1, tokens, keys]``: the logarithm of how many ``indices`` ``[B,
    tokens, K]`` name a key."""
    keys = max(int(ends.max()), 0)
    counts = (indices != -1).cumprod(-1)
    counts *= (indices >= 0) & (indices < ends.unsqueeze(-1))
    named = torch.zeros(*ends.shape, keys + 1, dtype=torch.float32, device=ends.device)
    named.scatter_add_(-1, indices.clamp(0, keys).long(), counts.float())
    return named[..., :keys].log().unsqueeze(1)
