"""Definitions of the layer ops (custom_pypto/layer_ops.py) in plain torch: transformers' formulas,
with its roundings. Numbers of a tensor that name nothing count as in the ops."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear, silu, softplus

from .weight_only_linear import weight_only_linear

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device="cpu")
LARGEST = 2**63 - 1


# ---- rows --------------------------------------------------------------------------------------


def activate(x: Tensor, name: str) -> Tensor:
    functions: dict[str, Callable[[Tensor], Tensor]]
    functions = {"sigmoid": torch.sigmoid, "silu": silu, "softplus": softplus}
    return functions[name](x.float()).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    root = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return x * root.to(x.dtype)
    if weight.dtype == x.dtype:
        return weight * (x.float() * root).to(x.dtype)
    return (weight * (x.float() * root)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, first: int, interleaved: bool) -> Tensor:
    width = cos.size(-1)
    before, rope, after = x.tensor_split([first, first + width], -1)
    if interleaved:
        a, b = rope[..., ::2], rope[..., 1::2]
        cos, sin = (y[..., : width // 2].repeat(1, 1, 2) for y in (cos, sin))
    else:
        a, b = rope.chunk(2, -1)
    straight, crossed = torch.cat([a, b], -1), torch.cat([-b, a], -1)
    rope = straight * cos.unsqueeze(2) + crossed * sin.unsqueeze(2)
    return torch.cat([before, rope, after], -1)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rest, rope = x.tensor_split([x.size(-1) - 2 * cos.size(-1)], -1)
    cos, sin = (y.repeat_interleave(2, -1).unsqueeze(2) for y in (cos, sin))
    crossed = torch.stack([-rope[..., 1::2], rope[..., ::2]], -1).flatten(-2)
    return torch.cat([rest, (rope.float() * cos + crossed.float() * sin).to(x.dtype)], -1)


def choice_of_groups(choice: Tensor, groups: int, kept: int) -> tuple[Tensor, Tensor]:
    """The numbers that choose, -inf in groups that are not kept, and the sum of each group."""
    sums = choice.unflatten(1, (groups, -1)).sort(dim=-1, descending=True).values[..., :2].sum(-1)
    if kept == groups:
        return choice, sums
    best = sums.sort(dim=-1, descending=True, stable=True).indices[:, :kept]
    dropped = torch.ones_like(sums, dtype=torch.bool).scatter(1, best, False)
    dropped = dropped.repeat_interleave(choice.size(1) // groups, 1)
    return choice.masked_fill(dropped, -torch.inf), sums


def route(
    logits: Tensor,
    bias: Tensor,
    groups: int,
    kept: int,
    k: int,
    normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    choice, _ = choice_of_groups(scores + bias, groups, kept)
    experts = choice.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return weights_of(scores, experts, normalize, scale), experts


def route_roots(logits: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    scores = softplus(logits).sqrt()
    experts = (scores + bias).sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return weights_of(scores, experts, True, scale), experts


def weights_of(scores: Tensor, experts: Tensor, normalize: bool, scale: float) -> Tensor:
    weights = scores.gather(1, experts)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale


def weighted_sum(x: Tensor, weights: Tensor) -> Tensor:
    return (x.float() * weights.unsqueeze(-1)).sum(1).to(x.dtype)


# ---- streams -----------------------------------------------------------------------------------


def projected(streams: Tensor, weight: Tensor, norm_eps: float) -> Tensor:
    return linear(rms_norm(streams.flatten(2).float(), None, norm_eps), weight)


def collapsed(streams: Tensor, pre: Tensor, eps: float) -> Tensor:
    return ((pre.sigmoid() + eps).unsqueeze(-1) * streams.float()).sum(2).to(streams.dtype)


def hyper_connection(
    streams: Tensor,
    weight: Tensor,
    base: Tensor,
    scale: Tensor,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    n = streams.size(2)
    parts = projected(streams, weight, norm_eps).split([n, n, n * n], -1)
    bases = base.split([n, n, n * n])
    pre, post, comb = (x * s + b for x, s, b in zip(parts, scale, bases, strict=True))
    comb = comb.unflatten(-1, (n, n)).softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return 2 * post.sigmoid(), comb, collapsed(streams, pre, eps)


def collapse_streams(
    streams: Tensor, weight: Tensor, base: Tensor, scale: Tensor, eps: float, norm_eps: float
) -> Tensor:
    return collapsed(streams, projected(streams, weight, norm_eps) * scale + base, eps)


def mix_streams(streams: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    dtype = streams.dtype
    mixed = (comb.to(dtype).float().mT @ streams.float()).to(dtype)
    return post.to(dtype).unsqueeze(-1) * x.unsqueeze(-2) + mixed


# ---- rows of a cache ---------------------------------------------------------------------------


def pool_groups(
    state: Tensor,
    blocks: Tensor,
    values: Tensor,
    bias: Tensor,
    start: Tensor,
    lengths: Tensor,
    width: int,
) -> tuple[Tensor, Tensor]:
    rate, overlap = bias.size(0), bias.size(1) // width - 1
    batch, count = values.size(0), -(-values.size(1) // rate)
    sums = torch.zeros(batch, count, width)
    complete = torch.zeros(batch, count, dtype=torch.bool)
    of_sequences = zip(start.tolist(), lengths.tolist(), blocks.tolist(), strict=True)
    for b, (first, end, block) in enumerate(of_sequences):
        ring = state[block, :, 0] if 0 <= block < len(state) else None
        for i in range(count):
            group, parts = max(first, 0) // rate + i, []
            complete[b, i] = (group + 1) * rate <= end
            for at in range((overlap + 1) * rate if complete[b, i] else 0):
                row = row_of((group - overlap) * rate + at, first, end, ring, values[b])
                if row is not None:
                    half, token = divmod(at, rate)
                    own = slice(half * width, (half + 1) * width)
                    value, gate = row.float().chunk(2)
                    parts.append((value[own], gate[own] + bias[token, own]))
            if parts:
                found, gates = map(torch.stack, zip(*parts, strict=True))
                sums[b, i] = (found * gates.softmax(0)).sum(0)
    return sums, complete


def row_of(token: int, start: int, end: int, ring: Tensor | None, new: Tensor) -> Tensor | None:
    """``[C | Z]`` of a token of a sequence, if it is in the ring or among the new tokens."""
    if 0 <= token < start:
        return None if ring is None else ring[token % len(ring)]
    column = len(new) - (end - token)
    return new[column] if token >= 0 and 0 <= column < len(new) else None


def cache_slots(table: Tensor, rows: Tensor, valid: Tensor, block: int) -> Tensor:
    column = rows.div(block, rounding_mode="floor")
    fits = valid & (column >= 0) & (column < table.size(1))
    if not table.numel():
        return rows.new_zeros(rows.numel())
    of_table = table.long().gather(1, column.where(fits, 0))
    return torch.where(fits, of_table * block + rows % block, 0).flatten()


def window_rows(
    positions: Tensor,
    valid: Tensor,
    indices: Tensor | None,
    window: int,
    ring: int,
    rate: int,
    count: int,
) -> Tensor:
    before = torch.arange(window)
    seen = valid.unsqueeze(-1) & (positions.unsqueeze(-1) >= before)
    near = torch.where(seen, (positions.unsqueeze(-1) - before) % ring, -2)
    known = positions.clamp(-1, LARGEST - 1) + 1
    rows = torch.arange(count) if indices is None else indices.long()
    seen = (rows >= 0) & (rows < known.div(rate, rounding_mode="floor").unsqueeze(-1))
    return torch.cat([near, torch.where(seen, rows + ring, -1)], -1).int()


# ---- weights and prompts -----------------------------------------------------------------------


# its bits are its own, its values are not
def invariant_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None = None,
    *,
    experts: Tensor | None = None,
    block_size: int = 128,
) -> Tensor:
    return weight_only_linear(x, weight, scales, experts=experts, block_size=block_size)


def convert_weight(
    weight: Tensor,
    scales: Tensor | None,
    block: tuple[int, int] | None,
    out: Tensor,
    out_scales: Tensor | None = None,
) -> None:
    values = stored_values(weight, scales, block)
    groups = None if out_scales is None or out_scales.dim() == 1 else out_scales.size(1)
    rounded, new_scales = rounded_weight(values, out.dtype, groups)
    out.copy_(rounded)
    if out_scales is not None:
        out_scales.copy_(new_scales)


def stored_values(weight: Tensor, scales: Tensor | None, block: tuple[int, int] | None) -> Tensor:
    """The values of a matrix of a checkpoint in float32."""
    if scales is None:
        return weight.float()
    values = weight.float()
    if weight.dtype == torch.int8:
        byte = weight.view(torch.uint8).int()
        codes = torch.stack([byte & 15, byte >> 4], -1).flatten(1)
        values = torch.where(codes < 8, 1.0, -1.0) * E2M1[codes & 7]
    of_values = scales.float()
    for dim, size in enumerate(block):
        of_values = of_values.repeat_interleave(min(size, max(values.size(dim), 1)), dim)
        of_values = of_values.narrow(dim, 0, values.size(dim))
    return values * of_values


def rounded_weight(
    values: Tensor, dtype: torch.dtype, groups: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Values in a format, and its scales; in 4 bits so many for a row."""
    least = torch.finfo(torch.float32).tiny
    if dtype == torch.int8:
        scales = values.abs().amax(-1).clamp(min=least) / 127
        codes = (values / scales[:, None]).round().clamp(-127, 127)
        return codes.nan_to_num(0).to(torch.int8), scales
    if dtype != torch.uint8:
        return values.to(dtype), None
    parts = values.unflatten(-1, (groups, -1))
    low, high = parts.amin(-1), parts.amax(-1)
    scale = ((high - low) / 15).clamp(min=least).bfloat16()
    zero = (low + 8 * scale.float()).bfloat16()
    codes = (parts - zero.float()[..., None]) / scale.float()[..., None]
    codes = codes.round().add(8).clamp(0, 15).nan_to_num(0).to(torch.uint8).flatten(1)
    return codes[:, ::2] | codes[:, 1::2] << 4, torch.stack([scale, zero], -1)


def expanded_attention(
    q_nope: Tensor,
    q_rope: Tensor | None,
    latent: Tensor,
    k_rope: Tensor | None,
    weight: Tensor,
    indices: Tensor,
    ends: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    nope, keys = q_nope.size(-1), latent.size(1)
    both = torch.einsum("bnl,hdl->bhnd", latent.float(), weight.float())
    k, v = both[..., :nope], both[..., nope:]
    logits = torch.einsum("bshd,bhnd->bhsn", q_nope.float(), k)
    if q_rope is not None:
        logits = logits + torch.einsum("bshr,bnr->bhsn", q_rope.float(), k_rope.float())
    counts = counts_of(indices, ends, keys)
    hidden = counts.eq(0).unsqueeze(1)
    p = (logits * scale).masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0)
    once = torch.tensor(bool((counts <= 1).all()), device=q_nope.device)
    return torch.einsum("bhsn,bhnd->bshd", p, v).to(q_nope.dtype), once


def counts_of(indices: Tensor, ends: Tensor, keys: int) -> Tensor:
    """``[B, S, n]`` how often each token names each key."""
    names = (indices != -1).cumprod(-1).bool() & (indices >= 0)
    names &= indices < ends.clamp(0, keys).unsqueeze(-1)
    counts = torch.zeros(*ends.shape, keys + 1, dtype=torch.int64)
    counts.scatter_add_(-1, indices.clamp(0, keys).long(), names.long())
    return counts[..., :keys]
