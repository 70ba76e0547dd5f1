"""Arguments of ``npu_lightning_indexer_pto``."""

import torch
from torch import Tensor

from . import place, random, stored, token_counts
from .hostile import HEADS, Maker, sequences
from .rejections import COUNT, Op, each, in_layouts, none, optional, shared

ON_NPU = dict(dim=128)
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


def not_default() -> dict:
    return inputs(
        [2, 3],
        [12, 20],  # fewer keys than sparse_count, which the mode shows in
        dtype=torch.float16,
        weights_dtype=torch.float32,
        layout_query="TND",
        sparse_count=4,
        sparse_mode=0,
        cmp_ratio=4,
        **ON_NPU,
    )


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
    op = in_layouts("npu_lightning_indexer_pto", "index", inputs, *names)
    scores = "compute the scores of the returned positions in torch, or call "
    scores += "torch_npu.npu_lightning_indexer"
    return [
        *shared(op),
        *rejected_dims(op),
        *rejected_weights(op),
        *none(op.row, op.pa, optional(op)),
        *(
            op.row(f"sparse_count-{n}", f"{COUNT}{n}", sparse_count=n)
            for n in (0, -1, 2049, 2560, 3071, 4095, 8193, 9216, 2**40)
        ),
        *(
            op.row(
                f"cmp_ratio-{n}",
                f"cmp_ratio must be 1 to 128 (tokens per key), got {n}",
                cmp_ratio=n,
            )
            for n in (0, -1, -4, 129, 2**32 + 4)
        ),
        # a keyword of torch_npu's standard op
        op.row(
            "return_value",
            f"return_value must be False (only positions are returned), got True; {scores}",
            return_value=True,
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
        row("no-heads", "query.size(2) must be at least 1 (N1), got 0", **no_heads),
        row("D-not-16s", f"query.size(3) {of_16} 24", **each(op.pa, names, lambda x: x[..., :24])),
        row("D-0", f"query.size(3) {of_16} 0", **each(op.pa, names, lambda x: x[..., :0])),
        row("D-not-16s-TND", f"query.size(2) {of_16} 24", op.tnd, **packed),
        row("key-D", f"key.size(3) {of_query}", key=key[..., :16]),
        row("key-D-TND", f"key.size(2) {of_query}", op.tnd, key=op.tnd["key"][..., :16]),
    ]


def rejected_weights(op: Op) -> list:
    weights, packed = op.pa["weights"], op.tnd["weights"]
    of_query = "(shape of query without D), got"
    dtype = "weights.dtype must be float32 (dtype of query), got"
    half = "weights.dtype must be bfloat16 (dtype of query) or float32, got float16"
    bfloat16 = op.pa | each(op.pa, ["query", "key"], Tensor.bfloat16)

    def row(id: str, message: str, value: Tensor, inputs: dict = op.pa):
        return op.row(f"weights-{id}", message, inputs, weights=value)

    return [
        row("rank", "weights must be of shape [B, S1, N1], got [2, 4, 4, 1]", weights[..., None]),
        row("dtype", f"{dtype} float16", weights.half()),
        row("float64", f"{dtype} float64", weights.double()),
        row("dtype-of-bfloat16-query", half, weights.half(), bfloat16),
        row("batch", f"weights.size(0) must be 2 {of_query} 1", weights[:1]),
        row("tokens", f"weights.size(1) must be 4 {of_query} 3", weights[:, :3]),
        row("heads", f"weights.size(2) must be 4 {of_query} 3", weights[..., :3]),
        row("tokens-TND", f"weights.size(0) must be 6 {of_query} 5", packed[:5], op.tnd),
        row("heads-TND", f"weights.size(1) must be 4 {of_query} 3", packed[:, :3], op.tnd),
    ]
