"""npu_quant_index_update_pto as a PyPTO program: the tiles of npu_quant_rows_pto, then a task per
token writes its row and its scale.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pypto

from . import F16, I8, I32, PYPTO_DTYPES, Arguments, arguments, npu_quant_rows_pto, runtime_options
from .npu_quant_rows_pto import index_rows
from .pypto_versions import jit
from .quantizer import TOKENS, tiles
from .slots import SlotFacts, write_rows


@dataclass(frozen=True, kw_only=True)
class Facts(SlotFacts, npu_quant_rows_pto.Facts):
    ready_on_host: bool


def program(a: Arguments, facts: SlotFacts) -> None:
    """Writes rows of ``cache [slots, D]`` int8 and ``scale_cache [slots, 1]`` float16.

    Args:
        a: ``x``, of which T rows count, ``hadamard [D, D]`` or None, ``slots
            [1, T * slot_words]`` int32, the caches.
    """
    slot_words = facts.slot_words
    for start, rows in tiles(a.slots.shape[1] // slot_words, "QUANT_KEY"):
        values, scales = index_rows(a, start, rows)
        # a row of 32 bytes, the smallest that UB holds
        padded = pypto.tensor([TOKENS, 16], F16, "scales")
        pypto.set_vec_tile_shapes(TOKENS, 16)
        pypto.assemble(scales, [0, 0], padded)
        written = [(values, a.cache), (padded, a.scale_cache)]
        write_rows("QUANT_ROW", written, a.slots, start, rows, slot_words=slot_words)


@functools.cache
def kernel(facts: Facts) -> Callable:
    """The kernel of :func:`program`; one binary serves every number of tokens and slots."""
    D, S, half = pypto.DYNAMIC, pypto.STATIC, PYPTO_DTYPES[facts.dtype]

    @jit(runtime_options=runtime_options("slots", ready_on_host=facts.ready_on_host))
    def quant_index_update(
        x: pypto.Tensor([D, S], half),
        hadamard: pypto.Tensor([S, S], half),
        slots: pypto.Tensor([S, D], I32),
        cache: pypto.Tensor([D, S], I8),
        scale_cache: pypto.Tensor([D, S], F16),
    ):
        program(arguments(locals(), facts.absent), facts)

    return quant_index_update
