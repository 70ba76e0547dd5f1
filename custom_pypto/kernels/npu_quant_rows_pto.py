"""npu_quant_rows_pto as a PyPTO program: per tile of rows a cube task for the rotation, if there is
one, and a vector task.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pypto

from . import (
    F16,
    F32,
    I8,
    PYPTO_DTYPES,
    Arguments,
    arguments,
    begin_task,
    end_task,
    runtime_options,
)
from .pypto_versions import behind, jit
from .quantizer import TOKENS, loaded, quantized, tiles


@dataclass(frozen=True, kw_only=True)
class Facts:
    dtype: str  # of x and hadamard
    absent: tuple[str, ...]  # hadamard, if nothing is rotated

    def missing_rows(self, count: int) -> int:
        """The rows to append to ``count`` rows of ``x``."""
        return 0 if self.absent else behind(count, TOKENS)


def index_rows(a: Arguments, start, rows) -> tuple:
    """``(int8, float16 scales)`` of a tile of ``x``, rotated by ``hadamard`` if there is one."""
    x = loaded(a.x, start, rows)
    if a.hadamard is not None:
        width = a.x.shape[1]
        pypto.set_cube_tile_shapes([TOKENS] * 2, [width] * 2, [width] * 2)
        x = pypto.matmul(x, a.hadamard, F32)
        pypto.set_vec_tile_shapes(TOKENS, width)
    begin_task()
    if a.hadamard is not None:
        x = pypto.cast(x, a.x.dtype)
    values, scales = quantized(x)
    scales = pypto.cast(scales, F16)
    end_task()
    return values, scales


def program(a: Arguments) -> None:
    """Writes ``rows [T, D]`` int8 and ``scales [T, 1]`` float16 of ``x``, of which T rows count."""
    for start, rows in tiles(a.scales.shape[0], "QUANT"):
        values, scales = index_rows(a, start, rows)
        pypto.assemble(values, [start, 0], a.rows)
        pypto.assemble(scales, [start, 0], a.scales)


@functools.cache
def kernel(facts: Facts) -> Callable:
    """The kernel of :func:`program`; one binary serves every number of rows."""
    D, S, half = pypto.DYNAMIC, pypto.STATIC, PYPTO_DTYPES[facts.dtype]

    @jit(runtime_options=runtime_options(ready_on_host=False))
    def quant_rows(
        x: pypto.Tensor([D, S], half),
        hadamard: pypto.Tensor([S, S], half),
        rows: pypto.Tensor([D, S], I8),
        scales: pypto.Tensor([D, S], F16),
    ):
        program(arguments(locals(), facts.absent))

    return quant_rows
