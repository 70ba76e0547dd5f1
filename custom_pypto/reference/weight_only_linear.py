from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from .checks import ROUNDING

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float32, device="cpu")


def weight_only_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None = None,
    *,
    experts: Tensor | None = None,
    block_size: int = 128,
) -> Tensor:
    matrix = dequantized(weight, scales, block_size).double()
    if experts is None:
        return (x.double() @ matrix.mT).to(x.dtype)
    rows = x.double()
    if experts.dim() == x.dim():
        rows = rows.unsqueeze(-2).expand(*experts.shape, x.size(-1))
    exists = (experts >= 0) & (experts < len(matrix))
    out = x.new_zeros(*experts.shape, matrix.size(-2))
    for expert in experts[exists].unique().tolist():
        its = experts == expert
        out[its] = (rows[its] @ matrix[expert].T).to(x.dtype)
    return out


def dequantized(weight: Tensor, scales: Tensor | None, block_size: int = 128) -> Tensor:
    """The values of a weight in float32."""
    if scales is None:
        return weight.float()
    if weight.dtype == torch.int8:
        return weight.float() * scales[..., None]
    if weight.dtype == torch.float8_e4m3fn:
        *_, rows, columns = weight.shape
        of_values = scales.repeat_interleave(block_size, -2)[..., :rows, :]
        of_values = of_values.repeat_interleave(block_size, -1)[..., :columns]
        # 0x7F and 0xFF are not NaN here
        top = torch.full_like(of_values, 480).copysign(weight.float())
        values = weight.float()
        return torch.where(values.isnan(), top, values) * of_values
    nibbles = torch.stack([weight & 15, weight >> 4], -1).flatten(-2)
    if scales.dtype == torch.bfloat16:
        scale, zero = (
            scales.float().repeat_interleave(nibbles.size(-1) // scales.size(-2), -2).unbind(-1)
        )
        return (nibbles.float() - 8) * scale + zero
    values = embedding(nibbles.int(), torch.cat([E2M1, -E2M1])[:, None]).squeeze(-1)
    return values * scales.float().repeat_interleave(32, -1)


def quantized(matrix: Tensor, kind: str) -> tuple[Tensor, Tensor | None]:
    """``[.., N, K]`` float32 in a stored format; its values need not be the nearest."""
    *lead, rows, columns = matrix.shape
    if kind == "bfloat16":
        return matrix.bfloat16(), None
    if kind == "int8":
        scales = matrix.abs().amax(-1) / 127
        return (matrix / scales[..., None]).round().to(torch.int8), scales
    if kind == "fp8":
        height, width = -rows % 128, -columns % 128
        blocks = (
            pad(matrix, (0, width, 0, height)).unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128))
        )
        scales = blocks.abs().amax((-1, -3)) / 448
        of_values = scales.repeat_interleave(128, -2)[..., :rows, :]
        of_values = of_values.repeat_interleave(128, -1)[..., :columns]
        return (matrix / of_values).to(torch.float8_e4m3fn), scales
    if kind == "fp4":
        groups = matrix.unflatten(-1, (-1, 32))
        exponents = torch.frexp(groups.abs().amax(-1) / 6)[1]
        scaled = groups / torch.exp2(exponents.float())[..., None]
        nearest = (scaled[..., None].abs() - E2M1).abs().argmin(-1) + 8 * (scaled < 0)
        scales = (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
        return in_pairs(nearest.flatten(-2)), scales
    if kind != "int4":
        raise ValueError(f"kind must be one of {', '.join(FORMATS)}, got {kind!r}")
    groups = matrix.unflatten(-1, (-1, 64 if columns % 64 == 0 else 32))
    low, high = groups.aminmax(dim=-1)
    scale = ((high - low) / 15).bfloat16()
    zero = (low + 8 * scale.float()).bfloat16()
    steps = (groups - zero.float()[..., None]) / scale.float()[..., None] + 8
    return in_pairs(steps.round().clamp(0, 15).flatten(-2)), torch.stack([scale, zero], -1)


def in_pairs(values: Tensor) -> Tensor:
    """Two values of 4 bits per byte, the first in the low bits."""
    first, second = values.to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return first | second << 4


FORMATS = ("bfloat16", "int8", "fp8", "int4", "fp4")


def checks(dtypes: list[torch.dtype]) -> Iterator[tuple]:
    g = torch.Generator().manual_seed(6)
    for dtype in dtypes:
        for kind in FORMATS:
            for rows, columns, tokens in ((300, 256, 1), (200, 384, 5), (70, 96, 40)):
                weight, scales = quantized(torch.randn(rows, columns, generator=g), kind)
                x = torch.randn(tokens, columns, generator=g).to(dtype)
                shape = f"{kind} [{rows}, {columns}], {tokens} rows"
                yield dtype, shape, dict(x=x, weight=weight, scales=scales)
            weight, scales = quantized(torch.randn(6, 64, 128, generator=g), kind)
            experts = torch.randint(-1, 7, (20, 3), generator=g)
            x = torch.randn(20, 128, generator=g).to(dtype)
            arguments = dict(x=x, weight=weight, scales=scales, experts=experts)
            yield dtype, f"{kind} [6, 64, 128], 20 rows, 3 experts of 6", arguments


def step_of_operands(call: dict) -> float:
    """How far the rounding of operands may move a product, relative to the product of the norms."""
    x, weight, scales, experts = (call.get(name) for name in ("x", "weight", "scales", "experts"))
    if scales is None:
        return 0.0
    rows = x.numel() // x.size(-1) if experts is None else experts.numel()
    if x.dtype == torch.bfloat16 and rows > 6:
        return 2**-9  # a CPU with instructions for bfloat16 rounds the weight to it
    many = x.dtype == torch.float16 and rows > 16
    exact = x.dtype == torch.float32 and rows > 16 and experts is None
    int8 = weight.dtype == torch.int8
    if weight.dtype == torch.uint8 or (int8 and not exact):
        # values of x that share a scale are within half a step of 1 / 32601 of the largest one
        return (256 if many or int8 else 128) ** 0.5 / (2 * 32601)
    return 0.0


def error(got: Tensor, expected: Tensor, mine: dict, theirs: dict) -> tuple[float, float]:
    """In units of what is allowed, by the norms of the row of x and of the weight's row; infinite
    where only one of the two is finite."""
    x, experts = theirs["x"].double(), theirs.get("experts")
    weight, scales = theirs["weight"], theirs.get("scales")
    matrix = dequantized(weight, scales, theirs.get("block_size", 128)).double()
    parts = matrix.abs()
    if scales is not None and scales.dtype == torch.bfloat16:  # 4 bits and zero, which may cancel
        of_group = scales.double().abs()
        of_group = 16 * of_group[..., 0] + of_group[..., 1]
        parts = of_group.repeat_interleave(matrix.size(-1) // scales.size(-2), -1)
    step = step_of_operands(theirs)
    # float32 sums of some thousand products in another order
    allowed = step * matrix.norm(dim=-1) + 2**-18 * parts.norm(dim=-1)
    # sums of values that count as 0: of products, and of x below 1e-30 where it is rounded
    least = x.size(-1) * (2**-126 + (1e-30 if step else 0.0) * parts.amax(-1))
    if experts is not None:
        exists = (experts >= 0) & (experts < len(matrix))
        x = torch.where(exists[..., None], x[..., None, :] if experts.dim() == x.dim() else x, 0)
        chosen = torch.where(exists, experts, len(matrix)).long()  # then nothing is allowed
        allowed, least = (pad(y, (0, 0, 0, 1))[chosen] for y in (allowed, least))
    norm, limits = x.norm(dim=-1, keepdim=True), torch.finfo(expected.dtype)
    finite = norm.isfinite() & allowed.isfinite()
    one, other = got.double(), expected.double()
    # a sum near the largest number may be that or infinite
    difference = one.clamp(limits.min, limits.max) - other.clamp(limits.min, limits.max)
    allowed = norm * allowed + least + ROUNDING[expected.dtype] * other.abs()
    relative = difference.abs() / (allowed + limits.tiny * limits.eps)
    invisible = torch.where(one.isfinite() | other.isfinite(), torch.inf, 0.0)
    worst = torch.where(finite, relative.nan_to_num(nan=torch.inf), invisible)
    return float(worst.amax()), 1.0
