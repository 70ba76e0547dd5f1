"""Checks and bounds of ``hyper_connection``, which ``layer_ops.py`` defines."""

from collections.abc import Iterator

import torch
from torch import Tensor

from .checks import STEP, largest, steps_from
from .layer_ops import hyper_connection as hyper_connection
from .layer_ops import rms_norm

# B, S, D, iterations; four streams
SIZES = [(1, 1, 64, 2), (2, 3, 80, 20), (1, 37, 16, 1), (1, 70, 32, 3)]


def checks(dtypes: list[torch.dtype]) -> Iterator[tuple]:
    for dtype in dtypes:
        for batch, tokens, width, iterations in SIZES:
            shape = f"streams {[batch, tokens, 4, width]}, {iterations} iterations"
            yield dtype, shape, arguments(dtype, batch, tokens, width, iterations)


def arguments(
    dtype: torch.dtype, batch: int, tokens: int, width: int, iterations: int, count: int = 4
) -> dict:
    g = torch.Generator().manual_seed(1)
    numbers = (2 + count) * count
    streams = torch.randn(batch, tokens, count, width, generator=g)
    # of any magnitude, which the norm takes out
    streams *= 2.0 ** torch.randint(-8, 8, (batch, tokens, 1, 1), generator=g)
    return dict(
        streams=streams.to(dtype),
        weight=torch.randn(numbers, count * width, generator=g) * (count * width) ** -0.5,
        base=torch.randn(numbers, generator=g),
        scale=torch.tensor([1.0, 0.7, 1.3]),
        iterations=iterations,
        eps=1e-6,
        norm_eps=1e-6,
    )


def error(got: tuple, expected: tuple, mine: dict, theirs: dict) -> tuple[float, float]:
    """The largest error, in the bounds of its element."""
    return steps_from(got, expected, bounds(expected, **theirs)), 1.0


def bounds(want: tuple, streams, weight, base, scale, iterations, eps, norm_eps) -> list[Tensor]:
    post, comb, collapsed = want
    n = streams.size(2)
    off = of_numbers(streams, weight, scale, norm_eps) + 4 * STEP * (1 + largest(base))
    pre, of_post, of_comb = off.split([n, n, n * n], -1)
    # a softmax moves by a factor of e^2d, and so do quotients of it by sums of it, on either side;
    # then each iteration rounds n numbers and a quotient, twice
    d = of_comb.amax(-1)[..., None, None] if n else of_comb[..., None]
    relative = (4 * d).expm1() + (2 * iterations + 4) * (n + 3) * STEP
    return [
        of_post / 2 + 8 * STEP,
        relative * (comb.double().abs() + eps),
        of_collapsed(collapsed, streams, pre, eps),
    ]


def of_numbers(streams: Tensor, weight: Tensor, scale: Tensor, norm_eps: float) -> Tensor:
    """How far the numbers of tokens may be off: sums of N D products, and a norm."""
    x = rms_norm(streams.flatten(2).float(), None, norm_eps).double().abs()
    sizes = x @ weight.double().abs().T
    return (2 * weight.size(1) + 8) * STEP * sizes * scale.double().abs().max()


def of_collapsed(want: Tensor, streams: Tensor, off: Tensor, eps: float) -> Tensor:
    # a sigmoid moves by a quarter of its argument
    sizes = streams.double().abs()
    moved = ((off / 4 + 4 * STEP).unsqueeze(-1) * sizes).sum(2)
    summed = (streams.size(2) + 2) * STEP * (1 + eps) * sizes.sum(2)
    return moved + summed + torch.finfo(streams.dtype).eps * want.double().abs()
