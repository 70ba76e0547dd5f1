"""Arguments of ``npu_kv_quant_update_pto``."""

import functools

import torch
from torch import Tensor

from custom_pypto.reference.npu_quant_rows_pto import index_rows
from custom_pypto.rows.latents import int8_row_bytes

from . import in_a_wider_row
from .hostile import BLOCK_SIZES, Maker
from .rejections import BLOCK_SIZE, none, table, transposed

OP = "npu_kv_quant_update_pto"
CACHES = ("cache",)
WEIGHT = 3


def inputs(
    lengths_query: list[int],
    lengths_key: list[int],
    *,
    latent: int = 128,
    rope: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    slot_dtype: torch.dtype = torch.int32,
    strided: bool = False,
    seed: int = 0,
) -> dict:
    """``[B, longest]`` new tokens, of which those behind a sequence's own are padding, for a cache
    with room for all keys."""
    g = torch.Generator().manual_seed(seed)
    batch, longest = len(lengths_query), max(lengths_query)
    blocks = sum(-(-n // block_size) for n in lengths_key) + 1
    slots = torch.randperm(blocks * block_size, generator=g)[: batch * longest]
    slots = slots.view(batch, longest)
    for row, n in zip(slots, lengths_query, strict=True):
        row[n:] = -1
    width = int8_row_bytes(latent, rope)
    cache = torch.randint(-128, 128, (blocks, block_size, 1, width), generator=g).to(torch.int8)
    x = index_rows(batch, longest, latent + rope).to(dtype)
    return dict(
        latent=x[..., :latent].contiguous(),
        rope=x[..., latent:].contiguous(),
        slots=slots.to(slot_dtype),
        cache=in_a_wider_row(cache) if strided else cache,
    )


on_npu = functools.partial(inputs, latent=512, rope=64)


def not_default() -> dict:
    return on_npu([2, 3], [12, 20], dtype=torch.float16, slot_dtype=torch.int64)


def random_call(m: Maker) -> dict:
    rng = m.rng
    m.dtype = rng.choice([torch.bfloat16, torch.float16])
    sizes = [rng.choice([0, 1, 2, 3, 7]) for _ in range(rng.randint(0, 2))]
    latent, rope = rng.choice([128, 256]), rng.choice([16, 32])
    block_size, blocks = rng.choice(BLOCK_SIZES), rng.choice([0, 1, 2, 3])
    slot_dtype = rng.choice([torch.int32, torch.int64])
    width = int8_row_bytes(latent, rope)
    return dict(
        latent=m.tensor((*sizes, latent)),
        rope=m.tensor((*sizes, rope)),
        slots=m.tensor(tuple(sizes), m.ints(-1, blocks * block_size, slot_dtype)),
        cache=m.rows(blocks, block_size, 1, width, fill=m.bytes()),
    )


def rejected() -> list:
    x = inputs([3, 2], [40, 33])
    row, latent, rope, slots, cache = table(OP, x), *x.values()
    blocks = len(cache)
    half = (
        "latent.dtype must be bfloat16 or float16 (that of the RoPE part of the cache's rows), got"
    )
    of_latent = "(shape of latent without L), got"
    width = (
        "cache.size(3) must be 164 (bytes of a row: L of int8, 2 R of RoPE, L / 32 of scales), got"
    )
    stride = "cache.stride(-1) must be 1 (contiguous last dim), got 16; call .contiguous()"

    def change(name: str, message: str, value: Tensor):
        return row(message, **{name: value})

    return [
        *none(row, x),
        change("latent", f"{half} float32", latent.float()),
        change("latent", "latent must be of shape [.., L], got []", latent[0, 0, 0]),
        change(
            "latent",
            "latent.size(2) must be a positive multiple of 128 (L), got 64",
            latent[..., :64],
        ),
        change("rope", "rope must be of shape that of latent with R for L, got [16]", rope[0, 0]),
        change("rope", "rope.size(0) must be 2 (as latent, except R), got 1", rope[:1]),
        change("rope", "rope.size(2) must be a positive multiple of 16, got 8", rope[..., :8]),
        change("rope", "rope.dtype must be bfloat16 (dtype of latent), got float16", rope.half()),
        change(
            "slots", "slots must be of shape that of latent without L, got [6]", slots.flatten()
        ),
        change("slots", f"slots.size(1) must be 3 {of_latent} 2", slots[:, :2]),
        change(
            "slots",
            "slots.dtype must be int32 or int64 (flat slots of the cache), got int16",
            slots.short(),
        ),
        change(
            "cache",
            f"cache must be of shape [blocks, block_size, 1, bytes of a row], got [{blocks}, 16, "
            "164]",
            cache[:, :, 0],
        ),
        *(
            change(
                "cache",
                f"{BLOCK_SIZE.replace('key', 'cache', 1)}{n}",
                cache.new_zeros(9, n, 1, 164),
            )
            for n in (0, 24, 1040)
        ),
        change(
            "cache", "cache.size(2) must be 1 (N2: one key head), got 2", cache.repeat(1, 1, 2, 1)
        ),
        change("cache", f"{width} 160", cache[..., :160]),
        change("cache", "cache.dtype must be int8, got uint8", cache.view(torch.uint8)),
        change("cache", stride, transposed(cache)),
    ]


def unsupported_on_npu() -> list:
    row = table(OP, inputs([2, 2], [20, 5]))
    return [row("latent.size(2) must be 512 on an NPU, got 128")]


def graph_calls() -> dict[str, list[dict]]:
    return {
        "sizes": [on_npu([2, 1], [20, 5]), on_npu([3, 1, 1], [50, 4, 8], block_size=32, seed=1)],
        "int64": [on_npu([2, 1], [20, 5], dtype=torch.float16, slot_dtype=torch.int64)],
    }
