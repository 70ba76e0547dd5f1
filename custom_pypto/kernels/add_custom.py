"""Elementwise sum on the vector cores: one task per tile, the last one partly filled."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pypto

from . import F32, PYPTO_DTYPES, begin_task, end_task, runtime_options
from .pypto_versions import jit

# three float32 tiles and the copies of the next ones fit in the 192 KiB of UB
TILE = 8192


@dataclass(frozen=True, kw_only=True)
class Facts:
    dtype: str


def program(x, y, z) -> None:
    """``z = x + y``, all ``[n]``; written so that ``new_ir`` of CANN 9.2 parses it, too."""
    n = x.shape[0]
    for i in pypto.loop(0, (n + TILE - 1) // TILE, 1, name="ADD", idx_name="add_tile"):
        start = i * TILE
        valid = [(n - start).min(TILE)]
        pypto.set_vec_tile_shapes(TILE)
        a = pypto.view(x, [TILE], [start], valid_shape=valid)
        b = pypto.view(y, [TILE], [start], valid_shape=valid)
        begin_task()  # else one task per cast, which bfloat16 needs
        if z.dtype == pypto.DT_BF16:
            a, b = pypto.cast(a, F32), pypto.cast(b, F32)
        total = pypto.cast(pypto.add(a, b), z.dtype)
        end_task()
        pypto.assemble(total, [start], z)


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
        program(x, y, z)

    return add_custom_kernel
