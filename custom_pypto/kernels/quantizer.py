"""Shared by the programs of the int8 writers: tiles of tokens and the quantizer."""

from collections.abc import Iterator

import pypto

from . import F32, loop
from .pypto_versions import div, filled, rounded_to_int8

TOKENS = 16  # per tile
SCALE_GROUP = 128  # values of a latent that share a scale


def tiles(tokens, name: str) -> Iterator[tuple]:
    """``(first token, tokens)`` of each tile, in a loop."""
    for i in loop(name, (tokens + TOKENS - 1) // TOKENS):
        start = i * TOKENS
        yield start, (tokens - start).min(TOKENS)


def loaded(x, start, rows):
    """A tile of ``x``, of which ``rows`` rows are valid."""
    width = x.shape[1]
    pypto.set_vec_tile_shapes(TOKENS, width)
    return pypto.view(x, [TOKENS, width], [start, 0], valid_shape=[rows, width])


def quantized(x) -> tuple:
    """``(int8, float32 scales)`` of the rows of ``x``, ``[n, W]`` and ``[n, 1]``."""
    pypto.set_vec_tile_shapes(*x.shape)
    x = pypto.cast(x, F32)
    largest = pypto.maximum(pypto.amax(pypto.abs(x), dim=-1, keepdim=True), 1e-4)
    steps = filled(largest, 127.0)
    return rounded_to_int8(pypto.mul(x, div(steps, largest))), div(largest, steps)
