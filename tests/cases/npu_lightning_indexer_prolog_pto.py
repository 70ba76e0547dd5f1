"""Arguments of ``npu_lightning_indexer_prolog_pto``."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from custom_pypto.reference.npu_quant_rows_pto import hadamard_matrix

from . import in_a_wider_row, random
from .hostile import BLOCK_SIZES, Maker
from .npu_sparse_attention_pto import grown
from .rejections import none, table, transposed

OP = "npu_lightning_indexer_prolog_pto"
CACHES = ("idx_k_cache", "idx_k_scale_cache")
SCALES = ("q_norm_scale", "wq_b_scale")
WEIGHT = 3


def inputs(
    lengths_query: list[int],
    lengths_key: list[int],
    *,
    hidden: int = 48,
    q_rank: int = 24,
    heads: int = 4,
    dim: int = 32,
    rope: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    w8a8: bool = False,
    slot_dtype: torch.dtype = torch.int32,
    strided: bool = False,
    seed: int = 0,
) -> dict:
    """New tokens of sequences, one after the other, for a cache with room for all keys; the last
    token of each sequence of several is padding. ``w8a8``: any bytes."""
    g = torch.Generator().manual_seed(seed)
    tokens, blocks = sum(lengths_query), sum(-(-n // block_size) for n in lengths_key) + 1

    def normal(*shape: int) -> Tensor:
        return random(shape, dtype, g)

    def weight(inputs: int, outputs: int) -> Tensor:
        return (torch.randn(inputs, outputs, generator=g) * inputs**-0.5).to(dtype)

    def int8(*shape: int) -> Tensor:
        return torch.randint(-128, 128, shape, generator=g).to(torch.int8)

    slots = torch.randperm(blocks * block_size, generator=g)[:tokens]
    for end, n in zip(torch.tensor(lengths_query).cumsum(0), lengths_query, strict=True):
        slots[end - 1 : end if n > 1 else end - 1] = -1
    position = torch.arange(100, 100 + tokens)
    angle = position[:, None] * 10000.0 ** (-torch.arange(0, rope, 2) / rope)
    angle = angle.repeat(1, 2)
    cache = int8(blocks, block_size, 1, dim)
    scale_cache = torch.full((blocks, block_size, 1), torch.nan, dtype=torch.float16)
    if strided:
        cache, scale_cache = in_a_wider_row(cache), in_a_wider_row(scale_cache)
    q_norm, wq_b = normal(tokens, q_rank), weight(q_rank, heads * dim)
    if w8a8:
        q_norm, wq_b = int8(tokens, q_rank), int8(q_rank, heads * dim)
    return dict(
        token_x=normal(tokens, hidden),
        q_norm=q_norm,
        q_norm_scale=torch.rand(tokens, generator=g) / 64 if w8a8 else None,
        wq_b=wq_b,
        wq_b_scale=torch.rand(heads * dim, generator=g) / 64 if w8a8 else None,
        wk=weight(hidden, dim),
        weights_proj=weight(hidden, heads),
        ln_gamma_k=1 + normal(dim) / 8,
        ln_beta_k=normal(dim) / 8,
        cos_idx_rope=angle.cos().to(dtype),
        sin_idx_rope=angle.sin().to(dtype),
        hadamard_q=hadamard_matrix(dim).to(dtype),
        hadamard_k=hadamard_matrix(dim).to(dtype),
        idx_k_cache=cache,
        idx_k_scale_cache=scale_cache,
        idx_k_cache_index=slots.to(slot_dtype),
        layernorm_epsilon_k=1e-6,
    )


def as_the_recipe_passes_them(x: dict) -> dict:
    """Scales and their cache with a last dim of 1, angles in float32."""
    names = ("idx_k_scale_cache", *(name for name in SCALES if x[name] is not None))
    angles = {name: x[name].float() for name in ("cos_idx_rope", "sin_idx_rope")}
    return x | angles | {name: x[name].unsqueeze(-1) for name in names}


on_npu = functools.partial(inputs, hidden=64, q_rank=32, dim=128, dtype=torch.bfloat16)


def not_default() -> dict:
    more = dict(dtype=torch.float16, w8a8=True, slot_dtype=torch.int64)
    x = on_npu([2, 3], [12, 20], **more)
    # another orthogonal matrix than that of the queries
    x["hadamard_k"] = x["hadamard_k"].flip(0)
    return as_the_recipe_passes_them(x) | dict(layernorm_epsilon_k=0.5)


def random_call(m: Maker) -> dict:
    rng = m.rng
    T, H, Q = rng.choice([0, 1, 2, 3, 7]), rng.choice([0, 1, 16, 40]), rng.choice([0, 3, 16, 24])
    heads, D = rng.choice([1, 2, 3, 17]), rng.choice([16, 32, 48, 128])
    R = rng.choice([16, min(32, D)])
    block_size, blocks = rng.choice(BLOCK_SIZES), rng.choice([0, 1, 2, 3])
    slot_dtype = rng.choice([torch.int32, torch.int64])
    w8a8, one = rng.random() < 0.5, rng.choice([(), (1,)])
    latent = m.bytes() if w8a8 else m.floats()
    scales = m.floats(torch.float32)
    angles = m.floats(rng.choice([m.dtype, torch.float32]))
    return dict(
        token_x=m.tensor((T, H)),
        q_norm=m.tensor((T, Q), latent),
        q_norm_scale=m.tensor((T, *one), scales) if w8a8 else None,
        wq_b=m.tensor((Q, heads * D), latent),
        wq_b_scale=m.tensor((heads * D, *one), scales) if w8a8 else None,
        wk=m.tensor((H, D)),
        weights_proj=m.tensor((H, heads)),
        ln_gamma_k=m.tensor((D,)),
        ln_beta_k=m.tensor((D,)),
        cos_idx_rope=m.tensor((T, R), angles),
        sin_idx_rope=m.tensor((T, R), angles),
        hadamard_q=m.tensor((D, D)),
        hadamard_k=m.tensor((D, D)),
        idx_k_cache=m.rows(blocks, block_size, 1, D, fill=m.bytes()),
        idx_k_scale_cache=m.tensor((blocks, block_size, 1, *one), m.floats(torch.float16)),
        idx_k_cache_index=m.tensor((T,), m.ints(-1, blocks * block_size, slot_dtype)),
        layernorm_epsilon_k=rng.choice([1e-6, 0.0, 1.0]),
    )


# the shape of each tensor, in the contract's letters
SHAPES = {
    "token_x": "[T, H]",
    "q_norm": "[T, Q]",
    "wq_b": "[Q, N1 * D]",
    "wk": "[H, D]",
    "weights_proj": "[H, N1]",
    "ln_gamma_k": "[D]",
    "ln_beta_k": "[D]",
    "cos_idx_rope": "[T, R]",
    "sin_idx_rope": "[T, R]",
    "hadamard_q": "[D, D]",
    "hadamard_k": "[D, D]",
    "idx_k_cache": "[blocks, block_size, 1, D]",
    "idx_k_cache_index": "[T]",
}
COLUMNS = "N1 of weights_proj * D of wk"
# a tensor with 16 more in a dim, and the error: later tensors are compared with earlier ones
GROWN = [
    ("token_x", 0, "q_norm.size(0) must be 21 (T of token_x), got 5"),
    ("token_x", 1, "wk.size(0) must be 64 (H of token_x), got 48"),
    ("q_norm", 0, "q_norm.size(0) must be 5 (T of token_x), got 21"),
    ("q_norm", 1, "wq_b.size(0) must be 40 (Q of q_norm), got 24"),
    ("wq_b", 0, "wq_b.size(0) must be 24 (Q of q_norm), got 40"),
    ("wq_b", 1, f"wq_b.size(1) must be 128 ({COLUMNS}), got 144"),
    ("wk", 0, "wk.size(0) must be 48 (H of token_x), got 64"),
    ("wk", 1, f"wq_b.size(1) must be 192 ({COLUMNS}), got 128"),
    ("weights_proj", 0, "weights_proj.size(0) must be 48 (H of token_x), got 64"),
    ("weights_proj", 1, f"wq_b.size(1) must be 640 ({COLUMNS}), got 128"),
    ("ln_gamma_k", 0, "ln_gamma_k.size(0) must be 32 (D of wk), got 48"),
    ("ln_beta_k", 0, "ln_beta_k.size(0) must be 32 (D of wk), got 48"),
    ("cos_idx_rope", 0, "cos_idx_rope.size(0) must be 5 (T of token_x), got 21"),
    ("cos_idx_rope", 1, "sin_idx_rope.size(1) must be 32 (R of cos_idx_rope), got 16"),
    ("sin_idx_rope", 0, "sin_idx_rope.size(0) must be 5 (T of token_x), got 21"),
    ("sin_idx_rope", 1, "sin_idx_rope.size(1) must be 16 (R of cos_idx_rope), got 32"),
    *(
        (f"hadamard_{x}", dim, f"hadamard_{x}.size({dim}) must be 32 (D of wk), got 48")
        for x in "qk"
        for dim in (0, 1)
    ),
    ("idx_k_cache", 0, "idx_k_scale_cache.size(0) must be 23 (blocks of idx_k_cache), got 7"),
    ("idx_k_cache", 1, "idx_k_scale_cache.size(1) must be 32 (block_size of idx_k_cache), got 16"),
    ("idx_k_cache", 2, "idx_k_cache.size(2) must be 1 (N2: one key head), got 17"),
    ("idx_k_cache", 3, "idx_k_cache.size(3) must be 32 (D of wk), got 48"),
    ("idx_k_scale_cache", 0, "idx_k_scale_cache.size(0) must be 7 (blocks of idx_k_cache), got 23"),
    (
        "idx_k_scale_cache",
        1,
        "idx_k_scale_cache.size(1) must be 16 (block_size of idx_k_cache), got 32",
    ),
    ("idx_k_scale_cache", 2, "idx_k_scale_cache.size(2) must be 1 (N2: one key head), got 17"),
    ("idx_k_cache_index", 0, "idx_k_cache_index.size(0) must be 5 (T of token_x), got 21"),
]


def rejected() -> list:
    call = inputs([3, 2], [40, 33])
    row = table(OP, call)
    cache, scales = call["idx_k_cache"], call["idx_k_scale_cache"]
    stride = "idx_k_cache.stride(-1) must be 1 (contiguous last dim), got 16; call .contiguous()"
    of_16 = "must be a multiple of 16 up to 1024"
    return [
        *rejected_dtypes(row, call),
        *rejected_scales(row, call),
        *none(row, call),
        *(row(error, **{x: grown(call[x], dim)}) for x, dim, error in GROWN),
        *(
            row(
                f"{name} must be of shape {shape}, got {[1, *call[name].shape]}",
                **{name: call[name].unsqueeze(0)},
            )
            for name, shape in SHAPES.items()
        ),
        row(
            "idx_k_scale_cache must be of shape [blocks, block_size, 1], got [7, 16]",
            idx_k_scale_cache=scales[..., 0],
        ),
        row(
            "idx_k_scale_cache.size(3) must be 1 (one scale per row), got 2",
            idx_k_scale_cache=scales[..., None].repeat(1, 1, 1, 2),
        ),
        row(stride, idx_k_cache=transposed(cache)),
        row(f"wk.size(1) {of_16} (D), got 24", wk=call["wk"][:, :24]),
        row(
            f"idx_k_cache.size(1) {of_16} (block_size), got 24",
            idx_k_cache=cache.new_zeros(5, 24, 1, 32),
        ),
        row(
            "weights_proj.size(1) must be at least 1 (N1), got 0",
            weights_proj=call["weights_proj"][:, :0],
        ),
        row(
            "cos_idx_rope.size(1) must be a positive multiple of 16, got 8",
            cos_idx_rope=call["cos_idx_rope"][:, :8],
        ),
        row(
            "cos_idx_rope.size(1) must be at most 32 (the first R of D dims are rotated), got 48",
            **{name: torch.zeros(5, 48) for name in ("cos_idx_rope", "sin_idx_rope")},
        ),
        row("layout_query must be 'TND', got 'BSND'", layout_query="BSND"),
        row("layout_key must be 'PA_BSND', got 'TND'", layout_key="TND"),
        *(
            row(
                f"layernorm_epsilon_k must be finite and at least 0, got {x:g}",
                layernorm_epsilon_k=x,
            )
            for x in (-1.0, torch.inf, torch.nan)
        ),
    ]


def rejected_dtypes(row: Callable, call: dict) -> list:
    expected = {
        "token_x": "bfloat16, float16 or float32",
        "q_norm": "float32 or int8 (dtype of token_x, W8A8)",
        "wq_b": "float32 (dtype of q_norm)",
        **dict.fromkeys(
            ("wk", "weights_proj", "ln_gamma_k", "ln_beta_k", "hadamard_q", "hadamard_k"),
            "float32 (dtype of token_x)",
        ),
        **dict.fromkeys(("cos_idx_rope", "sin_idx_rope"), "float32 (dtype of token_x)"),
        "idx_k_scale_cache": "float16",
        "idx_k_cache_index": "int32 or int64 (flat slots of the caches)",
    }
    int8 = inputs([3, 2], [40, 33], w8a8=True)
    return [
        *(
            row(f"{name}.dtype must be {wanted}, got float64", **{name: wrong})
            for name, wanted in expected.items()
            for wrong in [call[name].double()]
        ),
        row("wq_b.dtype must be int8 (dtype of q_norm), got float32", int8, wq_b=call["wq_b"]),
        row(
            "idx_k_cache.dtype must be int8, got bfloat16; npu_sparse_attention_pto takes it",
            idx_k_cache=call["idx_k_cache"].bfloat16(),
        ),
        row(
            "idx_k_cache.dtype must be int8, got uint8; only Ascend 950 multiplies 8-bit floats, "
            "this op does not",
            idx_k_cache=call["idx_k_cache"].view(torch.uint8),
        ),
    ]


def rejected_scales(row: Callable, call: dict) -> list:
    int8 = inputs([3, 2], [40, 33], w8a8=True)
    shapes = {"q_norm_scale": "[T] or [T, 1]", "wq_b_scale": "[N1 * D] or [N1 * D, 1]"}
    sizes = {"q_norm_scale": "5 (T of token_x)", "wq_b_scale": f"128 ({COLUMNS})"}
    many = torch.zeros(5, 2**17, dtype=torch.int8)
    return [
        row(
            "q_norm.size(1) must be at most 131071 (int32 holds the sums), got 131072",
            int8,
            q_norm=many,
            wq_b=torch.zeros(2**17, 128, dtype=torch.int8),
        ),
        *(
            case
            for name, shape in shapes.items()
            for case in (
                row(f"{name} must be a tensor (q_norm is int8), got None", int8, **{name: None}),
                row(
                    f"{name} must be None (q_norm is float32), got a tensor; quantize q_norm and "
                    "wq_b to int8, or omit both scales",
                    **{name: int8[name]},
                ),
                row(
                    f"{name} must be of shape {shape}, got {[1, 1, *int8[name].shape]}",
                    int8,
                    **{name: int8[name][None, None]},
                ),
                row(f"{name}.size(0) must be {sizes[name]}, got 1", int8, **{name: int8[name][:1]}),
                row(
                    f"{name}.size(1) must be 1 (one scale per row), got 2",
                    int8,
                    **{name: int8[name][:, None].repeat(1, 2)},
                ),
                row(
                    f"{name}.dtype must be float32, got float16", int8, **{name: int8[name].half()}
                ),
            )
        ),
    ]


def unsupported_on_npu() -> list:
    row = table(OP, on_npu([2, 2], [20, 5]))
    rank = "q_norm.size(1) must be a positive multiple of 32 on an NPU, got 48"
    heads = "weights_proj.size(1) must be at most 64 on an NPU, got 65"
    strides = "idx_k_cache must be contiguous on an NPU, got strides"
    return [
        row(rank, on_npu([2, 2], [20, 5], q_rank=48, w8a8=True)),
        row(heads, on_npu([2, 2], [20, 5], heads=65)),
        row(strides, on_npu([2, 2], [20, 5], strided=True)),
    ]


def graph_calls() -> dict[str, list[dict]]:
    return {
        "sizes": [
            on_npu([2, 1], [20, 5], w8a8=True),
            on_npu([3, 1, 1], [50, 4, 8], w8a8=True, block_size=32, seed=1),
        ],
        "no-scales": [on_npu([2, 1], [20, 5], dtype=torch.float16)],
    }
