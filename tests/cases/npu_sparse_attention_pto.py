"""Arguments of ``npu_sparse_attention_pto``."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from . import block_tables, in_a_wider_row, int32, random, slots
from .hostile import BLOCK_SIZES, Maker
from .rejections import COUNT, SCALE, SCALES, each, none, table, tensors, transposed

CACHES = ("kv_cache", "kr_cache", "index_k_cache")
WEIGHT = 5


def fused_inputs(
    lengths: list[int],
    S1: int,
    *,
    hidden: int = 48,
    q_rank: int = 24,
    heads: int = 3,
    nope: int = 16,
    latent: int = 32,
    rope: int = 16,
    index_heads: int = 4,
    index_dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    strided: bool = False,
    seed: int = 0,
    **keywords,
) -> dict:
    """The last ``S1`` of each sequence's ``lengths`` tokens are new, the caches hold the ones
    before; where a sequence is shorter than ``S1``, its first tokens are padding.
    """
    g = torch.Generator().manual_seed(seed)
    batch = len(lengths)

    def normal(*shape: int) -> Tensor:
        return random(shape, dtype, g)

    def weight(inputs: int, *outputs: int) -> Tensor:
        return (torch.randn(inputs, *outputs, generator=g) * inputs**-0.5).to(dtype)

    table, blocks = block_tables(lengths, block_size, g)
    position = int32(lengths)[:, None] - S1 + torch.arange(S1)
    cache_index = torch.full((batch, S1), -1)
    caches = torch.full((blocks, block_size, 1, latent + rope + index_dim), torch.nan, dtype=dtype)
    flat = caches.view(-1, caches.size(-1))
    for b, n in enumerate(lengths):
        slot = slots(table[b], n, block_size)
        cache_index[b, max(S1 - n, 0) :] = slot[max(n - S1, 0) :]
        flat[slot[: max(n - S1, 0)]] = normal(max(n - S1, 0), caches.size(-1))
    caches = caches.split([latent, rope, index_dim], -1)  # one row, as engines keep them
    if not strided:
        caches = [c.contiguous() for c in caches]
    kv_cache, kr_cache, index_k_cache = caches

    frequency = 10000.0 ** (-torch.arange(0, rope, 2) / rope)
    angle = (position[..., None] * frequency).repeat(1, 1, 2)
    return dict(
        x=normal(batch, S1, hidden),
        w_dq=weight(hidden, q_rank),
        w_uq_qr=weight(q_rank, heads * (nope + rope)),
        w_uk=(torch.randn(heads, nope, latent, generator=g) * nope**-0.5).to(dtype),
        w_dkv_kr=weight(hidden, latent + rope),
        gamma_cq=1 + normal(q_rank) / 8,
        gamma_ckv=1 + normal(latent) / 8,
        sin=angle.sin().to(dtype),
        cos=angle.cos().to(dtype),
        cache_index=cache_index.int(),
        kv_cache=kv_cache,
        kr_cache=kr_cache,
        block_table=table,
        act_seqs=int32(lengths),
        w_idx_qb=weight(q_rank, index_heads * index_dim),
        w_idx_k=weight(hidden, index_dim),
        w_idx_proj=weight(hidden, index_heads),
        in_gamma_k=1 + normal(index_dim) / 8,
        in_beta_k=normal(index_dim) / 8,
        index_k_cache=index_k_cache,
        **keywords,
    )


def inputs(lengths_query: list[int], lengths_key: list[int], **keywords) -> dict:
    return fused_inputs(lengths_key, max(lengths_query), **keywords)


def of_angles_and_slots(x: dict) -> dict:
    """The same with angles in float32 and slots in int64."""
    return x | dict(sin=x["sin"].float(), cos=x["cos"].float(), cache_index=x["cache_index"].long())


on_npu = functools.partial(
    inputs, hidden=64, q_rank=32, index_dim=128, sparse_count=8, dtype=torch.bfloat16
)


def not_default() -> dict:
    # the sizes make gammas and caches of one shape
    sizes = dict(hidden=48, rope=32, sparse_count=4, dtype=torch.float16)
    return of_angles_and_slots(on_npu([2], [20, 30], **sizes, softmax_scale=0.4, eps=0.5))


def random_call(m: Maker) -> dict:
    rng = m.rng
    B, S1 = rng.choice([0, 1, 1, 1, 2]), rng.choice([0, 1, 1, 1, 2, 3])
    H, Q = rng.choice([0, 1, 16, 40]), rng.choice([0, 3, 16, 24])
    N1, P, L = rng.choice([1, 2, 3, 17]), rng.choice([0, 1, 8, 16]), rng.choice([16, 32, 64])
    R = rng.choice([16, 16, 32])
    heads, D = rng.choice([1, 2, 3, 17]), rng.choice([R, R + 16, 48])
    block_size, blocks = rng.choice(BLOCK_SIZES), rng.choice([0, 1, 2, 3, 4])
    width = rng.choice([0, 1, 2, 3])
    index_dtype = rng.choice([torch.int32, torch.int64])
    widths = [L, R, D]
    if rng.random() < 0.25:  # parts of one row
        caches = m.rows(blocks, block_size, 1, sum(widths)).split(widths, -1)
    else:
        caches = [m.rows(blocks, block_size, 1, n) for n in widths]
    kv_cache, kr_cache, index_k_cache = caches
    x = dict(
        x=m.tensor((B, S1, H)),
        w_dq=m.tensor((H, Q)),
        w_uq_qr=m.tensor((Q, N1 * (P + R))),
        w_uk=m.tensor((N1, P, L)),
        w_dkv_kr=m.tensor((H, L + R)),
        gamma_cq=m.tensor((Q,)),
        gamma_ckv=m.tensor((L,)),
        sin=m.tensor((B, S1, R), m.floats(rng.choice([m.dtype, torch.float32]))),
        cos=m.tensor((B, S1, R), m.floats(rng.choice([m.dtype, torch.float32]))),
        cache_index=m.tensor((B, S1), m.ints(-1, blocks * block_size, index_dtype)),
        kv_cache=kv_cache,
        kr_cache=kr_cache,
        block_table=m.tensor((B, width), m.ints(0 if blocks else -1, blocks - 1)),
        act_seqs=m.tensor((B,), m.ints(0, width * block_size + 1)),
        w_idx_qb=m.tensor((Q, heads * D)),
        w_idx_k=m.tensor((H, D)),
        w_idx_proj=m.tensor((H, heads)),
        in_gamma_k=m.tensor((D,)),
        in_beta_k=m.tensor((D,)),
        index_k_cache=index_k_cache,
        softmax_scale=rng.choice([None, 0.01, 0.05]),
        eps=rng.choice([1e-6, 0.0, 1.0]),
        sparse_count=rng.choice([1, 2, 8, 16, 2048]),
    )
    if rng.random() < 0.05:  # another argument in the memory of a cache
        name = rng.choice([n for n, t in x.items() if isinstance(t, Tensor) and t.dtype == m.dtype])
        cache, wanted = x[rng.choice(CACHES)], x[name]
        if cache.untyped_storage().nbytes() >= wanted.nbytes:
            strides = torch.empty(wanted.shape, device="meta").stride()
            x[name] = cache.as_strided(wanted.shape, strides, 0)
    return x


# the shape of each tensor, in the contract's letters
SHAPES = {
    "x": "[B, S1, H]",
    "w_dq": "[H, Q]",
    "w_uq_qr": "[Q, N1 * (P + R)]",
    "w_uk": "[N1, P, L]",
    "w_dkv_kr": "[H, L + R]",
    "gamma_cq": "[Q]",
    "gamma_ckv": "[L]",
    "sin": "[B, S1, R]",
    "cos": "[B, S1, R]",
    "cache_index": "[B, S1]",
    "kv_cache": "[blocks, block_size, 1, L]",
    "kr_cache": "[blocks, block_size, 1, R]",
    "block_table": "[B, blocks per sequence]",
    "act_seqs": "[B]",
    "w_idx_qb": "[Q, index heads * D]",
    "w_idx_k": "[H, D]",
    "w_idx_proj": "[H, index heads]",
    "in_gamma_k": "[D]",
    "in_beta_k": "[D]",
    "index_k_cache": "[blocks, block_size, 1, D]",
}
INDEX_DIMS = "index heads of w_idx_proj * D of w_idx_k"
# a tensor with 16 more in a dim, and the error: later tensors are compared with earlier ones
GROWN = [
    ("x", 0, "sin.size(0) must be 18 (B of x), got 2"),
    ("x", 1, "sin.size(1) must be 19 (S1 of x), got 3"),
    ("x", 2, "w_dq.size(0) must be 64 (H of x), got 48"),
    ("w_dq", 0, "w_dq.size(0) must be 48 (H of x), got 64"),
    ("w_dq", 1, "w_uq_qr.size(0) must be 40 (Q of w_dq), got 24"),
    ("w_uq_qr", 0, "w_uq_qr.size(0) must be 24 (Q of w_dq), got 40"),
    ("w_uq_qr", 1, "w_uq_qr.size(1) must be 96 (N1 * (P + R) of w_uk and kr_cache), got 112"),
    ("w_uk", 0, "w_uq_qr.size(1) must be 608 (N1 * (P + R) of w_uk and kr_cache), got 96"),
    ("w_uk", 1, "w_uq_qr.size(1) must be 144 (N1 * (P + R) of w_uk and kr_cache), got 96"),
    ("w_uk", 2, "w_dkv_kr.size(1) must be 64 (L + R of w_uk and kr_cache), got 48"),
    ("w_dkv_kr", 0, "w_dkv_kr.size(0) must be 48 (H of x), got 64"),
    ("w_dkv_kr", 1, "w_dkv_kr.size(1) must be 48 (L + R of w_uk and kr_cache), got 64"),
    ("gamma_cq", 0, "gamma_cq.size(0) must be 24 (Q of w_dq), got 40"),
    ("gamma_ckv", 0, "gamma_ckv.size(0) must be 32 (L of w_uk), got 48"),
    ("sin", 0, "sin.size(0) must be 2 (B of x), got 18"),
    ("sin", 1, "sin.size(1) must be 3 (S1 of x), got 19"),
    ("sin", 2, "sin.size(2) must be 16 (R of kr_cache), got 32"),
    ("cos", 0, "cos.size(0) must be 2 (B of x), got 18"),
    ("cos", 1, "cos.size(1) must be 3 (S1 of x), got 19"),
    ("cos", 2, "cos.size(2) must be 16 (R of kr_cache), got 32"),
    ("cache_index", 0, "cache_index.size(0) must be 2 (B of x), got 18"),
    ("cache_index", 1, "cache_index.size(1) must be 3 (S1 of x), got 19"),
    ("kv_cache", 0, "kr_cache.size(0) must be 24 (blocks of kv_cache), got 8"),
    ("kv_cache", 1, "kr_cache.size(1) must be 32 (block_size of kv_cache), got 16"),
    ("kv_cache", 2, "kv_cache.size(2) must be 1 (N2: one key head), got 17"),
    ("kv_cache", 3, "kv_cache.size(3) must be 32 (L of w_uk), got 48"),
    ("kr_cache", 0, "kr_cache.size(0) must be 8 (blocks of kv_cache), got 24"),
    ("kr_cache", 1, "kr_cache.size(1) must be 16 (block_size of kv_cache), got 32"),
    ("kr_cache", 2, "kr_cache.size(2) must be 1 (N2: one key head), got 17"),
    ("kr_cache", 3, "w_uq_qr.size(1) must be 144 (N1 * (P + R) of w_uk and kr_cache), got 96"),
    ("block_table", 0, "block_table.size(0) must be 2 (B of x), got 18"),
    ("act_seqs", 0, "act_seqs.size(0) must be 2 (B of x), got 18"),
    ("w_idx_qb", 0, "w_idx_qb.size(0) must be 24 (Q of w_dq), got 40"),
    ("w_idx_qb", 1, f"w_idx_qb.size(1) must be 128 ({INDEX_DIMS}), got 144"),
    ("w_idx_k", 0, "w_idx_k.size(0) must be 48 (H of x), got 64"),
    ("w_idx_k", 1, f"w_idx_qb.size(1) must be 192 ({INDEX_DIMS}), got 128"),
    ("w_idx_proj", 0, "w_idx_proj.size(0) must be 48 (H of x), got 64"),
    ("w_idx_proj", 1, f"w_idx_qb.size(1) must be 640 ({INDEX_DIMS}), got 128"),
    ("in_gamma_k", 0, "in_gamma_k.size(0) must be 32 (D of w_idx_k), got 48"),
    ("in_beta_k", 0, "in_beta_k.size(0) must be 32 (D of w_idx_k), got 48"),
    ("index_k_cache", 0, "index_k_cache.size(0) must be 8 (blocks of kv_cache), got 24"),
    ("index_k_cache", 1, "index_k_cache.size(1) must be 16 (block_size of kv_cache), got 32"),
    ("index_k_cache", 2, "index_k_cache.size(2) must be 1 (N2: one key head), got 17"),
    ("index_k_cache", 3, "index_k_cache.size(3) must be 32 (D of w_idx_k), got 48"),
]


def rejected() -> list:
    call = fused_inputs([40, 33], 3, sparse_count=8)
    row = table("npu_sparse_attention_pto", call)
    stride = "must be 1 (contiguous last dim), got 16; call .contiguous()"
    return [
        *rejected_dims(row, call),
        *rejected_dtypes(row, call),
        *none(row, call),
        *(row(error, **{x: grown(call[x], dim)}) for x, dim, error in GROWN),
        *(
            row(
                f"{name} must be of shape {shape}, got {[1, *call[name].shape]}",
                **{name: call[name].unsqueeze(0)},
            )
            for name, shape in SHAPES.items()
        ),
        *(row(f"{x}.stride(-1) {stride}", **{x: transposed(call[x])}) for x in CACHES),
        *(row(f"{COUNT}{n}", sparse_count=n) for n in (0, -1, 2049, 2560, 8193, 2**40)),
        *(row(f"softmax_scale must be None, or {SCALE}{x:g}", softmax_scale=x) for x in SCALES),
        *(
            row(f"eps must be finite and at least 0, got {x:g}", eps=x)
            for x in (-1.0, torch.inf, torch.nan)
        ),
    ]


def grown(x: Tensor, dim: int) -> Tensor:
    size = list(x.shape)
    size[dim] += 16
    return x.new_zeros(size)


def rejected_dims(row: Callable, call: dict) -> list:
    w_uk, w_uq_qr, w_dkv_kr = call["w_uk"], call["w_uq_qr"], call["w_dkv_kr"]
    w_idx_proj, w_idx_qb, kr_cache = call["w_idx_proj"], call["w_idx_qb"], call["kr_cache"]
    of_16 = "must be a positive multiple of 16, got"
    no_heads = dict(w_uk=w_uk[:0], w_uq_qr=w_uq_qr[:, :0])
    no_index_heads = dict(w_idx_proj=w_idx_proj[:, :0], w_idx_qb=w_idx_qb[:, :0])
    L = dict(w_uk=w_uk[..., :24], w_dkv_kr=w_dkv_kr[:, :40], gamma_ckv=call["gamma_ckv"][:24])
    R = dict(kr_cache=kr_cache[..., :8], w_uq_qr=w_uq_qr[:, :72], w_dkv_kr=w_dkv_kr[:, :40])
    D = each(call, ["w_idx_k", "in_gamma_k", "in_beta_k"], lambda x: x[..., :24])
    R_48 = dict(
        kr_cache=torch.zeros(8, 16, 1, 48),
        w_uq_qr=torch.zeros(24, 192),
        w_dkv_kr=torch.zeros(48, 80),
    )
    above = "kr_cache.size(3) must be at most 32 (the indexer rotates the first R of its D dims), "
    two_heads = each(call, CACHES, lambda x: x.repeat(1, 1, 2, 1))
    block = "kv_cache.size(1) must be a multiple of 16 up to 1024 (block_size), got"
    return [
        row("w_uk.size(0) must be at least 1 (N1), got 0", **no_heads),
        row("w_idx_proj.size(1) must be at least 1 (index heads), got 0", **no_index_heads),
        row(f"w_uk.size(2) {of_16} 24", **L),
        row(f"kr_cache.size(3) {of_16} 8", **R),
        row(f"w_idx_k.size(1) {of_16} 24", w_idx_qb=w_idx_qb[:, :96], **D),
        row(f"{above}got 48", **R_48),
        row("kv_cache.size(2) must be 1 (N2: one key head), got 2", **two_heads),
        row(f"{block} 8", **each(call, CACHES, lambda x: x[:, :8])),
        row(f"{block} 0", **each(call, CACHES, lambda x: x[:, :0])),
        row(f"{block} 1040", **each(call, CACHES, lambda x: x.repeat(1, 65, 1, 1))),
    ]


def rejected_dtypes(row: Callable, call: dict) -> list:
    floating = [name for name in tensors(call) if call[name].is_floating_point()]
    expected = dict.fromkeys(floating, "float32 (dtype of x)") | dict(
        x="bfloat16, float16 or float32",
        cache_index="int32 or int64 (flat slots of the caches)",
        block_table="int32 (block ids)",
        act_seqs="int32 (keys of each sequence)",
    )

    def of(name: str, dtype: torch.dtype):
        got = str(dtype).removeprefix("torch.")
        message = f"{name}.dtype must be {expected[name]}, got {got}"
        return row(message, **{name: call[name].to(dtype)})

    half = call | each(call, [name for name in floating if name not in ("sin", "cos")], Tensor.half)
    return [
        *(of(name, torch.float64) for name in expected),
        *(of(name, torch.bfloat16) for name in floating if name != "x"),
        of("block_table", torch.int64),
        of("act_seqs", torch.int64),
        of("cache_index", torch.int16),
        row("w_dq.dtype must be bfloat16 (dtype of x), got float32", x=call["x"].bfloat16()),
        *(
            row(
                f"{name}.dtype must be float16 (dtype of x) or float32, got float64",
                half,
                **{name: call[name].double()},
            )
            for name in ("sin", "cos")
        ),
    ]


def unsupported_on_npu() -> list:
    x = on_npu([1], [20, 5])
    row = table("npu_sparse_attention_pto", x)
    width = "w_dq.size(1) must be a positive multiple of 16 on an NPU, got 24"
    return [
        row("w_idx_k.size(1) must be 128 on an NPU, got 64", on_npu([1], [20], index_dim=64)),
        row(width, on_npu([1], [20, 5], q_rank=24)),
        *(
            row(
                f"{name} must be contiguous on an NPU, got strides",
                **{name: in_a_wider_row(x[name])},
            )
            for name in ("kv_cache", "kr_cache")
        ),
    ]


def graph_calls() -> dict[str, list[dict]]:
    half = dict(dtype=torch.float16)
    angles = on_npu([1], [20, 5], **half, softmax_scale=0.25, eps=1e-5, sparse_count=16)
    others = dict(hidden=48, rope=32, softmax_scale=0.4, eps=0.5, sparse_count=4)
    return {
        "one": [on_npu([1], [20, 5])],
        "sizes": [on_npu([2], [20, 5]), on_npu([3], [50, 2, 9], block_size=32, seed=1)],
        "angles-of-float32": [of_angles_and_slots(angles)],
        "int64-sizes": [
            not_default(),
            of_angles_and_slots(on_npu([3], [9, 40, 3], **half, **others)),
        ],
    }
