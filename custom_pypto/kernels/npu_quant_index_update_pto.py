"""npu_quant_index_update_pto as a PyPTO program: the tiles of npu_quant_rows_pto, then a task per
token writes its row and its scale.
"""

import functools
from collections.abc import Callable

import pypto

from . import DTYPES, Arguments, runtime_options
from .npu_quant_rows_pto import index_rows
from .pypto_versions import jit
from .quantiser import TOKENS, tiles, write_rows


def program(a: Arguments, *, slot_words: int) -> None:
    """Writes rows of ``cache [slots, D]`` int8 and ``scale_cache [slots, 1]`` float16.

    Args:
        a: ``x``, of which T rows count, ``hadamard [D, D]`` or None, ``slots
            [1, T * slot_words]`` int32, the caches.
    """
    for start, rows in tiles(a.slots.shape[1] // slot_words, "QUANT_KEY"):
        values, scales = index_rows(a, start, rows)
        # a row of 32 bytes, the smallest that UB holds
        padded = pypto.tensor([TOKENS, 16], pypto.DT_FP16, "scales")
        pypto.set_vec_tile_shapes(TOKENS, 16)
        pypto.assemble(scales, [0, 0], padded)
        written = [(values, a.cache), (padded, a.scale_cache)]
        write_rows(written, a.slots, start, rows, slot_words=slot_words)


@functools.cache
def kernel(*, dtype: str, rotates: bool, slot_words: int, ready_on_host: bool) -> Callable:
    """The kernel of :func:`program`; one binary serves every number of tokens and slots."""
    D, S, half = pypto.DYNAMIC, pypto.STATIC, DTYPES[dtype]
    absent = () if rotates else ("hadamard",)

    @jit(runtime_options=runtime_options("slots", ready_on_host=ready_on_host))
    def quant_index_update(
        x: pypto.Tensor([D, S], half),
        hadamard: pypto.Tensor([S, S], half),
        slots: pypto.Tensor([S, D], pypto.DT_INT32),
        cache: pypto.Tensor([D, S], pypto.DT_INT8),
        scale_cache: pypto.Tensor([D, S], pypto.DT_FP16),
    ):
        program(Arguments(**locals() | dict.fromkeys(absent)), slot_words=slot_words)

    return quant_index_update
