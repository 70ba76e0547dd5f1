from collections.abc import Iterator

import torch
from torch import Tensor


def add_custom(x: Tensor, y: Tensor) -> Tensor:
    """``x + y``, elementwise."""
    return x + y


def checks(dtypes: list[torch.dtype]) -> Iterator[tuple]:
    for dtype in dtypes:
        g = torch.Generator().manual_seed(0)
        x, y = (torch.randn(37, 129, generator=g).to(dtype) for _ in range(2))
        yield dtype, "37 x 129", dict(x=x, y=y)


def error(got: Tensor, expected: Tensor, mine: dict, theirs: dict) -> tuple[float, float]:
    """The number of different elements."""
    return float((got != expected).sum()), 0.0
