"""Arguments of ``weight_only_linear``: rows of x for query tokens, rows of the weight for keys."""

from collections.abc import Callable

import torch
from torch import Tensor

from custom_pypto.weight_formats import WEIGHT_FORMATS

from . import INT_MAX, INT_MIN, random
from .hostile import Maker
from .rejections import none, table

OP = "weight_only_linear"
WEIGHT = 4


def inputs(
    lengths_query: list[int],
    lengths_key: list[int],
    *,
    kind: str = "int8",
    dim: int = 96,
    experts: int = 7,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> dict:
    """``experts``: their number, three for each row of x, some of which do not exist; or 0."""
    g = torch.Generator().manual_seed(seed)
    tokens, rows = sum(lengths_query), max(lengths_key)
    shape = (experts, rows, dim) if experts else (rows, dim)
    weight, scales = WEIGHT_FORMATS[kind].quantize(torch.randn(shape, generator=g))
    ids = None
    if experts:
        ids = torch.randint(experts, (tokens, 3), generator=g)
        hostile = torch.tensor([INT_MIN, -1, experts, INT_MAX, -(2**63), 2**63 - 1])
        wild = torch.rand(ids.shape, generator=g) < 0.2
        ids[wild] = hostile[torch.randint(len(hostile), (int(wild.sum()),), generator=g)]
    return dict(x=random((tokens, dim), dtype, g), weight=weight, scales=scales, experts=ids)


def not_default() -> dict:
    return inputs([2, 3], [40], kind="int4", dtype=torch.float16) | dict(block_size=64)


def of_bytes(m: Maker, low: int, high: int, dtype: torch.dtype) -> Callable[[int], Tensor]:
    """Makes n values of bytes from ``low`` to ``high``."""

    def fill(n: int) -> Tensor:
        values = torch.randint(low, high + 1, (n,), generator=m.generator)
        return values.to(torch.uint8).view(dtype)

    return fill


def code_fill(m: Maker, dtype: torch.dtype) -> Callable[[int], Tensor]:
    if dtype == torch.bfloat16:
        return m.floats(dtype)
    return m.bytes() if dtype == torch.int8 else of_bytes(m, 0, 255, dtype)


def scale_fill(m: Maker, dtype: torch.dtype) -> Callable[[int], Tensor]:
    if dtype != torch.float8_e8m0fnu:
        return m.floats(dtype)
    # up to 2**13: whether products with 2**127 are infinite depends on their order
    values = of_bytes(m, m.rng.choice([0, 110, 110, 110]), 140, dtype)
    if m.values == "special" and m.rng.random() < 0.3:
        values = of_bytes(m, 255, 255, dtype)
    return values


def stored(m: Maker, lead: tuple, rows: int, dim: int, block_size: int) -> dict:
    """A weight of any values in any format, with any strides that the format may have."""
    kind, rng = m.rng.choice([*WEIGHT_FORMATS]), m.rng
    form = WEIGHT_FORMATS[kind]
    codes = code_fill(m, form.dtype)
    if kind == "bfloat16" and rng.random() < 0.4:  # a column is contiguous
        return dict(weight=m.rows(*lead, dim, rows, fill=codes).mT, scales=None)
    weight = m.rows(*lead, *form.shape([rows, dim]), fill=codes)
    if form.scale_dtype is None:
        return dict(weight=weight, scales=None)
    shape: list[int] = [rows]
    if form.block:  # the call has another size
        shape = [-(-rows // block_size), -(-dim // block_size)]
    elif form.zeros:  # any number of groups
        group = 32 * rng.choice([n for n in range(1, dim // 32 + 1) if dim // 32 % n == 0])
        shape = [rows, dim // group, 2]
    elif form.groups:
        shape = form.scale_shape([rows, dim])
    scales = m.tensor((*lead, *shape), scale_fill(m, form.scale_dtype))
    return dict(weight=weight, scales=scales)


def random_call(m: Maker) -> dict:
    rng = m.rng
    dim = 32 * rng.choice([1, 1, 2, 2, 3, 4, 5, 8, 10])
    rows = rng.choice([0, 1, 2, 3, 7, 15, 16, 17, 33, 65, 130])
    block_size = rng.choice([32, 64, 96, 128, 128, 128, 1024])
    tokens = [rng.choice([0, 1, 1, 2, 3, 5, 17, 40])][: rng.choice([0, 1, 1, 1])]
    tokens = [*tokens, *[rng.choice([0, 1, 1, 2, 3])][: rng.choice([0, 0, 1])]]
    call = dict(x=None, experts=None, block_size=block_size)
    lead: tuple = ()
    if rng.random() < 0.5:
        lead = (rng.choice([0, 1, 2, 3, 5]),)
        shape = (*tokens, rng.choice([0, 1, 2, 3, 6]))
        dtype = rng.choice([torch.int32, torch.int64])
        call["experts"] = m.tensor(shape, m.ints(-1 if lead == (0,) else 0, lead[0] - 1, dtype))
        if rng.random() < 0.5:
            tokens = [*shape]
    call["x"] = m.tensor((*tokens, dim))
    call |= stored(m, lead, rows, dim, block_size)
    if call["weight"].dtype in (torch.int8, torch.uint8):
        call["int8_x"] = rng.random() < 0.5
    return call


def rejected() -> list:
    call, plain = inputs([3], [40]), inputs([3], [40], experts=0)
    row = table(OP, call)
    x, weight, scales, experts = (call[n] for n in ("x", "weight", "scales", "experts"))
    known = (
        "weight.dtype and scales.dtype must be bfloat16 and None, int8 and float32, float8_e4m3fn "
        "and float32, uint8 and bfloat16, uint8 and float8_e8m0fnu, got"
    )
    depth = "x.size(-1) must be a positive multiple of 32 up to 2**30 (K), got"
    block = "block_size must be a multiple of 32 up to 1024, got"
    floating = "x.dtype must be bfloat16, float16 or float32, got"
    ids = "experts must be of shape [.., k] for x of shape [.., K] or [.., k, K], got"
    return [
        row(f"{floating} float64", x=x.double()),
        row(f"{floating} int8", x=x.to(torch.int8)),
        row("x must be of shape [.., K], got []", x=x[0, 0]),
        row("weight must be of shape [N, K] (without experts), got [7, 40, 96]", experts=None),
        row("weight must be of shape [E, N, K] (with experts), got [40, 96]", weight=weight[0]),
        row(f"{known} int8 and None", scales=None),
        row(f"{known} bfloat16 and float32", weight=weight.bfloat16()),
        row(f"{known} float16 and None", plain, weight=plain["x"].half(), scales=None),
        row(f"{known} int8 and float16", scales=scales.half()),
        *(row(f"{depth} {n}", x=x.new_zeros(3, n)) for n in (0, 16, 100)),
        row("weight.size(-1) must be 96 (K of x), got 64", weight=weight[..., :64]),
        *(
            row(f"{block} {n}", block_size=n)
            for n in (0, -32, 48, 1056, 2**32 + 128, -(2**63), 2**63 - 1)
        ),
        row(
            "weight.stride(-1) must be 1 (contiguous last dim), got 2; call .contiguous()",
            weight=weight.repeat_interleave(2, -1)[..., ::2],
        ),
        *rejected_scales(),
        row("experts.dtype must be int32 or int64, got int16", experts=experts.short()),
        row(f"{ids} [3, 3, 1]", experts=experts[..., None]),
        row(f"{ids} []", experts=experts[0, 0]),
        row("experts.size(0) must be 3 (as x), got 2", experts=experts[:2]),
        row("experts.size(1) must be 2 (as x), got 3", x=x[:, None].repeat(1, 2, 1)),
        *none(row, call, ["scales", "experts"]),
    ]


def rejected_scales() -> list:
    """Shapes of the scales, and strides, in each format."""
    found = []
    for kind, shape, dim, right, wrong in (
        ("int8", "[E, N] for weight in int8", 1, "40 (N of weight)", 39),
        (
            "fp8",
            "[E, N / block_size, K / block_size] for weight in float8_e4m3fn",
            2,
            "1 (blocks of weight, the last one may be shorter)",
            2,
        ),
        (
            "fp4",
            "[E, N, K / 32] for weight in uint8",
            2,
            "3 (of weight: a scale for 32 values)",
            4,
        ),
        ("int4", "[E, N, K / G, 2] for weight in uint8", -1, "2 (scale and zero)", 1),
    ):
        call = inputs([3], [40], kind=kind)
        row, scales = table(OP, call), call["scales"]
        sizes = [*scales.shape]
        sizes[dim] = wrong
        of_other_size = torch.ones(sizes).to(scales.dtype)
        rank = f"scales must be of shape {shape}, got {[*scales.shape[1:]]}"
        found += [
            row(rank, scales=scales[0]),
            row(f"scales.size({dim}) must be {right}, got {wrong}", scales=of_other_size),
            row("scales.size(0) must be 7 (E of weight), got 6", scales=scales[:6]),
        ]
    call = inputs([3], [40], kind="int4")
    row, scales = table(OP, call), call["scales"]
    pairs = "weight.size(-1) must be 48 (K / 2, two values per byte), got 47"
    groups = "scales.size(-2) must be K / G, for a G that is a multiple of 32, got"
    found += [
        row(pairs, weight=call["weight"][..., :47]),
        row("scales.size(1) must be 40 (N of weight), got 39", scales=scales[:, :39]),
        *(row(f"{groups} {n}", scales=scales.new_ones(7, 40, n, 2)) for n in (0, 2, 5, 6, 96)),
    ]
    blocks = inputs([3], [40], kind="fp8", experts=0)
    row, weight = table(OP, blocks), blocks["weight"]
    needs = "scales.size(0) must be 2 (blocks of weight, the last one may be shorter), got 1"
    strides = "weight.stride(-1) must be 1 (contiguous last dim), got 40; call .contiguous()"
    found += [row(needs, block_size=32), row(strides, weight=weight.T.contiguous().T)]
    values = inputs([3], [40], kind="bfloat16", experts=0)
    row = table(OP, values)
    gaps = values["weight"].repeat_interleave(2, -1)[..., ::2]
    words = "weight.stride(-1) or weight.stride(-2) must be 1, got 2 and 192; call .contiguous()"
    return [*found, row(words, weight=gaps)]
