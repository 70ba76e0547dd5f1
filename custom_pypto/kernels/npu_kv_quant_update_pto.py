"""npu_kv_quant_update_pto as a PyPTO program: per tile of tokens one vector task for each tile of
128 elements, then a task per token writes its row.
"""

import functools
from collections.abc import Callable

import pypto

from . import DTYPES, Arguments, runtime_options
from .pypto_versions import jit
from .quantiser import FLOAT, TOKENS, loaded, quantised, tiles, write_rows

TILE = 128  # elements per scale


def program(a: Arguments, *, slot_words: int) -> None:
    """Writes ``nope | rope | scales`` to the rows of ``cache [slots, .]``, seen as float32: PyPTO
    0.2.0 views narrow rows wrongly as a type of fewer bytes.

    Args:
        a: ``latent [T, L]``, ``rope [T, R]``, ``slots [1, T * slot_words]`` int32, ``cache``.
    """
    latent, rope = a.latent.shape[1], a.rope.shape[1]
    width = -(-a.cache.shape[1] // 8) * 8  # whole blocks of 32 bytes
    for start, rows in tiles(a.latent.shape[0], "QUANT"):
        x = loaded(a.latent, start, rows)
        row = pypto.tensor([TOKENS, width], FLOAT, "row")
        for tile in range(latent // TILE):
            # else each operation becomes a task of its own
            pypto.set_pass_options(sg_set_scope=1 + tile)
            part = pypto.view(x, [TOKENS, TILE], [0, tile * TILE], valid_shape=[rows, TILE])
            values, scales = quantised(part)
            values = pypto.clone(pypto.view(input=values, dtype=FLOAT))
            pypto.assemble(values, [0, tile * TILE // 4], row)
            pypto.assemble(scales, [0, (latent + 2 * rope) // 4 + tile], row)
        pypto.set_pass_options(sg_set_scope=-1)
        ropes = pypto.view(input=pypto.clone(loaded(a.rope, start, rows)), dtype=FLOAT)
        pypto.assemble(pypto.clone(ropes), [0, latent // 4], row)
        write_rows([(row, a.cache)], a.slots, start, rows, slot_words=slot_words)


@functools.cache
def kernel(*, dtype: str, slot_words: int, ready_on_host: bool) -> Callable:
    """The kernel of :func:`program`; one binary serves every number of tokens and slots."""
    D, S, half = pypto.DYNAMIC, pypto.STATIC, DTYPES[dtype]

    @jit(runtime_options=runtime_options("slots", ready_on_host=ready_on_host))
    def kv_quant_update(
        latent: pypto.Tensor([D, S], half),
        rope: pypto.Tensor([D, S], half),
        slots: pypto.Tensor([S, D], pypto.DT_INT32),
        cache: pypto.Tensor([D, S], FLOAT),
    ):
        program(Arguments(**locals()), slot_words=slot_words)

    return kv_quant_update
