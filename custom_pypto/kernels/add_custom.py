"""Elementwise sum on the vector cores: one task per tile, the last one partly filled."""

import functools
from collections.abc import Callable

import pypto

from . import DTYPES, runtime_options
from .pypto_versions import jit

# three float32 tiles and the copies of the next ones fit in the 192 KiB of UB
TILE = 8192


def add_custom(self, other, out):
    """``out = self + other``, all ``[n]``."""
    n = self.shape[0]
    for i in pypto.loop(0, (n + TILE - 1) // TILE, 1, name="ADD", idx_name="add_tile"):
        start = i * TILE
        pypto.set_vec_tile_shapes(TILE)
        a, b = (
            pypto.view(x, [TILE], [start], valid_shape=[(n - start).min(TILE)])
            for x in (self, other)
        )
        # one scope: by default PyPTO makes one task per cast, which bfloat16 needs
        pypto.set_pass_options(sg_set_scope=1)
        if out.dtype == pypto.DT_BF16:
            a, b = pypto.cast(a, pypto.DT_FP32), pypto.cast(b, pypto.DT_FP32)
        total = pypto.cast(pypto.add(a, b), out.dtype)
        pypto.set_pass_options(sg_set_scope=-1)
        pypto.assemble(total, [start], out)


@functools.cache
def kernel(*, dtype: str) -> Callable:
    """For contiguous operands of ``dtype`` seen as ``[n]``, n >= 1."""
    vector, dtype = [pypto.DYNAMIC], DTYPES[dtype]

    @jit(runtime_options=runtime_options(ready_on_host=False))
    def add_custom_kernel(
        self: pypto.Tensor(vector, dtype),
        other: pypto.Tensor(vector, dtype),
        out: pypto.Tensor(vector, dtype),
    ):
        add_custom(self, other, out)

    return add_custom_kernel
