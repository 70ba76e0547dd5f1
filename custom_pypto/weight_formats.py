"""The formats of stored weights, each as one record.

A weight is ``[.., N, K]``. :func:`custom_pypto.weight_only_linear` defines what its values are. The
CPU's own table, in ``csrc/tasks/stored_weight.cpp``, has the same formats: a test compares them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

#: K is a multiple of it
WEIGHT_UNIT = 32
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float32, device="cpu")


@dataclass(frozen=True)
class WeightFormat:
    """What a format is.

    Args:
        dtype: of the codes.
        scale_dtype: None: there are no scales.
        dequantize: the values, in float32, of codes and scales for a ``block_size``.
        quantize: codes and scales of a float32 matrix; they need not be the nearest.
        codes: in an element of ``dtype``, the first in the low bits.
        block: rows and values of a square block with one scale; 0: each row has its own.
        groups: sizes of groups of a row with one scale, of which new scales take the first that
            divides K; none: the whole row is one.
        zeros: whether each scale has a zero beside it.
        on_disk: safetensors' name of published codes.
        rounded: whether ``convert_weight`` rounds values to the format.
    """

    dtype: torch.dtype
    scale_dtype: torch.dtype | None
    dequantize: Callable[[Tensor, Tensor, int], Tensor]
    quantize: Callable[[Tensor], tuple[Tensor, Tensor | None]]
    codes: int = 1
    block: int = 0
    groups: tuple[int, ...] = ()
    zeros: bool = False
    on_disk: str | None = None
    rounded: bool = False

    def shape(self, shape: list[int]) -> list[int]:
        """The shape of the codes of a weight of this shape."""
        return [*shape[:-1], shape[-1] // self.codes]

    def scale_shape(self, shape: list[int]) -> list[int]:
        """The shape of the scales of a weight of this shape."""
        *lead, rows, columns = shape
        if self.block:
            return [*lead, -(-rows // self.block), -(-columns // self.block)]
        if not self.groups:
            return [*lead, rows]
        group = next(group for group in self.groups if columns % group == 0)
        return [*lead, rows, columns // group, *[2] * self.zeros]


def in_pairs(values: Tensor) -> Tensor:
    """Two values of 4 bits per byte."""
    first, second = values.to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return first | second << 4


def from_pairs(weight: Tensor) -> Tensor:
    return torch.stack([weight & 15, weight >> 4], -1).flatten(-2)


def of_blocks(scales: Tensor, shape: torch.Size, block: int) -> Tensor:
    """The scale of each value of square blocks."""
    rows, columns = shape[-2:]
    of_rows = scales.repeat_interleave(block, -2)[..., :rows, :]
    return of_rows.repeat_interleave(block, -1)[..., :columns]


# ---- bfloat16 and int8 --------------------------------------------------------------------------


def int8_codes(matrix: Tensor) -> tuple[Tensor, Tensor]:
    scales = matrix.abs().amax(-1) / 127
    return (matrix / scales[..., None]).round().to(torch.int8), scales


# ---- fp8 ----------------------------------------------------------------------------------------


def fp8_values(weight: Tensor, scales: Tensor, block_size: int) -> Tensor:
    of_values = of_blocks(scales, weight.shape, block_size)
    # 0x7F and 0xFF are not NaN here
    top = torch.full_like(of_values, 480).copysign(weight.float())
    values = weight.float()
    return torch.where(values.isnan(), top, values) * of_values


def fp8_codes(matrix: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = matrix.shape[-2:]
    padded = pad(matrix, (0, -columns % 128, 0, -rows % 128))
    blocks = padded.unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128))
    scales = blocks.abs().amax((-1, -3)) / 448
    return (matrix / of_blocks(scales, matrix.shape, 128)).to(torch.float8_e4m3fn), scales


# ---- int4 and fp4 -------------------------------------------------------------------------------


def int4_values(weight: Tensor, scales: Tensor, block_size: int) -> Tensor:
    codes = from_pairs(weight).float()
    of_values = scales.float().repeat_interleave(codes.size(-1) // scales.size(-2), -2)
    scale, zero = of_values.unbind(-1)
    return (codes - 8) * scale + zero


def int4_codes(matrix: Tensor) -> tuple[Tensor, Tensor]:
    groups = matrix.unflatten(-1, (-1, 64 if matrix.size(-1) % 64 == 0 else 32))
    low, high = groups.aminmax(dim=-1)
    scale = ((high - low) / 15).bfloat16()
    zero = (low + 8 * scale.float()).bfloat16()
    steps = (groups - zero.float()[..., None]) / scale.float()[..., None] + 8
    return in_pairs(steps.round().clamp(0, 15).flatten(-2)), torch.stack([scale, zero], -1)


def fp4_values(weight: Tensor, scales: Tensor, block_size: int) -> Tensor:
    values = embedding(from_pairs(weight).int(), torch.cat([E2M1, -E2M1])[:, None]).squeeze(-1)
    return values * scales.float().repeat_interleave(32, -1)


def fp4_codes(matrix: Tensor) -> tuple[Tensor, Tensor]:
    groups = matrix.unflatten(-1, (-1, 32))
    exponents = torch.frexp(groups.abs().amax(-1) / 6)[1]
    scaled = groups / torch.exp2(exponents.float())[..., None]
    nearest = (scaled[..., None].abs() - E2M1).abs().argmin(-1) + 8 * (scaled < 0)
    scales = (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    return in_pairs(nearest.flatten(-2)), scales


# ---- the table ----------------------------------------------------------------------------------

WEIGHT_FORMATS: dict[str, WeightFormat] = {
    "bfloat16": WeightFormat(
        torch.bfloat16,
        None,
        lambda weight, *_: weight.float(),
        lambda matrix: (matrix.bfloat16(), None),
        on_disk="BF16",
    ),
    # symmetric
    "int8": WeightFormat(
        torch.int8,
        torch.float32,
        lambda weight, scales, _: weight.float() * scales[..., None],
        int8_codes,
        rounded=True,
    ),
    "fp8": WeightFormat(
        torch.float8_e4m3fn, torch.float32, fp8_values, fp8_codes, block=128, on_disk="F8_E4M3"
    ),
    # between the smallest and the largest value of a group
    "int4": WeightFormat(
        torch.uint8,
        torch.bfloat16,
        int4_values,
        int4_codes,
        codes=2,
        groups=(128, 64, 32),
        zeros=True,
        rounded=True,
    ),
    "fp4": WeightFormat(
        torch.uint8,
        torch.float8_e8m0fnu,
        fp4_values,
        fp4_codes,
        codes=2,
        groups=(32,),
        on_disk="I8",
    ),
}


def rounded_formats() -> list[str]:
    """Names of the formats that ``models.load`` rounds weights to."""
    return [name for name, form in WEIGHT_FORMATS.items() if form.rounded]


def weight_format_of(weight: Tensor, scales: Tensor | None) -> WeightFormat:
    """The format with these dtypes."""
    dtypes = weight.dtype, None if scales is None else scales.dtype
    return next(x for x in WEIGHT_FORMATS.values() if (x.dtype, x.scale_dtype) == dtypes)


def values_of(weight: Tensor, scales: Tensor | None, block_size: int = 128) -> Tensor:
    """The values of a weight in float32."""
    return weight_format_of(weight, scales).dequantize(weight, scales, block_size)
