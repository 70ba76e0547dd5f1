"""npu_quant_lightning_indexer_pto as a PyPTO program: that of npu_lightning_indexer_pto with
products of int8 in int32, and the scales of the keys as factors of their scores.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pypto
from pypto.experimental import gather_in_ub

from . import F32, I8, I32, PYPTO_DTYPES, Arguments, arguments, begin_task, end_task
from . import npu_lightning_indexer_pto as indexer
from .npu_lightning_indexer_pto import Selector
from .pypto_versions import bounded, computed, jit, number
from .sequences import MOST_ROWS
from .tiling import power_of_two, round_up

SCALES = 64  # first scope of the scales, behind the scopes of the tokens


@dataclass(frozen=True, kw_only=True)
class Facts(indexer.Facts):
    """One binary serves every cache up to the next power of two, too."""

    scale_dtype: str  # of both scales
    cache_blocks: int  # of the cache, then rounded up

    def __post_init__(self, *sizes: int):
        super().__post_init__(*sizes)
        object.__setattr__(self, "cache_blocks", power_of_two(self.cache_blocks))


class QuantSelector(Selector):
    """Arguments besides those of :class:`Selector`: ``query_scale [T * N1, 1]`` and
    ``key_scale [blocks, block_size]``, float16 or float32.
    """

    product = I32

    def factors(self, at) -> list:
        scale = pypto.view(self.a.query_scale, [self.heads, 1], [at, 0])
        return [*super().factors(at), scale]

    def scores(self, row, sequence, first, size, visible) -> list:
        self.scale_K = self.key_scales(sequence, first, size)
        return super().scores(row, sequence, first, size, visible)

    def by_key(self, score_K, begin):
        return pypto.mul(score_K, pypto.view(self.scale_K, score_K.shape, [0, begin]))

    def key_scales(self, sequence, first, size):
        """``[1, size]``: one gather per chunk, since a load per block would be a task each.

        Blocks behind the sequence give factors of ignored scores.
        """
        block_size = self.block_size
        begin_task(SCALES)
        ids = self.block_ids(sequence, first // block_size, size // block_size)
        page = pypto.full([1, 64], 0, I32)
        end_task()
        cache = bounded(self.a.key_scale, self.facts.cache_blocks, block_size)
        begin_task(SCALES + 1)
        pypto.set_vec_tile_shapes(size // block_size, block_size)
        # the cache as one large page, whose id is 0
        scales = computed(gather_in_ub(cache, ids, page, MOST_ROWS, -2))
        end_task()
        return pypto.reshape(scales, [1, size])

    def block_ids(self, sequence, begin, count: int):
        """``[1, count]`` int32: the ids of a sequence's blocks from block ``begin`` on, clamped to
        existing blocks.
        """
        table = self.a.block_table
        last = number(self.a.key_scale.shape[0] - 1)
        width = round_up(count, 64)
        valid = [1, pypto.min(table.shape[1] - begin, width)]
        pypto.set_vec_tile_shapes(1, width)
        ids = pypto.cast(pypto.view(table, [1, width], [sequence, begin], valid_shape=valid), F32)
        ids = pypto.minimum(pypto.relu(pypto.fillpad(ids, "constant", 0.0)), last)
        return pypto.cast(pypto.view(ids, [1, count], [0, 0]), I32)


def program(a: Arguments, facts: Facts) -> None:
    """Fills every row of ``indices``; see :func:`.npu_lightning_indexer_pto.program`."""
    # not in the body of the kernel, where PyPTO cannot evaluate the name of a class
    indexer.program(a, facts, QuantSelector)


@functools.cache
def kernel(facts: Facts) -> Callable:
    """The kernel of :func:`program`."""
    D, S = pypto.DYNAMIC, pypto.STATIC
    weights_dtype, scale_dtype = PYPTO_DTYPES[facts.weights_dtype], PYPTO_DTYPES[facts.scale_dtype]

    @jit(runtime_options=indexer.options(facts))
    def quant_lightning_indexer(
        query: pypto.Tensor([D, S], I8),
        weights: pypto.Tensor([D, S], weights_dtype),
        query_scale: pypto.Tensor([D, S], scale_dtype),
        key: pypto.Tensor([D, S], I8),
        key_scale: pypto.Tensor([D, S], scale_dtype),
        query_lengths: pypto.Tensor([D], I32),
        key_lengths: pypto.Tensor([D], I32),
        block_table: pypto.Tensor([D, D], I32),
        indices: pypto.Tensor([D, S], I32),
    ):
        program(arguments(locals(), ("values",)), facts)

    return quant_lightning_indexer
