"""Arguments of ``npu_quant_index_update_pto``."""

import functools

import torch
from torch import Tensor

from custom_pypto.reference.npu_quant_rows_pto import hadamard_matrix, index_rows

from . import in_a_wider_row
from .hostile import BLOCK_SIZES, Maker
from .npu_quant_rows_pto import random_rows, rejected_rows
from .rejections import BLOCK_SIZE, none, table, transposed

OP = "npu_quant_index_update_pto"
CACHES = ("cache", "scale_cache")
WEIGHT = 3


def inputs(
    lengths_query: list[int],
    lengths_key: list[int],
    *,
    dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    slot_dtype: torch.dtype = torch.int32,
    hadamard: bool = False,
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
    cache = torch.randint(-128, 128, (blocks, block_size, 1, dim), generator=g).to(torch.int8)
    scale_cache = torch.full((blocks, block_size, 1), torch.nan, dtype=torch.float16)
    if strided:
        cache, scale_cache = in_a_wider_row(cache), in_a_wider_row(scale_cache)
    return dict(
        x=index_rows(batch, longest, dim, seed=seed).to(dtype),
        slots=slots.to(slot_dtype),
        cache=cache,
        scale_cache=scale_cache,
        hadamard=hadamard_matrix(dim).to(dtype) if hadamard else None,
    )


on_npu = functools.partial(inputs, dim=128, dtype=torch.bfloat16)


def not_default() -> dict:
    more = dict(dtype=torch.float16, slot_dtype=torch.int64, hadamard=True)
    return on_npu([2, 3], [12, 20], **more)


def random_call(m: Maker) -> dict:
    rng = m.rng
    sizes = [rng.choice([0, 1, 2, 3, 7]) for _ in range(rng.randint(0, 2))]
    x = random_rows(m, *sizes)
    block_size, blocks = rng.choice(BLOCK_SIZES), rng.choice([0, 1, 2, 3])
    slot_dtype = rng.choice([torch.int32, torch.int64])
    scales = m.floats(torch.float16)
    return x | dict(
        slots=m.tensor(tuple(sizes), m.ints(-1, blocks * block_size, slot_dtype)),
        cache=m.rows(blocks, block_size, 1, x["x"].size(-1), fill=m.bytes()),
        scale_cache=m.tensor((blocks, block_size, 1), scales),
    )


def rejected() -> list:
    x = inputs([3, 2], [40, 33], hadamard=True)
    row, cache, scales, slots = table(OP, x), x["cache"], x["scale_cache"], x["slots"]
    blocks = len(cache)
    of_x, of_cache = "(shape of x without D), got", "(shape of cache without D), got"
    heads = cache.repeat(1, 1, 2, 1)
    stride = "cache.stride(-1) must be 1 (contiguous last dim), got 16; call .contiguous()"

    def slot(message: str, value: Tensor):
        return row(f"slots{message}", slots=value)

    def cached(message: str, value: Tensor):
        return row(message, cache=value)

    def scale(message: str, value: Tensor):
        return row(f"scale_cache{message}", scale_cache=value)

    return [
        *rejected_rows(row, x),
        *none(row, x, ["hadamard"]),
        slot(" must be of shape that of x without D, got [6]", slots.flatten()),
        slot(f".size(0) must be 2 {of_x} 1", slots[:1]),
        slot(f".size(1) must be 3 {of_x} 2", slots[:, :2]),
        slot(".dtype must be int32 or int64 (flat slots of the caches), got int16", slots.short()),
        cached(
            f"cache must be of shape [blocks, block_size, 1, D], got [{blocks}, 16, 32]",
            cache[:, :, 0],
        ),
        *(
            cached(f"{BLOCK_SIZE.replace('key', 'cache', 1)}{n}", cache.new_zeros(9, n, 1, 32))
            for n in (0, 24, 1040)
        ),
        cached("cache.size(2) must be 1 (N2: one key head), got 2", heads),
        cached("cache.size(3) must be 32 (D of x), got 16", cache[..., :16]),
        cached("cache.dtype must be int8, got uint8", cache.view(torch.uint8)),
        cached(stride, transposed(cache)),
        scale(f" must be of shape [blocks, block_size, 1], got [{blocks}, 16]", scales[..., 0]),
        scale(f".size(0) must be {blocks} {of_cache} 1", scales[:1]),
        scale(f".size(1) must be 16 {of_cache} 8", scales[:, :8]),
        scale(".dtype must be float16, got float32", scales.float()),
    ]


def unsupported_on_npu() -> list:
    row = table(OP, on_npu([2, 2], [20, 5], strided=True))
    return [row("cache must be contiguous on an NPU, got strides")]


def graph_calls() -> dict[str, list[dict]]:
    return {
        "sizes": [
            on_npu([2, 1], [20, 5], hadamard=True),
            on_npu([3, 1, 1], [50, 4, 8], block_size=32, hadamard=True, seed=1),
        ],
        "int64": [on_npu([2, 1], [20, 5], dtype=torch.float16, slot_dtype=torch.int64)],
    }
