"""Checks and bounds of ``pool_groups``, which ``layer_ops.py`` defines."""

from collections.abc import Iterator

import torch

from .checks import INT_MAX, INT_MIN, STEP, largest, steps_from
from .layer_ops import pool_groups as pool_groups

# B, S, tokens of a group, D, and whether groups overlap
SIZES = [
    (3, 1, 4, 64, True),
    (2, 23, 4, 48, True),
    (2, 1, 128, 32, False),
    (1, 300, 128, 16, False),
]


def checks(dtypes: list[torch.dtype]) -> Iterator[tuple]:
    for dtype in dtypes:
        for batch, tokens, rate, width, overlaps in SIZES:
            for hostile in (False, True):
                shape = f"values {[batch, tokens]}, {rate} tokens of {width}"
                made = arguments(dtype, batch, tokens, rate, width, overlaps, hostile)
                yield dtype, shape + (", hostile" if hostile else ""), made


def arguments(
    dtype: torch.dtype,
    batch: int,
    tokens: int,
    rate: int,
    width: int,
    overlaps: bool,
    hostile: bool = False,
) -> dict:
    """Sequences of any length, the last of which completes a group.

    Args:
        hostile: a block outside of the state, and lengths that do not fit the new tokens.
    """
    g = torch.Generator().manual_seed(1)
    wide = width * (1 + overlaps)
    ring = (1 + overlaps) * rate + 15
    state = torch.randn(batch + 2, ring, 1, 2 * wide, generator=g)
    start = torch.randint(0, 3 * rate, (batch,), generator=g, dtype=torch.int32)
    start[-1] = max(3 * rate - tokens, 0)
    lengths = start + tokens
    blocks = torch.randperm(batch + 2, generator=g)[:batch].int()
    if hostile:
        blocks[0] = INT_MIN if batch == 1 else INT_MAX
        lengths[-1] += rate
        start[0] = max(int(start[0]) - 1, -1)
    return dict(
        state=state.to(dtype),
        blocks=blocks,
        values=torch.randn(batch, tokens, 2 * wide, generator=g).to(dtype),
        bias=torch.randn(rate, wide, generator=g),
        start=start,
        lengths=lengths,
        width=width,
    )


def error(got: tuple, expected: tuple, mine: dict, theirs: dict) -> tuple[float, float]:
    """The largest error, in the bounds of its element; infinite if other groups are complete."""
    if not got[1].equal(expected[1]):
        return torch.inf, 1.0
    return steps_from(got[:1], expected[:1], bounds(expected, **theirs)[:1]), 1.0


def bounds(want: tuple, state, blocks, values, bias, start, lengths, width) -> list:
    # n weights, each an exponential within two steps of a difference within one, and a sum and a
    # quotient, on either side; the row is their mean of values
    count = bias.numel() // width
    gates = largest(state) + largest(values) + largest(bias)
    rounding = 2 * (2 * count + 6 + gates) * STEP
    return [rounding * max(largest(state), largest(values)), 0]
