"""Random calls of the layer ops, with ids, slots and positions from anywhere in their range."""

from collections.abc import Callable

import torch
from torch import Tensor

from . import DTYPES, weight_only_linear
from .hostile import Maker

WEIGHT = 3  # how often each one is drawn, as in the modules of the public ops
FLOAT8 = torch.float8_e4m3fn
EPS = [1e-6, 1e-5, 1e-3]


def several(m: Maker, most: int = 7) -> int:
    return m.rng.choice([n for n in (0, 1, 1, 2, 3, 5, 7, 9) if n <= most])


def float32(m: Maker, *shape: int) -> Tensor:
    return m.tensor(shape, m.floats(torch.float32))


def bools(m: Maker, *shape: int) -> Tensor:
    return m.tensor(shape, lambda n: torch.rand(n, generator=m.generator) < 0.8)


def finite(m: Maker, factor: float = 1.0) -> Callable[[int], Tensor]:
    fill = m.floats(torch.float32)
    return lambda n: (fill(n).nan_to_num(0, 0, 0) * factor).bfloat16()


def activate(m: Maker) -> dict:
    shape = [several(m) for _ in range(m.rng.randint(0, 2))] + [m.rng.choice([0, 1, 5, 33])]
    return dict(x=m.tensor(tuple(shape)), name=m.rng.choice(["sigmoid", "silu", "softplus"]))


def rms_norm(m: Maker) -> dict:
    shape = [several(m) for _ in range(m.rng.randint(0, 3))] + [m.rng.choice([0, 1, 2, 5, 17, 64])]
    weight = m.rng.choice([None, m.dtype, torch.float32])
    return dict(
        x=m.tensor(tuple(shape)),
        weight=None if weight is None else m.tensor((shape[-1],), m.floats(weight)),
        eps=m.rng.choice(EPS),
    )


def rotation(m: Maker, angles: int, rotated: int) -> dict:
    tokens = several(m, 3), several(m, 5)
    more = several(m)
    return dict(
        x=m.tensor((*tokens, several(m, 5), rotated + more)),
        cos=m.tensor((*tokens, angles)),
        sin=m.tensor((*tokens, angles)),
    )


def rotate(m: Maker) -> dict:
    width = m.rng.choice([0, 2, 4, 16])
    call = rotation(m, width, width)
    first = m.rng.randint(0, call["x"].size(-1) - width)
    return call | dict(first=first, interleaved=m.rng.random() < 0.5)


def rotate_pairs(m: Maker) -> dict:
    pairs = m.rng.choice([0, 1, 2, 8])
    return rotation(m, pairs, 2 * pairs)


def route(m: Maker) -> dict:
    groups, size = m.rng.choice([1, 1, 2, 4]), m.rng.choice([2, 3, 8])
    kept = m.rng.randint(1, groups)
    return dict(
        logits=m.rows(several(m), groups * size, fill=m.floats(torch.float32)),
        bias=float32(m, groups * size),
        groups=groups,
        kept=kept,
        k=m.rng.randint(1, kept * size),
        normalize=m.rng.random() < 0.5,
        scale=m.rng.choice([1.0, 2.5]),
    )


def route_roots(m: Maker) -> dict:
    experts = m.rng.choice([1, 2, 8, 17])
    return dict(
        logits=m.tensor((several(m), experts)),
        bias=float32(m, experts),
        k=m.rng.randint(1, experts),
        scale=m.rng.choice([1.0, 1.5]),
    )


def weighted_sum(m: Maker) -> dict:
    shape = several(m), several(m), m.rng.choice([0, 1, 8, 17])
    return dict(x=m.tensor(shape), weights=float32(m, *shape[:2]))


def streams(m: Maker) -> Tensor:
    width = m.rng.choice([0, 1, 8, 40])
    return m.tensor((several(m, 2), several(m, 5), several(m, 5), width))


def projection(m: Maker, x: Tensor, width: int, scales: int) -> dict:
    return dict(
        streams=x,
        weight=float32(m, width, x.size(2) * x.size(3)),
        base=float32(m, width),
        # an infinity times a sum that is 0 but for rounding is anything
        scale=m.tensor((scales,), lambda n: float32(m, n).nan_to_num(1, 1, 1)),
    )


def hyper_connection(m: Maker) -> dict:
    x = streams(m)
    call = projection(m, x, (2 + x.size(2)) * x.size(2), 3)
    iterations = m.rng.choice([0, 1, 2, 20])
    return call | dict(iterations=iterations, eps=1e-6, norm_eps=m.rng.choice(EPS))


def collapse_streams(m: Maker) -> dict:
    x = streams(m)
    return projection(m, x, x.size(2), 1) | dict(eps=1e-6, norm_eps=m.rng.choice(EPS))


def mix_streams(m: Maker) -> dict:
    x = streams(m)
    batch, tokens, count, width = x.shape
    return dict(
        streams=x,
        x=m.tensor((batch, tokens, width)),
        post=float32(m, batch, tokens, count),
        comb=float32(m, batch, tokens, count, count),
    )


def pool_groups(m: Maker) -> dict:
    rate, width = m.rng.choice([1, 2, 4]), m.rng.choice([1, 3, 8])
    wide = width * m.rng.choice([1, 2])
    batch, tokens, blocks = several(m, 3), several(m, 9), several(m, 5)
    return dict(
        state=m.tensor((blocks, m.rng.choice([1, rate, 2 * rate + 3]), 1, 2 * wide)),
        blocks=m.tensor((batch,), m.ints(0, blocks - 1)),
        values=m.tensor((batch, tokens, 2 * wide)),
        bias=float32(m, rate, wide),
        start=m.tensor((batch,), m.ints(0, 3 * rate)),
        lengths=m.tensor((batch,), m.ints(0, 3 * rate + tokens)),
        width=width,
    )


def cache_slots(m: Maker) -> dict:
    shape, blocks, block = (several(m, 3), several(m)), several(m, 3), m.rng.choice([1, 4, 16])
    return dict(
        table=m.tensor((shape[0], blocks), m.ints(0, 9)),
        rows=m.tensor(shape, m.ints(0, blocks * block, torch.int64)),
        valid=bools(m, *shape),
        block=block,
    )


def window_rows(m: Maker) -> dict:
    shape, count = (several(m, 3), several(m, 5)), several(m)
    selects = m.rng.random() < 0.5
    return dict(
        positions=m.tensor(shape, m.ints(-1, 40, torch.int64)),
        valid=bools(m, *shape),
        indices=m.tensor((*shape, count), m.ints(-1, 12)) if selects else None,
        window=several(m, 5),
        ring=m.rng.choice([1, 9, 16]),
        rate=m.rng.choice([1, 4]),
        count=count,
    )


def invariant_linear(m: Maker) -> dict:
    call = weight_only_linear.random_call(m)
    call.pop("int8_x", None)
    if call["scales"] is None:  # K may be any number, and the weight any floats
        depth = m.rng.choice([1, 3, 17, 32, 300])
        shape = *call["weight"].shape[:-1], depth
        call["weight"] = m.tensor(shape, m.floats(m.rng.choice(DTYPES)))
        call["x"] = m.tensor((*call["x"].shape[:-1], depth))
    return call


def convert_weight(m: Maker) -> dict:
    rng = m.rng
    out_dtype = rng.choice([*DTYPES, torch.int8, torch.uint8])
    rounds = out_dtype in (torch.int8, torch.uint8)
    rows = rng.choice([0, 1, 3, 17])
    columns = rng.choice([32, 64, 96] if rounds else [0, 2, 14, 96])
    dtype = rng.choice([*DTYPES, torch.float64, FLOAT8, torch.int8])
    call = dict(weight=None, scales=None, block=None)
    if dtype in (FLOAT8, torch.int8):
        width = columns // 2 if dtype == torch.int8 else columns

        def fill(n: int) -> Tensor:
            return torch.randint(256, (n,), generator=m.generator).to(torch.uint8).view(dtype)

        call["weight"] = m.rows(rows, width, fill=fill)
        block = rng.choice([1, 2, 128, 2**40]), rng.choice([2, 10, 32, 128, 2**40])
        grid = (-(-size // length) for size, length in zip((rows, columns), block, strict=True))
        call |= dict(block=block, scales=m.tensor((*grid,), m.floats(rng.choice(DTYPES))))
    else:
        call["weight"] = m.rows(rows, columns, fill=m.floats(dtype))
    width = columns // 2 if out_dtype == torch.uint8 else columns
    scales = None
    if out_dtype == torch.int8:
        scales = torch.full((rows,), 7.0)
    elif out_dtype == torch.uint8:
        scales = torch.full((rows, rng.choice([1, columns // 32]), 2), 7.0).bfloat16()
    # between columns that stay as they are
    out = torch.full((rows, width + 3), 7).to(out_dtype)[:, 1 : width + 1]
    return call | dict(out=out, out_scales=scales)


def expanded_attention(m: Maker) -> dict:
    rng = m.rng
    batch, tokens, heads = several(m, 2), rng.choice([0, 1, 3, 40]), rng.choice([1, 2, 3])
    nope, value, latent = rng.choice([1, 16, 33]), rng.choice([1, 32, 40]), rng.choice([32, 64])
    keys, count, rope = rng.choice([0, 1, 17, 60, 300]), several(m, 9), rng.choice([None, 2, 16])

    shape = batch, tokens, count
    indices = m.tensor(shape, m.ints(-1, keys))
    if indices.numel() and rng.random() < 0.7:  # no key twice
        orders = torch.rand(batch * tokens, keys + 12, generator=m.generator).argsort(1)
        indices = orders[:, :count].int().view(shape)
    return dict(
        q_nope=m.tensor((batch, tokens, heads, nope), finite(m)),
        q_rope=None if rope is None else m.tensor((batch, tokens, heads, rope), finite(m)),
        latent=m.tensor((batch, keys, latent), finite(m)),
        k_rope=None if rope is None else m.tensor((batch, keys, rope), finite(m)),
        weight=m.tensor((heads, nope + value, latent), finite(m, latent**-0.5)),
        indices=indices,
        ends=m.tensor((batch, tokens), m.ints(0, keys, torch.int64)),
        scale=rng.choice([1.0, 0.1]),
    )


CALLS: dict[str, Callable[[Maker], dict]] = {
    "activate": activate,
    "cache_slots": cache_slots,
    "collapse_streams": collapse_streams,
    "convert_weight": convert_weight,
    "expanded_attention": expanded_attention,
    "hyper_connection": hyper_connection,
    "invariant_linear": invariant_linear,
    "mix_streams": mix_streams,
    "pool_groups": pool_groups,
    "rms_norm": rms_norm,
    "rotate": rotate,
    "rotate_pairs": rotate_pairs,
    "route": route,
    "route_roots": route_roots,
    "weighted_sum": weighted_sum,
    "window_rows": window_rows,
}
