"""npu_kv_quant_update_pto as a PyPTO program: per tile of tokens one vector task for each scale
group of 128 elements, then a task per token writes its row.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pypto

from . import F32, I32, PYPTO_DTYPES, Arguments, arguments, begin_task, end_task, runtime_options
from .pypto_versions import jit, words
from .quantizer import SCALE_GROUP, TOKENS, loaded, quantized, tiles
from .slots import SlotFacts, write_rows
from .tiling import round_up


@dataclass(frozen=True, kw_only=True)
class Facts(SlotFacts):
    dtype: str
    ready_on_host: bool


def program(a: Arguments, facts: SlotFacts) -> None:
    """Writes ``nope | rope | scales`` to the rows of ``cache [slots, .]``, seen as float32.

    Args:
        a: ``latent [T, L]``, ``rope [T, R]``, ``slots [1, T * slot_words]`` int32, ``cache``.
    """
    latent, rope = a.latent.shape[1], a.rope.shape[1]
    width = round_up(a.cache.shape[1], 8)  # whole blocks of 32 bytes
    for start, rows in tiles(a.latent.shape[0], "QUANT"):
        x = loaded(a.latent, start, rows)
        row = pypto.tensor([TOKENS, width], F32, "row")
        for group in range(latent // SCALE_GROUP):
            begin_task(1 + group)
            at, valid = [0, group * SCALE_GROUP], [rows, SCALE_GROUP]
            part = pypto.view(x, [TOKENS, SCALE_GROUP], at, valid_shape=valid)
            values, scales = quantized(part)
            pypto.assemble(words(values), [0, group * SCALE_GROUP // 4], row)
            pypto.assemble(scales, [0, (latent + 2 * rope) // 4 + group], row)
        end_task()
        ropes = words(pypto.clone(loaded(a.rope, start, rows)))
        pypto.assemble(ropes, [0, latent // 4], row)
        written = [(row, a.cache)]
        write_rows("QUANT_ROW", written, a.slots, start, rows, slot_words=facts.slot_words)


@functools.cache
def kernel(facts: Facts) -> Callable:
    """The kernel of :func:`program`; one binary serves every number of tokens and slots."""
    D, S, half = pypto.DYNAMIC, pypto.STATIC, PYPTO_DTYPES[facts.dtype]

    @jit(runtime_options=runtime_options("slots", ready_on_host=facts.ready_on_host))
    def kv_quant_update(
        latent: pypto.Tensor([D, S], half),
        rope: pypto.Tensor([D, S], half),
        slots: pypto.Tensor([S, D], I32),
        cache: pypto.Tensor([D, S], F32),
    ):
        program(arguments(locals()), facts)

    return kv_quant_update
