"""Arguments of ``npu_sparse_flash_attention_pto``."""

import functools

import torch
from torch import Tensor

from . import (
    INT_MAX,
    INT_MIN,
    in_a_wider_row,
    int32,
    place,
    random,
    stored,
    token_counts,
    visible_keys,
)
from .hostile import HEADS, Maker, sequences
from .rejections import (
    SCALE,
    SCALES,
    Op,
    each,
    in_layouts,
    none,
    optional,
    shared,
    table,
    transposed,
)

WEIGHT = 7


def some_indices(
    len_q: int, len_k: int, count: int, sparse_mode: int, hostile: bool, g: torch.Generator
) -> Tensor:
    """``[len_q, 1, count]``: distinct visible positions, then -1, as the indexer returns them.

    Hostile: future and absent positions, duplicates, int32 extremes, and anything after a -1.
    """
    indices = torch.full((len_q, 1, count), -1, dtype=torch.int32)
    for i, row in enumerate(indices[:, 0]):
        if hostile:
            values = [*range(len_k), -1, -2, INT_MIN, len_k, INT_MAX]
            row[:] = int32(values)[torch.randint(len(values), (count,), generator=g)]
        else:
            chosen = torch.randperm(visible_keys(i, len_q, len_k, sparse_mode), generator=g)
            row[: len(chosen)] = chosen[:count]
    return indices


def inputs(
    lengths_query: list[int],
    lengths_key: list[int],
    *,
    heads: int = 4,
    latent: int = 32,
    rope: int = 16,
    layout_query: str = "BSND",
    layout_kv: str = "PA_BSND",
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    sparse_count: int = 8,
    sparse_mode: int = 3,
    own_value: bool = False,
    sinks: bool | Tensor = False,
    hostile: bool = False,
    strided: bool = False,
    seed: int = 0,
) -> dict:
    """``rope=0``: no rope arguments; ``strided``: key and key_rope are parts of one row;
    ``sinks``: of the size of the logits, or these."""
    g = torch.Generator().manual_seed(seed)
    width = latent + rope
    query = place(
        [random((n, heads, width), dtype, g) for n in lengths_query], layout_query, padding=1
    )
    keys = [random((n, 1, width), dtype, g) for n in lengths_key]
    kv, actual_kv, table = stored(keys, layout_kv, block_size, strided, g)
    key, key_rope = kv.split([latent, rope], -1)
    if not strided:
        key, key_rope = key.contiguous(), key_rope.contiguous()
    indices = [
        some_indices(len_q, len_k, sparse_count, sparse_mode, hostile, g)
        for len_q, len_k in zip(lengths_query, lengths_key, strict=True)
    ]
    if not isinstance(sinks, Tensor):
        sinks = 3 * torch.randn(heads, generator=g) if sinks else None
    return dict(
        query=query[..., :latent].contiguous(),
        key=key,
        value=key.flip(-1) if own_value else None,
        sparse_indices=place(indices, layout_query, padding=1, fill=0),
        scale_value=3 * width**-0.5,
        block_table=table,
        actual_seq_lengths_query=token_counts(lengths_query, layout_query),
        actual_seq_lengths_kv=actual_kv,
        query_rope=query[..., latent:].contiguous() if rope else None,
        key_rope=key_rope if rope else None,
        layout_query=layout_query,
        layout_kv=layout_kv,
        sparse_mode=sparse_mode,
        sinks=sinks,
    )


on_npu = functools.partial(inputs, dtype=torch.bfloat16)


def not_default() -> dict:
    return inputs(
        [4, 3],
        [5, 4],
        dtype=torch.float16,
        layout_query="TND",
        sparse_mode=0,
        own_value=True,
        sinks=True,
    ) | dict(return_softmax_lse=True)


def sinks_of(m: Maker, heads: int) -> Tensor:
    """Beside the logits, and far from them; infinities and NaN among special values."""
    values = [0.0, 1.0, -3.0, 1e4, -1e4, -torch.inf]
    values += [torch.inf, torch.nan] * (m.values == "special")
    return m.tensor((heads,), lambda n: torch.tensor(m.rng.choices(values, k=n)))


def scale(m: Maker, width: int) -> float:
    """Extreme scales only with exact logits, where only the largest one matters."""
    ordinary = m.rng.random() * 3 * width**-0.5
    if m.values in ("random", "tiny"):
        return ordinary + 1e-3
    # no scale with softmax weights of 2^-149 … 2^-126, which some implementations flush to 0
    return m.rng.choice([0.01, 0.05, 1e-3, 1e-30, 1e-38, 1e3, 1e30])


def random_call(m: Maker) -> dict:
    rng = m.rng
    large = rng.random() < 0.02
    s = sequences(m, large, "actual_seq_lengths_kv")
    heads, latent = rng.choice(HEADS), rng.choice([16, 32, 48, 64, 128])
    rope = rng.choice([0, 16, 32, 32])
    K = rng.choice([513, 700, 1200]) if large else rng.choice([0, 1, 2, 7, 8, 16, 40, 100])
    key = m.rows(*s.rows, 1, latent)
    value = None
    if rng.random() < 0.3:
        value = rng.choice([key, m.rows(*key.shape)])
    query_rope = key_rope = None
    if rope:
        query_rope = m.tensor((*s.tokens, heads, rope))
        key_rope = m.rows(*s.rows, 1, rope)
        if rng.random() < 0.2:  # as engines keep them
            row = m.rows(*s.rows, 1, latent + rope)
            key, key_rope = row.split([latent, rope], -1)
            value = None if value is None else key
    return dict(
        query=m.tensor((*s.tokens, heads, latent)),
        key=key,
        value=value,
        sparse_indices=m.tensor(
            (*s.tokens, 1, K), m.ints(rng.choice([0, 0, -1]), max(s.capacity - 1, 0))
        ),
        scale_value=scale(m, latent + rope),
        query_rope=query_rope,
        key_rope=key_rope,
        sparse_block_size=1,
        layout_query=s.layout_query,
        layout_kv=s.layout_key,
        sparse_mode=rng.choice([0, 3]),
        sinks=sinks_of(m, heads) if rng.random() < 0.3 else None,
        return_softmax_lse=rng.random() < 0.3,
        **s.arguments,
    )


def rejected() -> list:
    names = "layout_kv", "actual_seq_lengths_kv"
    op = in_layouts("npu_sparse_flash_attention_pto", inputs, *names)
    row = op.row
    return [
        *shared(op),
        *rejected_dims(op),
        *rejected_values(op),
        *rejected_indices(op),
        *rejected_ropes(op),
        *rejected_sinks(op),
        *rejected_keywords(op),
        *none(row, op.pa, optional(op)),
        *(row(f"scale_value must be {SCALE}{x:g}", scale_value=x) for x in SCALES),
        *(
            row(
                f"sparse_block_size must be 1 (an index names one key), got {n}",
                sparse_block_size=n,
            )
            for n in (0, 2, 64)
        ),
    ]


def rejected_dims(op: Op) -> list:
    no_heads = each(op.pa, ["query", "query_rope"], lambda x: x[:, :, :0])
    of_24 = each(op.pa, ["query", "key"], lambda x: x[..., :24])
    of_query = "key.size(3) must be 32 (L of query), got 16"
    return [
        op.row("query.size(2) must be at least 1 (N1), got 0", **no_heads),
        op.row("query.size(3) must be a positive multiple of 16, got 24", **of_24),
        op.row(of_query, key=op.pa["key"][..., :16]),
    ]


def rejected_values(op: Op) -> list:
    key = op.pa["key"]
    stride = "stride(-1) must be 1 (contiguous last dim), got 16; call .contiguous()"

    def row(message: str, value: Tensor):
        return op.row(f"value{message}", value=value)

    return [
        row(" must be of shape as key, got [16, 1, 32]", key[0]),
        row(".size(3) must be 32 (as key), got 16", key[..., :16]),
        row(".size(0) must be 8 (as key), got 2", key[:2]),
        row(".dtype must be float32 (as key), got float16", key.half()),
        row(f".{stride}", transposed(key)),
    ]


def rejected_indices(op: Op) -> list:
    indices, packed = op.pa["sparse_indices"], op.tnd["sparse_indices"]
    one_head = "must be 1 (N2: one key head), got 2"

    def row(message: str, value: Tensor, inputs: dict = op.pa):
        message = f"sparse_indices{message}"
        return op.row(message, inputs, sparse_indices=value)

    return [
        row(" must be of shape [B, S1, 1, K], got [4, 1, 8]", indices[0]),
        row(".dtype must be int32 (positions), got int64", indices.long()),
        row(".size(0) must be 2 (as query), got 1", indices[:1]),
        row(".size(1) must be 4 (as query), got 2", indices[:, :2]),
        row(f".size(2) {one_head}", indices.repeat(1, 1, 2, 1)),
        row(".size(0) must be 6 (as query), got 5", packed[:5], op.tnd),
        row(f".size(1) {one_head}", packed.repeat(1, 2, 1), op.tnd),
    ]


def rejected_ropes(op: Op) -> list:
    query, key = op.pa["query_rope"], op.pa["key_rope"]
    of_8 = each(op.pa, ["query_rope", "key_rope"], lambda x: x[..., :8])
    stride = "key_rope.stride(-1) must be 1 (contiguous last dim), got 16; call .contiguous()"
    without_key = "key_rope must be a tensor, as query_rope is, got None"
    without_query = "key_rope must be None, as query_rope is, got a tensor"

    def of_query(message: str, value: Tensor):
        return op.row(f"query_rope{message}", query_rope=value)

    def of_key(message: str, value: Tensor):
        return op.row(f"key_rope{message}", key_rope=value)

    return [
        op.row(without_key, key_rope=None),
        op.row(without_query, query_rope=None),
        of_query(" must be of shape as query, except R, got [4, 4, 16]", query[0]),
        of_query(".size(2) must be 4 (as query, except R), got 3", query[:, :, :3]),
        of_query(".size(1) must be 4 (as query, except R), got 2", query[:, :2]),
        of_query(".dtype must be float32 (as query, except R), got float16", query.half()),
        op.row("query_rope.size(3) must be a positive multiple of 16, got 8", **of_8),
        of_key(".size(3) must be 16 (R of query_rope), got 32", key.repeat(1, 1, 1, 2)),
        of_key(" must be of shape as key, except R, got [16, 1, 16]", key[0]),
        of_key(".size(0) must be 8 (as key, except R), got 2", key[:2]),
        of_key(".size(2) must be 1 (as key, except R), got 2", key.repeat(1, 1, 2, 1)),
        of_key(".dtype must be float32 (as key, except R), got float16", key.half()),
        op.row(stride, key_rope=transposed(key)),
    ]


def rejected_sinks(op: Op) -> list:
    def row(message: str, value: Tensor, inputs: dict = op.pa):
        return op.row(f"sinks{message}", inputs, sinks=value)

    logits = ".dtype must be float32 (a logit per head), got"
    return [
        row(" must be of shape [N1], got [1, 4]", torch.zeros(1, 4)),
        row(" must be of shape [N1], got []", torch.tensor(0.0)),
        row(".size(0) must be 4 (N1 of query), got 5", torch.zeros(5)),
        row(".size(0) must be 4 (N1 of query), got 3", torch.zeros(3), op.tnd),
        row(f"{logits} bfloat16", torch.zeros(4).bfloat16()),
        row(f"{logits} float64", torch.zeros(4).double()),
    ]


def rejected_keywords(op: Op) -> list:
    """Keywords of torch_npu's standard op."""
    mode = "attention_mode must be 2 (MLA, absorbed), got {}; omit it, and pass the RoPE dims as "
    mode += "query_rope and key_rope"
    return [op.row(mode.format(x), attention_mode=x) for x in (0, 1, None)]


def unsupported_on_npu() -> list:
    x = on_npu([2, 2], [20, 5])
    row = table("npu_sparse_flash_attention_pto", x)
    strides = "{} must be contiguous on an NPU, got strides"
    return [
        row("query.size(2) must be at most 128 on an NPU, got 129", on_npu([2], [5], heads=129)),
        row(strides.format("key"), on_npu([2, 2], [20, 5], strided=True)),
        row(strides.format("key_rope"), key_rope=in_a_wider_row(x["key_rope"])),
        row(
            "block_table.size(1) must be at most 32768 on an NPU, got 32769",
            block_table=x["block_table"].new_zeros(2, 2**15 + 1),
        ),
    ]


def graph_calls() -> dict[str, list[dict]]:
    float16, statistics = dict(dtype=torch.float16), dict(return_softmax_lse=True)
    packed = dict(layout_query="TND", sparse_mode=0, own_value=True, sinks=True, heads=3)
    # one compilation has one scale
    small = on_npu([2, 1], [20, 5])
    large = on_npu([3, 3, 2], [50, 2, 8], heads=7, latent=48, rope=32, block_size=32)
    large["scale_value"] = small["scale_value"]
    return {
        "no-query-lengths": [
            on_npu([3, 3], [20, 5], **float16) | dict(actual_seq_lengths_query=None)
        ],
        "no-rope": [on_npu([2, 3], [20, 5], rope=0, own_value=True)],
        "keys-by-sequence": [on_npu([2, 3], [20, 5], layout_kv="BSND")],
        "packed-keys": [on_npu([2, 3], [20, 5], layout_query="TND", layout_kv="TND")],
        "rope-and-value": [on_npu([2, 1], [20, 5], own_value=True)],
        "sizes": [small, large],
        "packed-sizes": [
            not_default(),
            on_npu([3, 1, 1], [50, 4, 8], sparse_count=5, **float16, **packed) | statistics,
        ],
        "statistics-sizes": [small | statistics, large | statistics],
        "no-statistics": [on_npu([2, 1], [20, 5], sinks=True) | dict(return_softmax_lse=False)],
    }
