"""Arguments of ``npu_lightning_indexer_pto``."""

import functools

import torch
from torch import Tensor

from . import place, random, stored, token_counts
from .hostile import HEADS, Maker, sequences
from .rejections import COUNT, Op, each, in_layouts, none, optional, shared, table

WEIGHT = 7


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
    weights_dtype: torch.dtype | None = None,
    sparse_count: int = 8,
    sparse_mode: int = 3,
    cmp_ratio: int = 1,
    integers: bool = False,
    strided: bool = False,
    seed: int = 0,
) -> dict:
    """``lengths_key`` count tokens, of which ``cmp_ratio`` share a key."""
    g = torch.Generator().manual_seed(seed)
    query = [random((n, heads, dim), dtype, g, integers) for n in lengths_query]
    weights = [random((n, heads), weights_dtype or dtype, g, integers) for n in lengths_query]
    keys = [random((n // cmp_ratio, 1, dim), dtype, g, integers) for n in lengths_key]
    key, _, table = stored(keys, layout_key, block_size, strided, g)
    return dict(
        query=place(query, layout_query, padding=1),
        key=key,
        weights=place(weights, layout_query, padding=1),
        actual_seq_lengths_query=token_counts(lengths_query, layout_query),
        actual_seq_lengths_key=token_counts(lengths_key, layout_key),
        block_table=table,
        layout_query=layout_query,
        layout_key=layout_key,
        sparse_count=sparse_count,
        sparse_mode=sparse_mode,
        cmp_ratio=cmp_ratio,
    )


on_npu = functools.partial(inputs, dim=128, dtype=torch.bfloat16)


def not_default() -> dict:
    return on_npu(
        [2, 3],
        [12, 20],  # fewer keys than sparse_count, which the mode shows in
        dtype=torch.float16,
        weights_dtype=torch.float32,
        layout_query="TND",
        sparse_count=4,
        sparse_mode=0,
        cmp_ratio=4,
    ) | dict(return_value=True)


def random_call(m: Maker) -> dict:
    rng = m.rng
    large = rng.random() < 0.02
    cmp_ratio = rng.choice([1, 1, 2, 3, 4, 128])
    s = sequences(m, large, "actual_seq_lengths_key", cmp_ratio)
    heads, dim = rng.choice(HEADS), rng.choice([16, 32, 48, 128])
    return dict(
        query=m.tensor((*s.tokens, heads, dim)),
        key=m.rows(*s.rows, 1, dim),
        weights=m.tensor((*s.tokens, heads), m.floats(rng.choice([m.dtype, torch.float32]))),
        layout_query=s.layout_query,
        layout_key=s.layout_key,
        sparse_count=rng.choice([1, 2, 3, 7, 8, 16, 40, 64, 2048] + [3072, 8192] * large),
        sparse_mode=rng.choice([0, 3]),
        cmp_ratio=cmp_ratio,
        **s.arguments,
    )


def rejected() -> list:
    names = "layout_key", "actual_seq_lengths_key"
    op = in_layouts("npu_lightning_indexer_pto", inputs, *names)
    return [
        *shared(op),
        *rejected_dims(op),
        *rejected_weights(op),
        *none(op.row, op.pa, optional(op)),
        *(
            op.row(f"{COUNT}{n}", sparse_count=n)
            for n in (0, -1, 2049, 2560, 3071, 4095, 8193, 9216, 2**40)
        ),
        *(
            op.row(f"cmp_ratio must be 1 to 128 (tokens per key), got {n}", cmp_ratio=n)
            for n in (0, -1, -4, 129, 2**32 + 4)
        ),
    ]


def rejected_dims(op: Op) -> list:
    row, query, key = op.row, op.pa["query"], op.pa["key"]
    no_heads = dict(query=query[:, :, :0], weights=op.pa["weights"][..., :0])
    of_16 = "must be a positive multiple of 16, got"
    names = ("query", "key")
    packed = each(op.tnd, names, lambda x: x[..., :24])
    of_query = "must be 32 (D of query), got 16"
    return [
        row("query.size(2) must be at least 1 (N1), got 0", **no_heads),
        row(f"query.size(3) {of_16} 24", **each(op.pa, names, lambda x: x[..., :24])),
        row(f"query.size(3) {of_16} 0", **each(op.pa, names, lambda x: x[..., :0])),
        row(f"query.size(2) {of_16} 24", op.tnd, **packed),
        row(f"key.size(3) {of_query}", key=key[..., :16]),
        row(f"key.size(2) {of_query}", op.tnd, key=op.tnd["key"][..., :16]),
    ]


def rejected_weights(op: Op) -> list:
    weights, packed = op.pa["weights"], op.tnd["weights"]
    of_query = "(shape of query without D), got"
    dtype = "weights.dtype must be float32 (dtype of query), got"
    half = "weights.dtype must be bfloat16 (dtype of query) or float32, got float16"
    bfloat16 = op.pa | each(op.pa, ["query", "key"], Tensor.bfloat16)

    def row(message: str, value: Tensor, inputs: dict = op.pa):
        return op.row(message, inputs, weights=value)

    return [
        row("weights must be of shape [B, S1, N1], got [2, 4, 4, 1]", weights[..., None]),
        row(f"{dtype} float16", weights.half()),
        row(f"{dtype} float64", weights.double()),
        row(half, weights.half(), bfloat16),
        row(f"weights.size(0) must be 2 {of_query} 1", weights[:1]),
        row(f"weights.size(1) must be 4 {of_query} 3", weights[:, :3]),
        row(f"weights.size(2) must be 4 {of_query} 3", weights[..., :3]),
        row(f"weights.size(0) must be 6 {of_query} 5", packed[:5], op.tnd),
        row(f"weights.size(1) must be 4 {of_query} 3", packed[:, :3], op.tnd),
    ]


def unsupported_on_npu() -> list:
    x = on_npu([2, 2], [20, 5])
    row = table("npu_lightning_indexer_pto", x)
    paged = "layout_key must be 'PA_BSND' on an NPU, got 'BSND'; keep the keys in a paged cache"
    return [
        row(
            "query.dtype must be bfloat16 or float16 on an NPU, got float32; convert it",
            on_npu([2], [20], dtype=torch.float32),
        ),
        row("query.size(2) must be at most 64 on an NPU, got 65", on_npu([2], [5], heads=65)),
        row("query.size(3) must be 128 on an NPU, got 64", on_npu([2], [20], dim=64)),
        row(paged, on_npu([2], [20], layout_key="BSND", cmp_ratio=4)),
        row(
            "key must be contiguous on an NPU, got strides (4608, 144, 144, 1)",
            on_npu([2, 2], [20, 5], strided=True),
        ),
        row(
            "sparse_count must be at most 4096 for a block table of 8208 keys",
            sparse_count=5120,
            block_table=x["block_table"].new_zeros(2, 513),
        ),
        row(
            "block_table must be of at most 16 million keys on an NPU",
            on_npu([2, 2], [20, 5], block_size=1024),
            block_table=x["block_table"].new_zeros(2, 2**14 + 1),
        ),
    ]


def graph_calls() -> dict[str, list[dict]]:
    def transposed(x: Tensor) -> Tensor:
        """The same values in another order of strides."""
        return x.transpose(0, 1).contiguous().transpose(0, 1)

    ragged = on_npu([2, 3], [20, 5])
    weights = dict(dtype=torch.float16, weights_dtype=torch.float32)
    packed = dict(layout_query="TND", sparse_count=4, sparse_mode=0, cmp_ratio=4, heads=3)
    return {
        "no-query-lengths": [on_npu([3, 3], [20, 5]) | dict(actual_seq_lengths_query=None)],
        "strided": [ragged | each(ragged, ["query", "weights", "block_table"], transposed)],
        "sizes": [
            on_npu([2, 1], [20, 5]),
            on_npu([3, 3, 2], [50, 1, 8], heads=7, block_size=32, seed=1),
            on_npu([1, 5], [17, 90], heads=3, block_size=48, seed=2),
        ],
        "compressed-sizes": [
            on_npu([2, 1], [83, 21], cmp_ratio=4),
            on_npu([3, 3, 2], [203, 6, 33], heads=7, block_size=32, cmp_ratio=4, seed=1),
        ],
        "packed-sizes": [
            not_default(),
            on_npu([3, 1, 1], [50, 4, 8], **weights, **packed) | dict(return_value=True),
        ],
        "keys-by-sequence": [on_npu([2, 3], [20, 5], layout_key="BSND")],
        "packed-keys": [on_npu([2, 3], [20, 5], layout_query="TND", layout_key="TND")],
        "weights-of-float32": [on_npu([1, 2], [5, 16], **weights, sparse_count=16)],
    }
