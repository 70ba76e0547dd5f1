"""Elementwise sum on the vector cores: one task per tile, the last one partly filled."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pypto

from . import F32, PYPTO_DTYPES, Arguments, arguments, begin_task, end_task, runtime_options
from .pypto_versions import jit

# three float32 tiles and the copies of the next ones fit in the 192 KiB of UB
TILE = 8192


@dataclass(frozen=True, kw_only=True)
class Facts:
    dtype: str


def program(a: Arguments) -> None:
    """``z = x + y``, all ``[n]``."""
    n = a.x.shape[0]
    for i in pypto.loop(0, (n + TILE - 1) // TILE, 1, name="ADD", idx_name="add_tile"):
        start = i * TILE
        pypto.set_vec_tile_shapes(TILE)
        x, y = (
            pypto.view(t, [TILE], [start], valid_shape=[(n - start).min(TILE)]) for t in (a.x, a.y)
        )
        begin_task()  # else one task per cast, which bfloat16 needs
        if a.z.dtype == pypto.DT_BF16:
            x, y = pypto.cast(x, F32), pypto.cast(y, F32)
        total = pypto.cast(pypto.add(x, y), a.z.dtype)
        end_task()
        pypto.assemble(total, [start], a.z)


@functools.cache
def kernel(facts: Facts) -> Callable:
    """The kernel of :func:`program`; one binary serves every n >= 1."""
    vector, dtype = [pypto.DYNAMIC], PYPTO_DTYPES[facts.dtype]

    @jit(runtime_options=runtime_options(ready_on_host=False))
    def add_custom_kernel(
        x: pypto.Tensor(vector, dtype),
        y: pypto.Tensor(vector, dtype),
        z: pypto.Tensor(vector, dtype),
    ):
        program(arguments(locals()))

    return add_custom_kernel
