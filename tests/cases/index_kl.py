"""Arguments of the ops that train an indexer on an attention: what they share."""

import torch
from torch import Tensor

from . import in_a_wider_row, place, random
from .hostile import HEADS, Maker, sequences
from .rejections import MODE, SCALE, SCALES, WINDOW, WINDOW_REMEDY, each, strided_rows

# of the tensors with a row for each query token, and for each key
OF_TOKENS = ("query", "query_rope", "query_index", "weights")


def host_lengths(lengths: list[int], layout: str) -> list[int]:
    """Counts, or prefix sums."""
    return torch.tensor(lengths).cumsum(0).tolist() if layout == "TND" else [*lengths]


def inputs(
    lengths_query: list[int],
    lengths_key: list[int],
    *,
    heads: int = 4,
    latent: int = 32,
    rope: int = 16,
    index_heads: int = 3,
    dim: int = 48,
    layout: str = "TND",
    dtype: torch.dtype = torch.float32,
    weights_dtype: torch.dtype | None = None,
    sparse_mode: int = 3,
    cmp_ratio: int = 1,
    strided: bool = False,
    seed: int = 0,
) -> dict:
    """A call without selection and statistics; ``lengths_key`` count tokens, ``cmp_ratio`` of which
    share a key; ``rope=0``: no RoPE."""
    g = torch.Generator().manual_seed(seed)

    def tokens(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        rows = [random((n, *shape), dtype, g) for n in lengths_query]
        return place(rows, layout, padding=1)

    def keys(width: int) -> Tensor:
        rows = [random((n // cmp_ratio, 1, width), dtype, g) for n in lengths_key]
        placed = place(rows, layout, padding=2)
        return in_a_wider_row(placed) if strided else placed

    return dict(
        query=tokens(heads, latent),
        key=keys(latent),
        query_index=tokens(index_heads, dim),
        key_index=keys(dim),
        weights=tokens(index_heads, dtype=weights_dtype or dtype) / dim**0.5,
        scale_value=(latent + rope) ** -0.5,
        query_rope=tokens(heads, rope) if rope else None,
        key_rope=keys(rope) if rope else None,
        actual_seq_qlen=host_lengths(lengths_query, layout),
        actual_seq_klen=host_lengths(lengths_key, layout),
        layout=layout,
        sparse_mode=sparse_mode,
        cmp_ratio=cmp_ratio,
    )


def random_call(m: Maker) -> dict:
    rng = m.rng
    cmp_ratio = rng.choice([1, 1, 2, 4])
    large = rng.random() < 0.02
    while (s := sequences(m, large, "lengths_key", cmp_ratio)).layout_key == "PA_BSND":
        pass
    heads, index_heads = rng.choice(HEADS), rng.choice(HEADS)
    latent, rope = rng.choice([16, 32, 48]), rng.choice([0, 16, 32])
    dim = rng.choice([16, 32, 128])
    query, key = s.arguments["actual_seq_lengths_query"], s.arguments["lengths_key"]
    weights = m.tensor((*s.tokens, index_heads), m.floats(rng.choice([m.dtype, torch.float32])))
    return dict(
        query=m.tensor((*s.tokens, heads, latent)),
        key=m.rows(*s.rows, 1, latent),
        query_index=m.tensor((*s.tokens, index_heads, dim)),
        key_index=m.rows(*s.rows, 1, dim),
        # larger scores have errors that an exponential shows
        weights=weights / dim,
        scale_value=rng.random() * (latent + rope) ** -0.5 + 1e-3,
        query_rope=m.tensor((*s.tokens, heads, rope)) if rope else None,
        key_rope=m.rows(*s.rows, 1, rope) if rope else None,
        actual_seq_qlen=None if query is None else query.tolist(),
        actual_seq_klen=None if key is None else key.tolist(),
        layout=s.layout_query,
        sparse_mode=rng.choice([0, 3]),
        cmp_ratio=cmp_ratio,
    )


def rejected(row, bsnd: dict, tnd: dict) -> list:
    """Calls that both divergences reject."""
    query, key = bsnd["query"], bsnd["key"]
    index, keys = bsnd["query_index"], bsnd["key_index"]
    of_16 = "must be a positive multiple of 16, got"
    statistics = "(of the forward, with return_softmax_lse=True)"
    rows = [
        row("layout must be 'BSND' or 'TND', got 'PA_BSND'", layout="PA_BSND"),
        *(row(f"scale_value must be {SCALE}{x:g}", scale_value=x) for x in SCALES[:4]),
        row(f"{MODE}1", sparse_mode=1),
        row("cmp_ratio must be 1 to 128 (tokens per key), got 129", cmp_ratio=129),
        row(
            "actual_seq_qlen must be a list of int: inclusive prefix sums of query tokens, for "
            "'TND', got None",
            tnd,
            actual_seq_qlen=None,
        ),
        row(
            "actual_seq_klen must be a list of int: inclusive prefix sums of keys, for 'TND', got "
            "None",
            tnd,
            actual_seq_klen=None,
        ),
        row("actual_seq_klen.size(0) must be 2 (B), got 1", tnd, actual_seq_klen=[40]),
        row("actual_seq_qlen.size(0) must be 2 (B), got 1", actual_seq_qlen=[3]),
        row(
            "query must be of shape [B, S1, N1, D] (layout 'BSND'), got [4, 4]",
            query=query[0, :, :, 0],
        ),
        row(f"query.size(3) {of_16} 24", **each(bsnd, ("query", "key"), lambda x: x[..., :24])),
        row("key.size(3) must be 32 (L of query), got 16", key=key[..., :16]),
        row("key.dtype must be float32 (dtype of query), got bfloat16", key=key.bfloat16()),
        row("key_rope must be a tensor, as query_rope is, got None", key_rope=None),
        row("query_index must be of shape [B, S1, N, D], got [4, 3, 48]", query_index=index[0]),
        row("query_index.size(1) must be 4 (as query), got 2", query_index=index[:, :2]),
        row(
            "query_index.dtype must be float32 (dtype of query), got bfloat16",
            query_index=index.bfloat16(),
        ),
        row(f"key_index.size(1) must be {key.size(1)} (as key), got 2", key_index=keys[:, :2]),
        row("key_index.size(3) must be 48 (D of query_index), got 16", key_index=keys[..., :16]),
        row(
            f"query_index.size(3) {of_16} 24",
            **each(bsnd, ("query_index", "key_index"), lambda x: x[..., :24]),
        ),
        row(
            "weights.size(2) must be 3 (shape of query_index without D), got 2",
            weights=bsnd["weights"][..., :2],
        ),
        row(
            "weights.dtype must be float32 (dtype of query_index), got float16",
            weights=bsnd["weights"].half(),
        ),
        *(
            row(f"{name} must be {WINDOW}, got 0; {WINDOW_REMEDY}", **{name: 0})
            for name in ("pre_tokens", "next_tokens")
        ),
        *strided_rows(row, bsnd, ["key", "key_rope", "key_index"]),
    ]
    for name in ("softmax_max", "softmax_sum"):
        x = bsnd[name]
        of_heads = f"{name}.size(3) must be 4 (N1 of query), got 3"
        dtype = f"{name}.dtype must be float32 {statistics}, got float64"
        rows += [row(of_heads, **{name: x[..., :3]}), row(dtype, **{name: x.double()})]
    return rows


def unsupported_on_npu(row, on_npu) -> list:
    """Calls over every visible key that only the NPU kernels reject."""
    at_most = "query_index.size({}) must be at most {} on an NPU, got {}"
    return [
        row(at_most.format(1, 64, 65), on_npu([2], [5], index_heads=65)),
        row(at_most.format(2, 128, 144), on_npu([2], [5], dim=144)),
    ]


def graph_calls(on_npu) -> dict[str, list[dict]]:
    """Lengths are constants of a graph."""
    return {
        "packed": [on_npu([2, 1], [20, 5])],
        "by-sequence": [on_npu([3, 1], [50, 4], layout="BSND", dtype=torch.float16)],
        "no-lengths": [
            on_npu([3, 3], [20, 20], layout="BSND", rope=0)
            | dict(actual_seq_qlen=None, actual_seq_klen=None)
        ],
    }
