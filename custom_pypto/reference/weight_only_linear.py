from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from .checks import ROUNDING

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def weight_only_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None = None,
    *,
    experts: Tensor | None = None,
    block_size: int = 128,
) -> Tensor:
    matrix = dequantised(weight, scales, block_size).double()
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


def dequantised(weight: Tensor, scales: Tensor | None, block_size: int = 128) -> Tensor:
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


def quantised(matrix: Tensor, kind: str) -> tuple[Tensor, Tensor | None]:
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
                weight, scales = quantised(torch.randn(rows, columns, generator=g), kind)
                x = torch.randn(tokens, columns, generator=g).to(dtype)
                shape = f"{kind} [{rows}, {columns}], {tokens} rows"
                yield dtype, shape, dict(x=x, weight=weight, scales=scales)
            weight, scales = quantised(torch.randn(6, 64, 128, generator=g), kind)
            experts = torch.randint(-1, 7, (20, 3), generator=g)
            x = torch.randn(20, 128, generator=g).to(dtype)
            arguments = dict(x=x, weight=weight, scales=scales, experts=experts)
            yield dtype, f"{kind} [6, 64, 128], 20 rows, 3 experts of 6", arguments


def error(got: Tensor, expected: Tensor, mine: dict, theirs: dict) -> tuple[float, float]:
    """Relative to the product of the norms of the row and of the weight's row."""
    matrix = dequantised(theirs["weight"], theirs["scales"], theirs.get("block_size", 128)).double()
    x, experts = theirs["x"].double(), theirs.get("experts")
    norm = x.norm(dim=-1)
    if experts is not None:
        norm = norm[..., None] if experts.dim() == x.dim() else norm
        matrix = matrix[experts.clamp(0, len(matrix) - 1)]
    norms = norm[..., None] * matrix.norm(dim=-1)
    difference = (got.double() - expected.double()).abs().nan_to_num(nan=torch.inf)
    relative = difference / norms.clamp(min=torch.finfo(torch.float32).tiny)
    bound = ROUNDING[x.dtype] if (x := theirs["x"]).dtype != torch.float32 else 2**-13
    return float(relative.amax()), bound
