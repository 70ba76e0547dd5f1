"""Parts of random calls, with values, strides and lengths of the most hostile kind."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from random import Random

import torch
from torch import Tensor

from . import DTYPES, INT_MAX, INT_MIN, LAYOUTS

BLOCK_SIZES = [16, 16, 16, 32, 48]
HEADS = [1, 1, 2, 3, 4, 5, 7, 15, 16, 17, 31, 33, 48, 64, 65, 129]


class Maker:
    """Tensors of one case, with random values and memory layout."""

    def __init__(self, rng: Random):
        self.rng = rng
        self.generator = torch.Generator().manual_seed(rng.getrandbits(63))
        # exact: sums in any order are equal
        self.values = rng.choice(["random", "random", "integers", "special", "tiny"])
        self.dtype = rng.choice(DTYPES)

    def floats(self, dtype: torch.dtype | None = None) -> Callable[[int], Tensor]:
        """Makes n floats; NaN and infinities only among integers, whose sums are exact."""
        g = self.generator

        def fill(n: int) -> Tensor:
            if self.values == "random":
                x = torch.randn(n, generator=g)
            elif self.values == "tiny":  # down to subnormal numbers and below
                exponent = torch.randint(-150, 1, (n,), generator=g)
                x = torch.ldexp(torch.randn(n, generator=g), exponent)
            else:
                x = torch.randint(-2, 3, (n,), generator=g).float()
                if self.values == "special" and n and self.rng.random() < 0.3:
                    special = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
                    where = torch.randint(n, (1 + n // 200,), generator=g)
                    x[where] = special[torch.randint(4, where.shape, generator=g)]
            return x.to(dtype or self.dtype)

        return fill

    def bytes(self) -> Callable[[int], Tensor]:
        """Makes n int8: any, or small ones, whose weighted sums are exact."""
        low, high = (-128, 127) if self.values in ("random", "tiny") else (-2, 2)
        return self.ints(low, high, torch.int8)

    def ints(self, low: int, high: int, dtype=torch.int32) -> Callable[[int], Tensor]:
        """Makes n integers of low … high, and sometimes any others."""
        rng = self.rng
        extremes = [INT_MIN, INT_MIN + 1, -2, -1, 0, 1, high - 1, high, high + 1, INT_MAX - 1]
        extremes.append(INT_MAX)
        if dtype == torch.int8:
            extremes = [low, high]
        if dtype == torch.int64:
            extremes += [-(2**63), 2**63 - 1, 2**32, -(2**32)]
        wild = rng.choice([0, 0, 0.1, 0.5])

        def fill(n: int) -> Tensor:
            x = torch.randint(low, max(high, low) + 1, (n,), generator=self.generator)
            for i in range(n if wild and n < 100 else 0):
                if rng.random() < wild:
                    x[i] = rng.choice(extremes)
            return x.to(dtype)

        return fill

    def prefix_sums(self, total: int) -> Callable[[int], Tensor]:
        """Makes n prefix sums, mostly rising and mostly within ``total``."""
        if self.rng.random() < 0.3:
            return self.ints(-1, total + 1)

        def fill(n: int) -> Tensor:
            most = 2 * total // n + 1 if n else 0
            sums = accumulate(self.rng.randint(0, most) for _ in range(n))
            return torch.tensor(list(sums), dtype=torch.int32)

        return fill

    def rows(self, *shape: int, fill: Callable[[int], Tensor] | None = None) -> Tensor:
        """Floats by default, the last stride is 1."""
        return self.tensor(shape, fill, dense_rows=True)

    def tensor(
        self, shape: tuple, fill: Callable[[int], Tensor] | None = None, dense_rows=False
    ) -> Tensor:
        """Floats by default, with any strides except negative ones."""
        rng, fill = self.rng, fill or self.floats()
        if rng.random() < 0.5 or not shape:
            flat = fill(math.prod(shape))
            return flat.view(shape)
        # memory order of the dims, then gaps, then strides of 0 or so small that rows overlap
        order = list(range(len(shape)))
        if rng.random() < 0.4:
            inner = order[:-1] if dense_rows else order
            rng.shuffle(inner)
            order = inner + order[len(inner) :]
        strides, step = [0] * len(shape), 1
        for d in reversed(order):
            gap = rng.choice([0, 0, 0, 1, 3, 16])
            if not (dense_rows and d == len(shape) - 1):
                step += gap
            strides[d] = step
            step *= max(shape[d], 1)
        overlap = rng.random()
        for d in range(len(shape) - 1 if dense_rows else len(shape)):
            if shape[d] == 1 and rng.random() < 0.3:
                strides[d] = rng.choice([0, 1, 7, 2**40, 2**59])  # no elements
            elif overlap < 0.15:
                strides[d] = 0 if rng.random() < 0.5 else strides[d]
            elif overlap < 0.3:
                strides[d] = rng.randint(0, strides[d])
        offset = rng.choice([0, 0, 1, 3, 5, 16])
        reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        size = offset + (reach + 1 if math.prod(shape) else 0)
        return fill(size).as_strided(shape, strides, offset)


@dataclass
class Sequences:
    """Sizes, and the arguments that locate the tokens and keys of the sequences."""

    layout_query: str
    layout_key: str
    tokens: tuple  # leading sizes of the query
    rows: tuple  # leading sizes of the keys
    capacity: int  # most keys of a sequence
    arguments: dict


def sequences(m: Maker, large: bool, lengths_key: str, cmp_ratio: int = 1) -> Sequences:
    """``large``: enough keys for several chunks, top-k buffers and parts;
    ``lengths_key``: the name of that argument, which counts ``cmp_ratio`` tokens per key.
    """
    rng = m.rng
    layout_query, layout_key = rng.choice(LAYOUTS)
    B, S1 = rng.choice([0, 1, 1, 1, 2, 2, 3]), rng.choice([0, 1, 1, 1, 2, 2, 3, 5])
    S2 = (
        rng.randint(0, 1400) if large else rng.choice([0, 1, 5, 15, 16, 17, 33, rng.randint(0, 70)])
    )
    if large:
        B = 1
    length = m.ints(S2 * cmp_ratio // 2 if large else 0, S2 * cmp_ratio + 2)
    tokens, arguments = (B, S1), dict(actual_seq_lengths_query=None)
    if layout_query == "TND":
        tokens = (B * S1,)
        arguments["actual_seq_lengths_query"] = m.tensor((B,), m.prefix_sums(B * S1))
    elif rng.random() < 0.7:
        arguments["actual_seq_lengths_query"] = m.tensor((B,), m.ints(0, S1 + 1))
    if layout_key == "PA_BSND":
        block_size = 1024 if large and rng.random() < 0.2 else rng.choice(BLOCK_SIZES)
        width = -(-S2 // block_size) + rng.choice([0, 0, 1])
        blocks = rng.choice([0, 1, 2, 3, B * width, B * width + 1])
        rows, capacity = (blocks, block_size), width * block_size
        table = m.tensor((B, width), m.ints(0 if blocks else -1, blocks - 1))
        arguments |= {"block_table": table, lengths_key: m.tensor((B,), length)}
    elif layout_key == "TND":
        rows, capacity = (B * S2,), S2
        arguments |= {
            "block_table": None,
            lengths_key: m.tensor((B,), m.prefix_sums(B * S2 * cmp_ratio)),
        }
    else:
        rows, capacity = (B, S2), S2
        given = rng.random() < 0.7
        arguments |= {"block_table": None, lengths_key: m.tensor((B,), length) if given else None}
    return Sequences(layout_query, layout_key, tokens, rows, capacity, arguments)
