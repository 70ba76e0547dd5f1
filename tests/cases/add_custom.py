"""Arguments of ``add_custom``: a row for each query token."""

import torch

from . import DTYPES, random
from .hostile import Maker

ON_NPU = {}
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
    return dict(self=random(shape, dtype, g), other=random(shape, dtype, g))


def not_default() -> dict:
    return inputs([3], [5])


def random_call(m: Maker) -> dict:
    dtype = m.rng.choice([*DTYPES, torch.float64])
    shape = tuple(m.rng.choice([0, 1, 2, 3, 7, 17]) for _ in range(m.rng.randint(0, 4)))
    return {name: m.tensor(shape, m.floats(dtype)) for name in ("self", "other")}
