"""npu_quant_lightning_indexer_pto as a PyPTO program: that of npu_lightning_indexer_pto with
products of int8 in int32, and the scales of the keys as factors of their scores.
"""

import functools
from collections.abc import Callable

import pypto

from . import DTYPES, Arguments, runtime_options
from .npu_lightning_indexer_pto import F32, I32, Selector, in_float32, one_task, widest
from .npu_lightning_indexer_pto import program as indexer
from .tiling import IndexerTiling, indexer_tiling

SCALES = 64  # the first of the scopes for the scales, behind those of the tokens


class QuantSelector(Selector):
    """Arguments beside those of :class:`Selector`: ``query_scale [T * N1, 1]`` and
    ``key_scale [blocks, block_size]``, float16 or float32.
    """

    product = I32

    def factors(self, at) -> list:
        scale = pypto.view(self.a.query_scale, [self.heads, 1], [at, 0])
        return [*super().factors(at), scale]

    def scores(self, row, sequence, first, size, visible) -> list:
        self.scale_K = self.key_scales(sequence, first, size, widest(visible))
        return super().scores(row, sequence, first, size, visible)

    def by_key(self, score_K, begin):
        return pypto.mul(score_K, pypto.view(self.scale_K, score_K.shape, [0, begin]))

    def key_scales(self, sequence, first, size, most):
        """``[1, size]``, once per chunk: fewer tasks than one for each tile of keys."""
        a, block_size = self.a, self.block_size
        last, blocks = (most - 1) // block_size, a.key_scale.shape[0]
        scale_K = pypto.tensor([1, size], F32, "key_scales")
        with one_task(SCALES):
            pypto.set_vec_tile_shapes(1, block_size)
            for offset in range(0, size, block_size):
                column = last.min((first + offset) // block_size)
                block = a.block_table[sequence, column].max(0).min(blocks - 1)
                scale = pypto.view(a.key_scale, [1, block_size], [block, 0])
                # mul: an argument is copied by arithmetic only
                pypto.assemble(pypto.mul(in_float32(scale), 1.0), [0, offset], scale_K)
        return scale_K


def program(a: Arguments, **facts) -> None:
    """Fills every row of ``indices``; see :func:`.npu_lightning_indexer_pto.program`."""
    # PyPTO cannot evaluate a class that the body of a kernel names
    indexer(a, selector=QuantSelector, cmp_ratio=1, **facts)


def kernel(
    *,
    weights_dtype: str,
    scale_dtype: str,
    heads: int,
    block_size: int,
    tokens: int,
    batch: int,
    table_width: int,
    ready_on_host: bool,
    **facts,
) -> Callable:
    """The kernel of :func:`program` for a call with these static facts, as that of
    npu_lightning_indexer_pto.
    """
    tiling = indexer_tiling(
        tokens=tokens, batch=batch, heads=heads, block_size=block_size, table_width=table_width
    )
    return _kernel(
        weights_dtype=DTYPES[weights_dtype],
        scale_dtype=DTYPES[scale_dtype],
        heads=heads,
        block_size=block_size,
        tiling=tiling,
        ready_on_host=ready_on_host,
        **facts,
    )


@functools.cache
def _kernel(*, weights_dtype, scale_dtype, tiling: IndexerTiling, ready_on_host: bool, **facts):
    D, S, I8 = pypto.DYNAMIC, pypto.STATIC, pypto.DT_INT8

    @pypto.frontend.jit(
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
