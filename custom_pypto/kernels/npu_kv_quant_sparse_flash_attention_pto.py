"""npu_kv_quant_sparse_flash_attention_pto as a PyPTO program: that of
npu_sparse_flash_attention_pto, on rows that the vector cores dequantize once per token.

Workspace per token in flight, besides that program's: K * (L + R) * 2 bytes for the rows.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pypto
from pypto.experimental import gather_in_ub

from . import F16, F32, I8, I32, PYPTO_DTYPES, Arguments, arguments, begin_task, end_task
from . import npu_sparse_flash_attention_pto as attention
from .npu_sparse_flash_attention_pto import CHECKS, AttentionFacts
from .pypto_versions import bounded, floats, jit
from .quantizer import SCALE_GROUP
from .tiling import power_of_two

ROWS = 64  # per vector task: smaller tasks cost edges, larger ones leave cores idle
# arguments that only npu_sparse_flash_attention_pto has
ABSENT = ("query_rope", "key_rope", "value", "sinks", "softmax_max", "softmax_sum")


@dataclass(frozen=True, kw_only=True)
class Facts(AttentionFacts):
    """One binary serves every cache up to the next power of two, too."""

    cache_rows: int  # of the cache, then rounded up

    def __post_init__(self, tokens: int):
        super().__post_init__(tokens)
        object.__setattr__(self, "cache_rows", power_of_two(self.cache_rows))


class DequantizedRows:
    """The selected rows of a cache ``nope | rope | scales``, in the dtype of the output."""

    def __init__(self, a: Arguments, facts: Facts):
        self.a, self.block_size, self.cache_rows = a, facts.block_size, facts.cache_rows
        self.latent = a.out.shape[1]
        self.rope = a.query.shape[1] - self.latent

    def splits(self, width: int) -> list[tuple[int, int]]:
        return [(min(ROWS, width), 1)]

    def load(self, index: list, table) -> None:
        ((parts,),) = index
        width = sum(part.shape[1] for part in parts)
        self.rows = pypto.tensor([width, self.latent + self.rope], self.a.out.dtype, "rows")
        for i, part in enumerate(parts):
            # else gathers and arithmetic become tasks of their own
            begin_task(CHECKS + 1 + i)
            self._dequantize(i * parts[0].shape[1], part, table)
        end_task()

    def keys(self):
        return self.rows

    def values(self):
        return pypto.view(self.rows, [self.rows.shape[0], self.latent], [0, 0])

    def _dequantize(self, at: int, index, table) -> None:
        """Writes the rows that ``index`` names, from row ``at`` on."""
        latent, dtype, n = self.latent, self.a.out.dtype, index.shape[1]
        gather = functools.partial(self._columns, index, table)
        pypto.set_vec_tile_shapes(n, latent)
        values = gather(0, latent)
        # a row in UB has whole blocks of 32 bytes: the scales are the end of the last block
        groups, block = latent // SCALE_GROUP, 32
        start = self.a.key.shape[1] - block
        pypto.set_vec_tile_shapes(n, block)
        scales = floats(gather(start, block))
        pypto.set_vec_tile_shapes(n, SCALE_GROUP)
        for group in range(groups):
            x = pypto.view(values, [n, SCALE_GROUP], [0, group * SCALE_GROUP])
            x = pypto.cast(pypto.cast(x, F16), F32)
            scale = pypto.view(scales, [n, 1], [0, block // 4 - groups + group])
            x = pypto.cast(pypto.mul(x, scale), dtype)
            pypto.assemble(x, [at, group * SCALE_GROUP], self.rows)
        pypto.set_vec_tile_shapes(n, 2 * self.rope)
        rope = pypto.view(input=gather(latent, 2 * self.rope), dtype=dtype)
        pypto.assemble(pypto.clone(rope), [at, latent], self.rows)

    def _columns(self, index, table, first: int, count: int):
        """``count`` bytes of each row, from byte ``first`` on."""
        columns = bounded(self.a.key, self.cache_rows, count, first)
        return gather_in_ub(columns, index, table, self.block_size, -2)


def program(a: Arguments, facts: Facts) -> None:
    """Writes every row of ``out``; see :func:`.npu_sparse_flash_attention_pto.program`."""
    # not in the body of the kernel, where PyPTO cannot evaluate the name of a class
    attention.program(a, facts, DequantizedRows)


@functools.cache
def kernel(facts: Facts) -> Callable:
    """The kernel of :func:`program`; ``query`` is ``[T * heads, L + R]``."""
    D, S = pypto.DYNAMIC, pypto.STATIC
    dtype = PYPTO_DTYPES[facts.dtype]

    @jit(runtime_options=attention.options(facts))
    def kv_quant_sparse_flash_attention(
        query: pypto.Tensor([D, S], dtype),
        key: pypto.Tensor([D, S], I8),
        indices: pypto.Tensor([D, S], I32),
        query_lengths: pypto.Tensor([D], I32),
        key_lengths: pypto.Tensor([D], I32),
        block_table: pypto.Tensor([D, D], I32),
        out: pypto.Tensor([D, S], dtype),
    ):
        program(arguments(locals(), ABSENT), facts)

    return kv_quant_sparse_flash_attention
