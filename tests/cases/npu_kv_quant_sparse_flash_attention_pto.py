"""Arguments of ``npu_kv_quant_sparse_flash_attention_pto``."""

import functools

import torch
from torch import Tensor

from custom_pypto.reference import npu_kv_quant_update_pto as update
from custom_pypto.rows.latents import int8_row_bytes

from . import in_a_wider_row
from .hostile import HEADS, Maker, sequences
from .npu_sparse_flash_attention_pto import inputs as unquantized_inputs
from .npu_sparse_flash_attention_pto import rejected_indices, scale
from .rejections import (
    SCALE,
    SCALES,
    block_tables,
    in_layouts,
    layout_names,
    lengths,
    modes,
    none,
    optional,
    table,
    transposed,
)

OP = "npu_kv_quant_sparse_flash_attention_pto"
WEIGHT = 5
MODES = dict(key_quant_mode=2, value_quant_mode=2)


def inputs(
    lengths_query: list[int],
    lengths_key: list[int],
    *,
    latent: int = 128,
    rope: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    strided: bool = False,
    **keywords,
) -> dict:
    """Those of ``npu_sparse_flash_attention_pto`` with a quantized cache, whose unused rows have
    scales and RoPE dims of NaN."""
    sizes = dict(latent=latent, rope=rope, dtype=dtype)
    x = unquantized_inputs(lengths_query, lengths_key, **sizes, **keywords)
    for name in ("sinks", "value"):
        x.pop(name)
    key = quantized(x.pop("key"), x.pop("key_rope"))
    query = torch.cat([x.pop("query"), x.pop("query_rope")], -1)
    key = in_a_wider_row(key) if strided else key
    absent = dict.fromkeys(("value", "key_dequant_scale", "value_dequant_scale"))
    return dict(query=query, key=key) | absent | x | MODES | dict(rope_head_dim=rope)


def quantized(latent: Tensor, rope: Tensor) -> Tensor:
    """The int8 rows of ``latent [.., 1, L]`` and ``rope [.., 1, R]``."""
    rows = [x.reshape(-1, x.size(-1)) for x in (latent, rope)]
    if latent.dtype.itemsize != 2:  # of a query that the op rejects
        rows = [x.bfloat16() for x in rows]
    width = int8_row_bytes(latent.size(-1), rope.size(-1))
    cache = torch.zeros(1, len(rows[0]), 1, width, dtype=torch.int8)
    update(*rows, torch.arange(len(rows[0])), cache)
    return cache.view(*latent.shape[:-1], width)


on_npu = functools.partial(inputs, latent=512, rope=64)


def not_default() -> dict:
    more = dict(dtype=torch.float16, layout_query="TND", sparse_mode=0)
    return on_npu([4, 3], [5, 4], **more)


def random_call(m: Maker) -> dict:
    """Any bytes, or small values with scales of any kind."""
    rng = m.rng
    m.dtype = rng.choice([torch.bfloat16, torch.float16])
    large = rng.random() < 0.02
    s = sequences(m, large, "actual_seq_lengths_kv")
    heads, latent, rope = rng.choice(HEADS), rng.choice([128, 128, 256]), rng.choice([16, 32])
    K = rng.choice([513, 700, 1200]) if large else rng.choice([0, 1, 2, 7, 8, 16, 40, 100])
    key = m.rows(*s.rows, 1, int8_row_bytes(latent, rope), fill=m.bytes())
    if rng.random() < 0.7:  # else the bytes of RoPE dims and scales are any, too
        tail = torch.cat([random_ropes(m, *key.shape[:-1], rope), scales(m, key, latent)], -1)
        key = torch.cat([key[..., :latent], tail], -1)
    return dict(
        query=m.tensor((*s.tokens, heads, latent + rope)),
        key=key,
        value=None,
        sparse_indices=m.tensor(
            (*s.tokens, 1, K), m.ints(rng.choice([0, 0, -1]), max(s.capacity - 1, 0))
        ),
        scale_value=scale(m, latent + rope),
        layout_query=s.layout_query,
        layout_kv=s.layout_key,
        sparse_mode=rng.choice([0, 3]),
        rope_head_dim=rope,
        **MODES,
        **s.arguments,
    )


def random_ropes(m: Maker, *shape: int) -> Tensor:
    return m.floats()(torch.Size(shape).numel()).view(shape).view(torch.int8)


def scales(m: Maker, key: Tensor, latent: int) -> Tensor:
    values = [0.0, 1.0, 0.5, -2.0, 1e-4]
    if m.values == "special":
        values += [torch.nan, torch.inf, -torch.inf, 1e-40, 3e38]
    shape = (*key.shape[:-1], latent // 128)
    chosen = m.rng.choices(values, k=torch.Size(shape).numel())
    return torch.tensor(chosen).view(shape).view(torch.int8)


def rejected() -> list:
    op = in_layouts(OP, inputs, "layout_kv", "actual_seq_lengths_kv")
    row = op.row
    parts = [layout_names, lengths, block_tables, modes, rejected_indices]
    return [
        *(each for part in parts for each in part(op)),
        *rejected_modes(row),
        *rejected_queries(row, op.pa["query"]),
        *rejected_keys(row, op.pa["key"]),
        *none(row, op.pa, optional(op)),
        *(row(f"scale_value must be {SCALE}{x:g}", scale_value=x) for x in SCALES),
        row("sparse_block_size must be 1 (an index names one key), got 64", sparse_block_size=64),
        *(
            row(
                f"{name} must be None (None: int8), got 290; "
                "omit it (hifloat8 needs an Ascend 950)",
                **{name: 290},
            )
            for name in ("key_dtype", "value_dtype")
        ),
    ]


def rejected_modes(row) -> list:
    per_tile = "must be 2 (a scale per token and tile of 128), got"
    in_rows = "must be None (scales are part of the cache's rows), got a tensor"
    one_scale = torch.ones(1)
    return [
        *(
            row(f"{name} {per_tile} {n}", **{name: n})
            for name in ("key_quant_mode", "value_quant_mode")
            for n in (0, 1, 3)
        ),
        *(
            row(f"attention_mode must be 2 (MLA, absorbed), got {n}", attention_mode=n)
            for n in (0, 1)
        ),
        row(
            "quant_scale_repo_mode must be 1 (scales are part of the cache's rows), got 0",
            quant_scale_repo_mode=0,
        ),
        row("tile_size must be 128 (elements per scale), got 64", tile_size=64),
        *(
            row(f"rope_head_dim must be a positive multiple of 16, got {n}", rope_head_dim=n)
            for n in (0, -16, 24)
        ),
        *(
            row(f"{name} {in_rows}", **{name: one_scale})
            for name in ("key_dequant_scale", "value_dequant_scale")
        ),
    ]


def rejected_queries(row, query: Tensor) -> list:
    dtype = (
        "query.dtype must be bfloat16 or float16 (that of the RoPE part of the cache's rows), got"
    )
    width = "query.size(3) must be a positive multiple of 128 (L) plus 16 (rope_head_dim), got"
    shape = "query must be of shape [B, S1, N1, D] (layout_query 'BSND'), got [4, 144]"
    return [
        row(f"{dtype} float32", query=query.float()),
        row(f"{dtype} int8", query=query.to(torch.int8)),
        row(f"{width} 80", query=query[..., :80]),
        row(f"{width} 16", query=query[..., :16]),
        row(shape, query=query[0, 0]),
        row("query.size(2) must be at least 1 (N1), got 0", query=query[:, :, :0]),
    ]


def rejected_keys(row, key: Tensor) -> list:
    of_950 = "; only Ascend 950 multiplies 8-bit floats, this op does not"
    unquantized = "; npu_sparse_flash_attention_pto takes it"
    width = (
        "key.size(3) must be 164 (bytes of a row: L of int8, 2 R of RoPE, L / 32 of scales), got"
    )
    other = "value must be None or key (a row holds key and value), got another tensor"
    stride = "key.stride(-1) must be 1 (contiguous last dim), got 16; call .contiguous()"
    return [
        *(
            row(f"key.dtype must be int8, got {str(dtype)[6:]}{end}", key=x)
            for dtype, end, x in (
                (torch.bfloat16, unquantized, key.bfloat16()),
                (torch.float8_e4m3fn, of_950, key.view(torch.float8_e4m3fn)),
                (torch.uint8, of_950, key.view(torch.uint8)),
                (torch.int32, "", key.int()),
            )
        ),
        row(f"{width} 160", key=key[..., :160]),
        row("key.size(2) must be 1 (N2: one key head), got 2", key=key.repeat(1, 1, 2, 1)),
        row(stride, key=transposed(key)),
        row(other, value=key.clone()),
        row(other, value=key[..., :128]),
    ]


def unsupported_on_npu() -> list:
    row = table(OP, on_npu([2, 2], [20, 5], strided=True))
    narrow = inputs([2, 2], [20, 5])
    return [
        row("rope_head_dim must be 64 on an NPU, got 16", narrow),
        row("key must be contiguous on an NPU, got strides"),
    ]


def graph_calls() -> dict[str, list[dict]]:
    packed = dict(layout_query="TND", sparse_mode=0, sparse_count=4, block_size=32)
    return {
        "sizes": [
            on_npu([2, 1], [20, 5]),
            on_npu([3, 3, 2], [50, 1, 8], heads=7, block_size=32, sparse_count=5, seed=1),
        ],
        "packed-sizes": [
            not_default(),
            on_npu([3, 1, 1], [50, 4, 8], dtype=torch.float16, **packed),
        ],
    }
