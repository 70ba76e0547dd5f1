"""npu_quant_lightning_indexer_pto as a PyPTO program: that of npu_lightning_indexer_pto with
products of int8 in int32, and the scales of the keys as factors of their scores.
"""

import functools
from collections.abc import Callable

import pypto
from pypto.experimental import gather_in_ub

from . import DTYPES, Arguments, runtime_options
from .npu_lightning_indexer_pto import (
    F32,
    I32,
    Selector,
    in_float32,
    one_task,
    round_up,
)
from .npu_lightning_indexer_pto import program as indexer
from .npu_sparse_flash_attention_pto import number
from .pypto_versions import jit
from .tiling import IndexerTiling, indexer_tiling, power_of_two

SCALES = 64  # the first of the scopes for the scales, behind those of the tokens


class QuantSelector(Selector):
    """Arguments beside those of :class:`Selector`: ``query_scale [T * N1, 1]`` and
    ``key_scale [blocks, block_size]``, float16 or float32, of at most ``cache_blocks`` blocks.
    """

    product = I32

    def __init__(self, a: Arguments, *, cache_blocks: int, **facts):
        super().__init__(a, **facts)
        self.cache_blocks = cache_blocks

    def factors(self, at) -> list:
        scale = pypto.view(self.a.query_scale, [self.heads, 1], [at, 0])
        return [*super().factors(at), scale]

    def scores(self, row, sequence, first, size, visible) -> list:
        self.scale_K = self.key_scales(sequence, first, size)
        return super().scores(row, sequence, first, size, visible)

    def by_key(self, score_K, begin):
        return pypto.mul(score_K, pypto.view(self.scale_K, score_K.shape, [0, begin]))

    def key_scales(self, sequence, first, size):
        """``[1, size]``: one gather per chunk, for each block that is loaded alone is a task.

        Blocks behind the sequence give factors of scores that are ignored.
        """
        block_size, blocks = self.block_size, self.a.key_scale.shape[0]
        with one_task(SCALES):
            ids = self.block_ids(sequence, first // block_size, size // block_size)
            page = pypto.full([1, 64], 0, I32)
        # a view: PyPTO 0.2.0 generates no address for an argument that is gathered whole
        shape, valid = [self.cache_blocks, block_size], [blocks, block_size]
        cache = pypto.view(self.a.key_scale, shape, [0, 0], valid_shape=valid)
        with one_task(SCALES + 1):
            pypto.set_vec_tile_shapes(size // block_size, block_size)
            # the cache as one large page, whose id is 0
            scales = gather_in_ub(cache, ids, page, 2**24, -2)
            # mul: what is gathered is written by arithmetic only
            scales = pypto.mul(in_float32(scales), 1.0)
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


def program(a: Arguments, *, cache_blocks: int, **facts) -> None:
    """Fills every row of ``indices``; see :func:`.npu_lightning_indexer_pto.program`.

    Args:
        cache_blocks: static bound of the blocks of ``key_scale``.
    """
    # PyPTO cannot evaluate a class that the body of a kernel names
    selector = functools.partial(QuantSelector, cache_blocks=cache_blocks)
    indexer(a, selector=selector, cmp_ratio=1, **facts)


def kernel(
    *,
    weights_dtype: str,
    scale_dtype: str,
    heads: int,
    block_size: int,
    tokens: int,
    batch: int,
    table_width: int,
    cache_blocks: int,
    ready_on_host: bool,
    **facts,
) -> Callable:
    """The kernel of :func:`program` for a call with these static facts, as that of
    npu_lightning_indexer_pto. One binary serves every cache up to the next power of two, too.
    """
    tiling = indexer_tiling(
        tokens=tokens, batch=batch, heads=heads, block_size=block_size, table_width=table_width
    )
    return _kernel(
        weights_dtype=DTYPES[weights_dtype],
        scale_dtype=DTYPES[scale_dtype],
        heads=heads,
        block_size=block_size,
        cache_blocks=power_of_two(cache_blocks),
        tiling=tiling,
        ready_on_host=ready_on_host,
        **facts,
    )


@functools.cache
def _kernel(*, weights_dtype, scale_dtype, tiling: IndexerTiling, ready_on_host: bool, **facts):
    D, S, I8 = pypto.DYNAMIC, pypto.STATIC, pypto.DT_INT8

    @jit(
        runtime_options=runtime_options(
            "query_lengths",
            "key_lengths",
            "block_table",
            ready_on_host=ready_on_host,
            layout=facts["layout"],
            iterations=128 // tiling.tokens,
        ),
    )
    def npu_quant_lightning_indexer_pto(
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
        program(Arguments(**locals()), tiling=tiling, **facts)

    return npu_quant_lightning_indexer_pto
