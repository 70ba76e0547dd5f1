"""Arguments of ``npu_quant_rows_pto``."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from custom_pypto.reference.npu_quant_rows_pto import hadamard_matrix, index_rows

from .hostile import Maker
from .rejections import none, table

OP = "npu_quant_rows_pto"
WEIGHT = 2


def inputs(
    lengths_query: list[int],
    lengths_key: list[int],
    *,
    heads: int = 4,
    dim: int = 32,
    dtype: torch.dtype = torch.float32,
    hadamard: bool = False,
    seed: int = 0,
) -> dict:
    """The query of each token; keys do not matter."""
    return dict(
        x=index_rows(sum(lengths_query), heads, dim, seed=seed).to(dtype),
        hadamard=hadamard_matrix(dim).to(dtype) if hadamard else None,
    )


on_npu = functools.partial(inputs, dim=128, dtype=torch.bfloat16)


def not_default() -> dict:
    return on_npu([2, 3], [], dtype=torch.float16, hadamard=True)


def random_rows(m: Maker, *shape: int) -> dict:
    """Rows and perhaps a matrix for them."""
    dim = m.rng.choice([16, 32, 48, 128])
    rotates = m.rng.random() < 0.4
    return dict(x=m.tensor((*shape, dim)), hadamard=m.tensor((dim, dim)) if rotates else None)


def random_call(m: Maker) -> dict:
    sizes = [m.rng.choice([0, 1, 2, 3, 7]) for _ in range(m.rng.randint(0, 3))]
    return random_rows(m, *sizes)


def rejected() -> list:
    x = inputs([3], [], hadamard=True)
    row = table(OP, x)
    return [*rejected_rows(row, x), *none(row, x, ["hadamard"])]


def rejected_rows(row: Callable, inputs: dict) -> list:
    """Rules of ``x`` and ``hadamard``."""
    x, matrix = inputs["x"], inputs["hadamard"]
    legal = "must be a multiple of 16 up to 1024 (D), got"
    floating = "x.dtype must be bfloat16, float16 or float32, got"
    last = f"x.size({x.dim() - 1})"

    def rotated(message: str, value: Tensor):
        return row(f"hadamard{message}", hadamard=value)

    return [
        row(f"{floating} int8", x=x.to(torch.int8)),
        row(f"{floating} float64", x=x.double()),
        row("x must be of shape [.., D], got []", x=x.flatten()[0]),
        *(row(f"{last} {legal} {n}", x=x.new_zeros(3, 4, n)) for n in (0, 24, 1040)),
        rotated(" must be of shape [D, D], got [1, 32, 32]", matrix[None]),
        rotated(".size(0) must be 32 (D of x), got 16", matrix[:16]),
        rotated(".size(1) must be 32 (D of x), got 16", matrix[:, :16]),
        rotated(".dtype must be float32 (dtype of x), got bfloat16", matrix.bfloat16()),
    ]


def unsupported_on_npu() -> list:
    row = table(OP, on_npu([3], []))
    return [row("x.size(2) must be 128 on an NPU, got 64", on_npu([3], [], dim=64))]


def graph_calls() -> dict[str, list[dict]]:
    return {"sizes": [on_npu([3], []), on_npu([5], [], heads=2)]}
