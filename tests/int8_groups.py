"""A further format of stored weights: int8 with a scale in bfloat16 for 64 values of a row.

What its kernels in C++ would compute is computed here, by dequantizing and by rounding in torch.
"""

import contextlib

import torch
from torch.library import get_kernel

from custom_pypto.weight_formats import WeightFormat, values_of

NAME = "int8_groups"


def values(weight, scales, block_size):
    return weight.float() * scales.float().repeat_interleave(weight.size(-1) // scales.size(-1), -1)


def codes(matrix):
    groups = matrix.unflatten(-1, (-1, 64 if matrix.size(-1) % 64 == 0 else 32))
    scales = (groups.abs().amax(-1) / 127).clamp(min=1e-30).bfloat16()
    steps = (groups / scales.float()[..., None]).round().clamp(-127, 127)
    return steps.to(torch.int8).flatten(-2), scales


FORMAT = WeightFormat(torch.int8, torch.bfloat16, values, codes, groups=(64, 32), rounded=True)


def is_own(weight, scales):
    return scales is not None and (weight.dtype, scales.dtype) == (torch.int8, torch.bfloat16)


@contextlib.contextmanager
def kernels():
    """The two ops of stored weights take the format besides those of the library."""
    linear = torch.ops.custom_pypto.weight_only_linear.default
    convert = torch.ops.custom_pypto.convert_weight.default
    own = {op: get_kernel(op, "CPU") for op in (linear, convert)}

    def product(keys, x, weight, scales=None, *, experts=None, block_size=128, int8_x=False):
        if not is_own(weight, scales):
            others = dict(experts=experts, block_size=block_size, int8_x=int8_x)
            return own[linear].call_boxed(keys, x, weight, scales, **others)
        matrix = values_of(weight, scales).to(x.dtype)
        if experts is None:
            return x @ matrix.mT
        rows = x if x.dim() == experts.dim() + 1 else x.unsqueeze(-2)
        exists = (experts >= 0) & (experts < len(matrix))
        chosen = matrix[experts.where(exists, 0).long()]
        return (chosen @ rows.unsqueeze(-1)).squeeze(-1) * exists[..., None]

    def round_(keys, weight, scales, block, out, out_scales=None):
        if not is_own(out, out_scales):
            return own[convert].call_boxed(keys, weight, scales, block, out, out_scales)
        if scales is not None:
            whole = torch.empty(len(out), out.size(1))
            own[convert].call_boxed(keys, weight, scales, block, whole, None)
            weight = whole
        for to, value in zip((out, out_scales), codes(weight.float()), strict=True):
            to.copy_(value)

    with torch.library._scoped_library("custom_pypto", "IMPL") as library:
        library.impl(linear, product, "CPU", with_keyset=True, allow_override=True)
        library.impl(convert, round_, "CPU", with_keyset=True, allow_override=True)
        yield
