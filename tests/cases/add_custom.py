"""Arguments of ``add_custom``: a row for each query token."""

import functools

import torch
from torch import Tensor

from . import DTYPES, random
from .hostile import Maker
from .rejections import each, none, table

WEIGHT = 1


def inputs(
    lengths_query: list[int],
    lengths_key: list[int],
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> dict:
    g = torch.Generator().manual_seed(seed)
    shape = (sum(lengths_query), max(lengths_key))
    return dict(x=random(shape, dtype, g), y=random(shape, dtype, g))


on_npu = functools.partial(inputs, dtype=torch.bfloat16)


def not_default() -> dict:
    return inputs([3], [5])


def random_call(m: Maker) -> dict:
    dtype = m.rng.choice([*DTYPES, torch.float64])
    shape = tuple(m.rng.choice([0, 1, 2, 3, 7, 17]) for _ in range(m.rng.randint(0, 4)))
    return {name: m.tensor(shape, m.floats(dtype)) for name in ("x", "y")}


def rejected() -> list:
    call = dict(x=torch.zeros(4, 5), y=torch.zeros(4, 5))
    row = table("add_custom", call)
    shape = "y must be of shape [4, 5] (shape of x; no broadcasting), got "
    dtype = "x.dtype must be bfloat16, float16, float32 or float64, got "
    y_dtype = "y.dtype must be float32 (dtype of x), got float64"
    float8 = each(call, call, lambda x: x.to(torch.float8_e4m3fn))
    return [
        row(f"{shape}[4, 4]", y=torch.zeros(4, 4)),
        row(f"{shape}[5]", y=torch.zeros(5)),
        row(f"{shape}[]", y=torch.zeros(())),
        row(y_dtype, y=torch.zeros(4, 5).double()),
        row(f"{dtype}int32", **each(call, call, Tensor.int)),
        row(f"{dtype}complex64", **each(call, call, Tensor.cfloat)),
        row(f"{dtype}float8_e4m3fn", **float8),
        *none(row, call),
    ]


def unsupported_on_npu() -> list:
    row = table("add_custom", on_npu([3], [5]))
    float64 = on_npu([3], [5], dtype=torch.float64)
    message = "x.dtype must be bfloat16, float16 or float32 on an NPU, got float64"
    return [row(message, float64)]


def graph_calls() -> dict[str, list[dict]]:
    rows = on_npu([4], [5], dtype=torch.float16)
    return {
        "one": [on_npu([3], [5])],
        "sizes": [on_npu([3], [5], dtype=torch.float16), on_npu([2], [7], dtype=torch.float16)],
        "rows": [each(rows, rows, lambda x: x[:, None])],
    }
