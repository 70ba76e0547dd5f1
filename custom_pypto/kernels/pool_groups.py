"""pool_groups as a PyPTO program: for each complete group a vector task per tile of columns.

The tokens of a half of a group's rows are at most three runs of consecutive rows: up to the end of
the ring, from its begin, and of the new tokens. Each run is loaded with the number of its rows as a
valid shape, maybe none, and filled up with gates that weigh nothing; the largest gates and sums of
the runs then make one softmax. Groups of new tokens alone have one run for each half.

Memory: nothing but the outputs.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import pypto

from . import (
    F32,
    I32,
    PYPTO_DTYPES,
    Arguments,
    arguments,
    begin_task,
    end_task,
    loop,
    runtime_options,
)
from .pypto_versions import div, jit
from .tiling import largest_divisor

NOTHING = -3e38  # a gate whose exponential is 0 beside any other
ELEMENTS = 4096  # of a tile: a token's values and gates, in both dtypes, for up to six runs


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One binary serves every number of sequences, new tokens and blocks."""

    dtype: str
    ring: int  # rows of a block of state
    ready_on_host: bool


class Run(NamedTuple):
    """``count`` rows of ``source`` from ``row`` on, whose first one has this place in its group."""

    source: object
    row: object
    half: int  # of an overlapping row
    place: object
    count: object


class Sequence:
    """Sequence ``b``; no value of the arguments leads outside of a tensor."""

    def __init__(self, a: Arguments, b, facts: Facts):
        self.a, self.b, self.ring = a, b, facts.ring
        self.rate, wide = a.bias.shape
        self.width = a.sums.shape[1]
        self.halves = wide // self.width
        batch = a.blocks.shape[0]
        self.tokens, self.groups = a.values.shape[0] // batch, a.sums.shape[0] // batch
        # of the result of a max, which is int64; elements of tensors are int32
        self.start, self.length = a.start[b].max(0), a.lengths[b].max(0)
        blocks = a.state.shape[0] // facts.ring
        self.known = (a.blocks[b] >= 0) * (a.blocks[b] < blocks)
        self.block = a.blocks[b].max(0).min(blocks - 1) * facts.ring

    def kinds(self) -> tuple:
        """How many groups are complete, and how many of these have tokens from the ring."""
        r, first = self.rate, self.start // self.rate
        complete = (self.length // r - first).max(0).min(self.groups)
        complete.as_variable()
        old = ((self.start + r - 1) // r - first + self.halves - 1).min(complete)
        old.as_variable()
        return complete, old

    def runs(self, group, *, ring: bool) -> Iterator[Run]:
        """Those of the group with this place among the new ones."""
        r = self.rate
        for half in range(self.halves):
            low = (self.start // r + group + half - (self.halves - 1)) * r
            begin = low.max(0)
            if ring:
                count = ((low + r).min(self.start) - begin).max(0) * self.known
                row, place = begin % self.ring, (begin - low).max(0).min(r - 1)
                before = count.min(self.ring - row)
                yield Run(self.a.state, self.block + row, half, place, before)
                behind = (place + before).min(r - 1)
                yield Run(self.a.state, self.block, half, behind, count - before)
            # tokens that the length counts and nobody passed are none
            # times 1: the PyPTO of CANN 9.2 takes ``x - max(x, y, z)`` for ``x - max(x, y)``
            new = (begin.max(self.start) * (self.tokens > 0)).max(self.length - self.tokens)
            column = (self.tokens - self.length + new).max(0).min(self.tokens - 1)
            place, count = (new - low).max(0).min(r - 1), (low + r - new).max(0)
            yield Run(self.a.values, self.b * self.tokens + column, half, place, count)

    def row_of(self, group):
        return self.b * self.groups + group

    def pool(self, group, *, ring: bool) -> None:
        """Writes the sums of a complete group."""
        runs = [*self.runs(group, ring=ring)]
        columns = largest_divisor(self.width, 16, max(ELEMENTS // self.rate, 16))
        columns = min(columns, largest_divisor(self.width, 16, 128))
        for column in range(0, self.width, columns):
            begin_task()
            parts = [self.softmax(run, column, columns) for run in runs]
            pypto.set_vec_tile_shapes(1, columns)
            largest = functools.reduce(pypto.maximum, [part[0] for part in parts])
            scales = [pypto.exp(pypto.sub(part[0], largest)) for part in parts]
            scaled = [
                [pypto.mul(scale, x) for x in part[1:]]
                for scale, part in zip(scales, parts, strict=True)
            ]
            weights, rows = (functools.reduce(pypto.add, x) for x in zip(*scaled, strict=True))
            pypto.assemble(div(rows, weights), [self.row_of(group), column], self.a.sums)
            end_task()

    def softmax(self, run: Run, column: int, columns: int) -> tuple:
        """The largest gate of each column, the sum of exponentials, and that of their products with
        the values."""
        shape, valid = [self.rate, columns], [run.count, columns]
        column += run.half * self.width

        def view(x, row, first):
            return pypto.view(x, shape, [row, first], valid_shape=valid)

        pypto.set_vec_tile_shapes(*shape)
        gates = pypto.cast(view(run.source, run.row, self.halves * self.width + column), F32)
        gates = pypto.add(gates, view(self.a.bias, run.place, column))
        values = pypto.cast(view(run.source, run.row, column), F32)
        gates = pypto.fillpad(gates, "constant", float("-inf"))
        # of nothing but -inf the exponentials would be NaN
        gates = pypto.where(pypto.lt(gates, NOTHING), NOTHING, gates)
        largest = pypto.amax(gates, dim=-2, keepdim=True)
        weights = pypto.exp(pypto.sub(gates, largest))
        rows = pypto.mul(weights, pypto.fillpad(values, "constant", 0.0))
        return largest, *(pypto.sum(x, -2, keepdim=True) for x in (weights, rows))


def program(a: Arguments, facts: Facts) -> None:
    """Arguments as in the op's schema, with these views: ``state [blocks * ring, W]`` and
    ``values [B * S, W]``. Written: ``sums [B * n, D]``.
    """
    for b in loop("POOL", a.blocks.shape[0]):
        sequence = Sequence(a, b, facts)
        complete, old = sequence.kinds()
        for i in loop("POOL_OLD", old):
            sequence.pool(i, ring=True)
        for i in loop("POOL_NEW", old, complete):
            sequence.pool(i, ring=False)
        for i in loop("POOL_INCOMPLETE", complete, sequence.groups):
            pypto.set_vec_tile_shapes(1, sequence.width)
            zeros = pypto.full([1, sequence.width], 0.0, F32)
            pypto.assemble(zeros, [sequence.row_of(i), 0], a.sums)


@functools.cache
def kernel(facts: Facts) -> Callable:
    """The kernel of :func:`program`."""
    D, rows, dtype = [pypto.DYNAMIC], [pypto.DYNAMIC, pypto.STATIC], PYPTO_DTYPES[facts.dtype]
    control = "blocks", "start", "lengths"

    @jit(runtime_options=runtime_options(*control, ready_on_host=facts.ready_on_host))
    def pool_groups(
        state: pypto.Tensor(rows, dtype),
        blocks: pypto.Tensor(D, I32),
        values: pypto.Tensor(rows, dtype),
        bias: pypto.Tensor([pypto.STATIC] * 2, F32),
        start: pypto.Tensor(D, I32),
        lengths: pypto.Tensor(D, I32),
        sums: pypto.Tensor(rows, F32),
    ):
        program(arguments(locals()), facts)

    return pool_groups
