from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..weight_formats import WEIGHT_FORMATS, values_of, weight_format_of
from .checks import ROUNDING

FEW_TOKENS = 16  # of which x is rounded to int8 for a weight of 4 bits, of more for int8


def matrix_of(weight: Tensor, scales: Tensor | None, block_size: int) -> Tensor:
    """In float64; without scales values are what they are."""
    return (weight if scales is None else values_of(weight, scales, block_size)).double()


def rows_of(x: Tensor, weight: Tensor, experts: Tensor | None, int8_x: bool) -> Tensor:
    """In float64, rounded to int8 where the op does that."""
    tokens = x.numel() // max(1, x.size(-1))
    if experts is not None:
        tokens = experts.numel() // max(1, experts.size(-1)) if experts.dim() else 1
    int8 = weight.dtype == torch.int8
    if not int8_x or (int8 and tokens <= FEW_TOKENS):
        return x.double()
    parts = x.float().unflatten(-1, (-1, x.size(-1) if int8 else 32))
    largest = parts.abs().amax(-1, keepdim=True)
    factor = torch.full_like(largest, 127) / largest  # not the product with a reciprocal
    steps = (parts * factor.masked_fill(largest <= 1e-30, 0)).round()
    return (steps.double() * (largest / 127).double()).flatten(-2)


def weight_only_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None = None,
    *,
    experts: Tensor | None = None,
    block_size: int = 128,
    int8_x: bool = False,
) -> Tensor:
    matrix, rows = matrix_of(weight, scales, block_size), rows_of(x, weight, experts, int8_x)
    if experts is None:
        return (rows @ matrix.mT).to(x.dtype)
    if experts.dim() == x.dim():
        rows = rows.unsqueeze(-2).expand(*experts.shape, x.size(-1))
    exists = (experts >= 0) & (experts < len(matrix))
    out = x.new_zeros(*experts.shape, matrix.size(-2))
    for expert in experts[exists].unique().tolist():
        its = experts == expert
        out[its] = (rows[its] @ matrix[expert].T).to(x.dtype)
    return out


def checks(dtypes: list[torch.dtype]) -> Iterator[tuple]:
    g = torch.Generator().manual_seed(6)
    for dtype in dtypes:
        for kind, form in WEIGHT_FORMATS.items():
            for rows, columns, tokens in ((300, 256, 1), (200, 384, 5), (70, 96, 40)):
                weight, scales = form.quantize(torch.randn(rows, columns, generator=g))
                x = torch.randn(tokens, columns, generator=g).to(dtype)
                shape = f"{kind} [{rows}, {columns}], {tokens} rows"
                yield dtype, shape, dict(x=x, weight=weight, scales=scales)
            weight, scales = form.quantize(torch.randn(6, 64, 128, generator=g))
            experts = torch.randint(-1, 7, (20, 3), generator=g)
            x = torch.randn(20, 128, generator=g).to(dtype)
            arguments = dict(x=x, weight=weight, scales=scales, experts=experts)
            shape = f"{kind} [6, 64, 128], 20 rows, 3 experts of 6"
            yield dtype, shape, arguments
            if kind in ("int8", "int4", "fp4"):
                yield dtype, f"{shape}, x in int8", arguments | {"int8_x": True}


def step_of_operands(call: dict) -> float:
    """How far the rounding of operands may move a product, relative to the product of the norms."""
    x, weight, scales, experts = (call.get(name) for name in ("x", "weight", "scales", "experts"))
    if scales is None:
        return 0.0
    if call.get("int8_x"):  # integers, or floats whose values share a scale as below
        # or in bfloat16, as are the values of the weight
        return 256**0.5 / (2 * 32601) + (2**-8 if x.dtype == torch.bfloat16 else 0.0)
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
    experts = theirs.get("experts")
    weight, scales = theirs["weight"], theirs.get("scales")
    x = rows_of(theirs["x"], weight, experts, theirs.get("int8_x", False))
    matrix = matrix_of(weight, scales, theirs.get("block_size", 128))
    parts = matrix.abs()
    if scales is not None and weight_format_of(weight, scales).zeros:  # which may cancel 4 bits
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
