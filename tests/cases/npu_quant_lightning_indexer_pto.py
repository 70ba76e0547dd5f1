"""Arguments of ``npu_quant_lightning_indexer_pto``."""

import functools

import torch
from torch import Tensor

from . import in_a_wider_row, place, stored, token_counts
from .hostile import HEADS, Maker, sequences
from .rejections import COUNT, Op, each, in_layouts, none, optional, shared_by_int8, table

OP = "npu_quant_lightning_indexer_pto"
WEIGHT = 5


def inputs(
    lengths_query: list[int],
    lengths_key: list[int],
    *,
    heads: int = 4,
    dim: int = 32,
    layout_query: str = "BSND",
    layout_key: str = "PA_BSND",
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    scale_dtype: torch.dtype | None = None,
    sparse_count: int = 8,
    sparse_mode: int = 3,
    integers: bool = False,
    strided: bool = False,
    seed: int = 0,
) -> dict:
    """Any bytes; ``integers``: small ones and scales of any sign, whose sums are exact, with many
    ties. ``dtype`` is that of the weights, scales are float32 with float32 weights, else float16.
    What must not be read has scales of NaN."""
    scale_dtype = scale_dtype or (torch.float32 if dtype == torch.float32 else torch.float16)
    g = torch.Generator().manual_seed(seed)
    low, high = (-2, 3) if integers else (-128, 128)

    def int8(*shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=g).float()

    def scales(*shape: int, of: torch.dtype) -> Tensor:
        if integers:
            some = torch.tensor([-1, 0, 0.5, 1, 2])
            return some[torch.randint(5, shape, generator=g)].to(of)
        return (torch.rand(shape, generator=g) / 8 + 2**-7).to(of)

    query = [int8(n, heads, dim) for n in lengths_query]
    query_scale = [scales(n, heads, of=scale_dtype) for n in lengths_query]
    weights = [
        torch.randint(-2, 3, (n, heads), generator=g).to(dtype)
        if integers
        else torch.randn(n, heads, generator=g).to(dtype)
        for n in lengths_query
    ]
    # a key and its scale in one row, which is poisoned as a whole
    rows = [
        torch.cat([int8(n, 1, dim), scales(n, 1, 1, of=torch.float32).to(scale_dtype)], -1)
        for n in lengths_key
    ]
    stored_rows, lengths, table = stored(rows, layout_key, block_size, False, g)
    key = stored_rows[..., :dim].nan_to_num(-128).to(torch.int8)
    key_scale = stored_rows[..., dim].to(scale_dtype).contiguous()
    if strided:
        key, key_scale = in_a_wider_row(key), in_a_wider_row(key_scale)
    return dict(
        query=place(query, layout_query, padding=1).nan_to_num(-128).to(torch.int8),
        key=key,
        weights=place(weights, layout_query, padding=1),
        query_dequant_scale=place(query_scale, layout_query, padding=1),
        key_dequant_scale=key_scale,
        query_quant_mode=0,
        key_quant_mode=0,
        actual_seq_lengths_query=token_counts(lengths_query, layout_query),
        actual_seq_lengths_key=lengths,
        block_table=table,
        layout_query=layout_query,
        layout_key=layout_key,
        sparse_count=sparse_count,
        sparse_mode=sparse_mode,
    )


on_npu = functools.partial(inputs, dim=128, block_size=32, dtype=torch.float16)


def not_default() -> dict:
    return on_npu(
        [2, 3],
        [3, 4],  # no more keys than sparse_count, which the mode shows in
        dtype=torch.float16,
        scale_dtype=torch.float32,
        layout_query="TND",
        sparse_count=4,
        sparse_mode=0,
    )


def random_call(m: Maker) -> dict:
    rng = m.rng
    large = rng.random() < 0.02
    s = sequences(m, large, "actual_seq_lengths_key")
    heads, dim = rng.choice(HEADS), rng.choice([16, 32, 48, 128])
    scale_dtype = rng.choice([torch.float16, torch.float32])
    weights_dtype = rng.choice([torch.bfloat16, torch.float16, torch.float32])
    return dict(
        query=m.tensor((*s.tokens, heads, dim), m.bytes()),
        key=m.rows(*s.rows, 1, dim, fill=m.bytes()),
        weights=m.tensor((*s.tokens, heads), m.floats(weights_dtype)),
        query_dequant_scale=m.tensor((*s.tokens, heads), m.floats(scale_dtype)),
        key_dequant_scale=m.tensor((*s.rows, 1), m.floats(scale_dtype)),
        query_quant_mode=0,
        key_quant_mode=0,
        layout_query=s.layout_query,
        layout_key=s.layout_key,
        sparse_count=rng.choice([1, 2, 3, 7, 8, 16, 40, 64, 2048] + [3072, 8192] * large),
        sparse_mode=rng.choice([0, 3]),
        **s.arguments,
    )


def rejected() -> list:
    op = in_layouts(OP, inputs, "layout_key", "actual_seq_lengths_key")
    mode = "must be 0 (int8, one scale per row), got"
    only_950 = "must be None (int8), got 290; omit it (only Ascend 950 has another type, hifloat8)"
    return [
        *shared_by_int8(op),
        *rejected_int8(op),
        *rejected_dims(op),
        *rejected_weights_and_scales(op),
        *none(op.row, op.pa, optional(op)),
        *(
            op.row(f"{name} {mode} {n}", **{name: n})
            for name in ("query_quant_mode", "key_quant_mode")
            for n in (1, 2, -1, 2**32)
        ),
        *(op.row(f"{COUNT}{n}", sparse_count=n) for n in (0, -1, 2049, 8193, 2**40)),
        *(op.row(f"{name} {only_950}", **{name: 290}) for name in ("query_dtype", "key_dtype")),
    ]


def rejected_int8(op: Op) -> list:
    remedies = {
        torch.bfloat16: "; npu_lightning_indexer_pto takes it",
        torch.float16: "; npu_lightning_indexer_pto takes it",
        torch.float8_e4m3fn: "; only Ascend 950 multiplies 8-bit floats, this op does not",
        torch.float8_e5m2: "; only Ascend 950 multiplies 8-bit floats, this op does not",
        torch.uint8: "; only Ascend 950 multiplies 8-bit floats, this op does not",
        torch.int32: "",
        torch.float64: "",
    }
    return [
        op.row(
            f"{name}.dtype must be int8, got {str(dtype).removeprefix('torch.')}{remedy}",
            **{name: torch.zeros(op.pa[name].shape, dtype=dtype)},
        )
        for name in ("query", "key")
        for dtype, remedy in remedies.items()
    ]


def rejected_dims(op: Op) -> list:
    row, names = op.row, ("query", "key")
    legal = "must be a multiple of 16 up to 1024 (D), got"
    of_query = "must be 32 (D of query), got 16"

    def of_dims(n: int, inputs: dict = op.pa) -> dict:
        return each(inputs, names, lambda x: x.new_zeros(*x.shape[:-1], n))

    no_heads = each(op.pa, ("weights", "query_dequant_scale"), lambda x: x[..., :0])
    return [
        row(
            "query.size(2) must be at least 1 (N1), got 0",
            **no_heads,
            query=op.pa["query"][:, :, :0],
        ),
        *(row(f"query.size(3) {legal} {n}", **of_dims(n)) for n in (0, 24, 1040)),
        row(f"query.size(2) {legal} 24", op.tnd, **of_dims(24, op.tnd)),
        row(f"key.size(3) {of_query}", key=op.pa["key"][..., :16]),
    ]


def rejected_weights_and_scales(op: Op) -> list:
    pa, tnd = op.pa, op.tnd
    of_query = "(shape of query without D), got"
    of_key = "(shape of key without D), got"
    weights, scale = "weights", "query_dequant_scale"

    def row(name: str, message: str, value: Tensor, inputs: dict = pa):
        return op.row(f"{name}{message}", inputs, **{name: value})

    found = []
    for name in (weights, scale):
        value, packed = pa[name], tnd[name]
        found += [
            row(name, " must be of shape [B, S1, N1], got [2, 4, 4, 1]", value[..., None]),
            row(name, f".size(0) must be 2 {of_query} 1", value[:1]),
            row(name, f".size(1) must be 4 {of_query} 3", value[:, :3]),
            row(name, f".size(2) must be 4 {of_query} 3", value[..., :3]),
            row(name, f".size(1) must be 4 {of_query} 3", packed[:, :3], tnd),
        ]
    name, value = "key_dequant_scale", pa["key_dequant_scale"]
    pages, packed = len(value), tnd["key_dequant_scale"]
    wide, floating = "float32 (dtype of query_dequant_scale)", "bfloat16, float16 or float32"
    return [
        *found,
        row(weights, f".dtype must be {floating}, got float64", pa[weights].double()),
        row(scale, ".dtype must be float16 or float32, got bfloat16", pa[scale].bfloat16()),
        row(name, f".dtype must be {wide}, got float16", value.half()),
        row(
            name,
            f" must be of shape [blocks, block_size, 1], got [{pages}, 16, 1, 1]",
            value[..., None],
        ),
        row(name, f".size(0) must be {pages} {of_key} 1", value[:1]),
        row(name, f".size(1) must be 16 {of_key} 8", value[:, :8]),
        row(name, f".size(2) must be 1 {of_key} 2", value.repeat(1, 1, 2)),
        row(name, f".size(0) must be {len(packed)} {of_key} 1", packed[:1], tnd),
    ]


def unsupported_on_npu() -> list:
    row = table(OP, on_npu([2, 2], [20, 5]))
    blocks = "key.size(1) must be a multiple of 32 on an NPU, got 48"
    return [
        row("query.size(2) must be at most 64 on an NPU, got 65", on_npu([2], [5], heads=65)),
        row(
            "key must be contiguous on an NPU, got strides (9216, 144, 144, 1)",
            on_npu([2, 2], [20, 5], strided=True),
        ),
        row(blocks, on_npu([2, 2], [20, 5], block_size=48)),
    ]


def graph_calls() -> dict[str, list[dict]]:
    scales = dict(dtype=torch.float16, scale_dtype=torch.float32)
    packed = dict(layout_query="TND", sparse_count=4, sparse_mode=0, heads=3)
    return {
        "no-query-lengths": [on_npu([3, 3], [20, 5]) | dict(actual_seq_lengths_query=None)],
        "sizes": [on_npu([2, 1], [20, 5]), on_npu([3, 3, 2], [50, 1, 8], heads=7, seed=1)],
        "packed-sizes": [not_default(), on_npu([3, 1, 1], [50, 4, 8], **scales, **packed)],
    }
