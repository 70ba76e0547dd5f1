"""npu_sparse_flash_attention_pto as a PyPTO program (DeepSeek-V3.2, arXiv 2512.02556).

Four stages per token, the last three once per group of heads:

1. vector: checks the token's row of indices and its sequence's row of the block table;
2. cube: gathers the selected latent and rope rows and multiplies them with the queries;
3. vector: softmax in float32, without the keys that stage 1 masked;
4. cube: gathers the selected values and multiplies the probabilities with them.

All selected keys of a head fit one softmax, so that nothing is rescaled. Workspace per token in
flight: K * (N1 * (4 + 2) + 8) bytes for scores, probabilities and checked indices, and 4 bytes per
entry of the block table.
"""

import functools
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field

import pypto

from . import F32, I32, PYPTO_DTYPES, Arguments, arguments, begin_task, end_task, runtime_options
from .pypto_versions import (
    behind,
    gathered,
    infinite_where,
    jit,
    number,
    padded_indices,
    pieces,
    reciprocal,
)
from .sequences import QueryFacts, query_tiles
from .tiling import AttentionTiling, attention_tiling, power_of_two

CHECKS = 1  # the scope of a token's checks; other scopes have higher numbers
MASKED_SUM = 1e-30  # turns 0/0 of a row without a valid index into 0, vanishes in other sums


@dataclass(frozen=True, kw_only=True)
class AttenderFacts:
    """The facts of :func:`attender`. One binary serves every number of tokens of a class of
    :func:`attention_tiling`, and every block table up to the next power of two.
    """

    heads: int
    block_size: int
    scale: float
    table_width: int  # of the block table, then rounded up
    tokens: InitVar[int]
    tiling: AttentionTiling = field(init=False)

    def __post_init__(self, tokens: int):
        object.__setattr__(self, "table_width", max(power_of_two(self.table_width), 64))
        object.__setattr__(self, "tiling", attention_tiling(tokens=tokens))


@dataclass(frozen=True, kw_only=True)
class AttentionFacts(AttenderFacts, QueryFacts):
    """The facts of both attentions."""

    dtype: str  # of the output
    ready_on_host: bool

    @property
    def rows_behind_query(self) -> int:
        """The rows to append to ``query`` and ``query_rope``."""
        return behind(self.heads)


@dataclass(frozen=True, kw_only=True)
class Facts(AttentionFacts):
    absent: tuple[str, ...]  # of the arguments that a call may lack


def checked_table(block_table, sequence, last_block, width):
    """The block ids of a sequence as a row of ``width``, clamped to existing blocks."""
    pypto.set_vec_tile_shapes(1, width)
    row = [1, width]
    table = pypto.view(block_table, row, [sequence, 0], valid_shape=[1, block_table.shape[1]])
    # relu, here and below, for max(x, 0)
    table = pypto.relu(pypto.cast(table, F32))
    return pypto.cast(pypto.minimum(table, last_block), I32)


def checked_indices(indices, row, last):
    """``(index, mask)``, float32. An index behind the first -1 or outside [0, last] is invalid: its
    mask is 0, and the largest valid index of the row replaces it, a harmless key and value; 0 if no
    index is valid.
    """
    K = indices.shape[1]
    width = padded_indices(K)
    pypto.set_vec_tile_shapes(width)
    order = pypto.reshape(pypto.arange(0.0, float(width), 1.0), [1, width])
    pypto.set_vec_tile_shapes(1, width)
    index = pypto.view(indices, [1, width], [row, 0], valid_shape=[1, K])
    index = pypto.cast(index, F32)
    if K < width:
        index = pypto.fillpad(index, "constant", "-inf")
    ends = pypto.where(pypto.eq(index, -1.0), order, float(width))
    index = pypto.where(pypto.lt(order, pypto.amin(ends, dim=-1, keepdim=True)), index, -1.0)
    valid = pypto.eq(index, pypto.minimum(pypto.relu(index), last))
    mask = pypto.where(valid, 1.0, 0.0)
    safe = pypto.amax(pypto.where(valid, index, 0.0), dim=-1, keepdim=True)
    return pypto.where(valid, index, safe), mask


def checked(a: Arguments, facts: AttenderFacts, row, sequence, visible, splits: Callable) -> tuple:
    """The checked inputs of the gathers and of the softmax.

    ``(index, mask, table)``: ``index`` has the :func:`pieces` for each of ``splits`` of the padded
    number of indices. With ``tiling.apart`` the first pieces do not wait for the others.

    Index arithmetic is float32, since comparisons exist for it only; the cast keeps the order of
    all int32.
    """
    blocks = a.key.shape[0] // facts.block_size
    begin_task(CHECKS)  # else each branch of the computation becomes a stage of its own
    last = number(visible - 1)
    # from ``last``, so that indices and table are connected and stay in one task
    last_block = pypto.sub(number(visible - 1 + blocks - 1), last)
    index, mask = checked_indices(a.indices, row, last)
    first, *others = splits(index.shape[1])
    found = [pieces(index, *first)]
    table = checked_table(a.block_table, sequence, last_block, facts.table_width)
    for scope, split in enumerate(others, CHECKS + 1):
        begin_task(scope if facts.tiling.apart else CHECKS)
        pypto.set_vec_tile_shapes(1, index.shape[1])
        found.append(pieces(index, *split))
    end_task()
    return found, mask, table


def softmax(scores, mask, sinks, *, statistics: bool) -> list:
    """Probabilities of the valid keys; with ``statistics`` also, ``[heads, 1]`` each, the maximum
    of the scores and the sum of exp(score - maximum): -inf and 0 without a valid key.

    Args:
        sinks: ``[heads, 1]``, one more score per head that belongs to no key, or None.
    """
    # masked entries repeat a valid key: the maximum is that of the valid keys
    top = pypto.amax(scores, dim=-1, keepdim=True)
    p = pypto.mul(pypto.exp(pypto.sub(scores, top)), mask)
    of_keys = pypto.add(pypto.sum(p, dim=-1, keepdim=True), MASKED_SUM)
    if sinks is None:
        maximum, total, factor = top, of_keys, reciprocal(of_keys)
    else:
        # relative to the larger of both, so that neither exp overflows
        maximum = pypto.maximum(top, sinks)
        share = pypto.exp(pypto.sub(top, maximum))
        total = pypto.add(pypto.mul(of_keys, share), pypto.exp(pypto.sub(sinks, maximum)))
        factor = pypto.mul(share, reciprocal(total))
    results = [pypto.mul(p, factor)]
    if statistics:
        results += where_valid(of_keys, maximum, total)
    return results


def where_valid(of_keys, maximum, total) -> list:
    """``maximum`` and ``total`` of rows with a valid key, else -inf and 0. ``of_keys`` is the sum
    over the keys, without the sink.
    """
    nothing = pypto.lt(of_keys, 0.5)  # the best valid key alone counts 1
    return [infinite_where(nothing, maximum), pypto.where(nothing, 0.0, total)]


class GatheredRows:
    """The rows of the caches that the indices name, gathered into L1 by each product.

    The loader of :func:`attender`: ``splits(width)`` returns the arguments of its calls of
    :func:`pieces` for ``width`` indices, ``load(index, table)`` takes their results, ``keys()`` and
    ``values()`` return the right operands of a group of heads.
    """

    def __init__(self, a: Arguments, facts: AttenderFacts):
        self.a, self.block_size = a, facts.block_size
        sizes = facts.heads, a.out.shape[1], rope_columns(a)
        self.splits = functools.partial(facts.tiling.splits, *sizes)

    def load(self, index: list, table) -> None:
        self.index = index
        self.gather = functools.partial(gathered, table=table, block_size=self.block_size)

    def keys(self):
        k = self.gather(self.a.key, self.index[-2], transposed=True)
        if self.a.query_rope is None:
            return k
        return beside(k, self.gather(self.a.key_rope, self.index[0], transposed=True), "keys")

    def values(self):
        return self.gather(self.a.value, self.index[-1], transposed=False)


def attender(a: Arguments, facts: AttenderFacts, loader: Callable = GatheredRows) -> Callable:
    """``attend(row, sequence, visible, selection)``, which builds the output rows of one token
    from the row ``selection`` of the indices.

    Args:
        a: ``query [T * heads, L]``; ``query_rope [T * heads, R]`` or None;
            ``key``, ``key_rope`` and ``value`` ``[blocks * block_size, …]``, of which ``value`` may
            be ``key``; ``indices [., K]`` and ``block_table [B, W]`` int32; ``sinks [heads, 1]``
            float32 or None; ``out [T * heads, L]``; ``softmax_max`` and ``softmax_sum``
            ``[T * heads, 1]`` float32, or None.
        loader: class that loads keys and values, like :class:`GatheredRows`.
    """
    heads, tiling, dtype, latent = facts.heads, facts.tiling, a.out.dtype, a.out.shape[1]
    rope, statistics = rope_columns(a), a.softmax_max is not None
    rows = loader(a, facts)

    def attend(row, sequence, visible, selection):
        pypto.set_pass_options(**tiling.pass_options)  # of the calling loop
        pypto.experimental.set_operation_options(combine_axis=True)
        if pypto.cond(visible > 0):
            index, mask, table = checked(a, facts, selection, sequence, visible, rows.splits)
            width = mask.shape[1]
            scores_tiles, output_tiles = tiling.cube_tiles(heads, latent, rope, width)
            rows.load(index, table)
            for first in range(0, heads, tiling.heads):
                group = min(tiling.heads, heads - first)
                at = row * heads + first
                pypto.set_cube_tile_shapes(*scores_tiles)
                q, k = queries(a, at, group), rows.keys()
                logits = pypto.matmul(q, k, F32, a_trans=False, b_trans=True)

                sinks = None if a.sinks is None else pypto.view(a.sinks, [group, 1], [first, 0])
                softmax_rows = tiling.softmax_rows(width, sinks=sinks is not None)
                pypto.set_vec_tile_shapes(softmax_rows, width)
                logits = pypto.mul(logits, facts.scale)
                p, *results = softmax(logits, mask, sinks, statistics=statistics)
                p = pypto.cast(p, dtype)

                pypto.set_cube_tile_shapes(*output_tiles)
                pypto.set_matrix_size([group, width, latent])
                write(a, at, pypto.matmul(p, rows.values(), dtype), *results)
        else:
            pypto.set_vec_tile_shapes(16, latent)
            results = []
            if statistics:
                zeros = pypto.full([heads, 1], 0.0, F32)
                results = where_valid(zeros, zeros, zeros)
            write(a, row * heads, pypto.full([heads, latent], 0.0, dtype), *results)

    return attend


def rope_columns(a: Arguments) -> int:
    """The width of the RoPE part, 0 without one."""
    return 0 if a.query_rope is None else a.query_rope.shape[1]


def queries(a: Arguments, at, group: int):
    """The queries of ``group`` heads, from row ``at`` on."""
    q = pypto.view(a.query, [group, a.query.shape[1]], [at, 0])
    if a.query_rope is None:
        return q
    q_rope = pypto.view(a.query_rope, [group, a.query_rope.shape[1]], [at, 0])
    return beside(q, q_rope, "query")


def write(a: Arguments, at, out, *statistics) -> None:
    """Stores results straight into the arguments: a local tensor would serialise the tokens."""
    arguments = a.out, a.softmax_max, a.softmax_sum
    for result, argument in zip((out, *statistics), arguments, strict=False):
        pypto.assemble(result, [at, 0], argument)


def program(a: Arguments, facts: AttentionFacts, loader: Callable = GatheredRows) -> None:
    """Writes every row of ``out``; see :func:`attender` and :func:`query_tiles`."""
    attend = attender(a, facts, loader)
    tokens, capacity = a.indices.shape[0], a.block_table.shape[1] * facts.block_size
    for row, sequence, (visible,) in query_tiles(
        facts, a.query_lengths, a.key_lengths, tokens, capacity, name="SFA"
    ):
        attend(row, sequence, visible, row)


def beside(left, right, name: str):
    """``[left | right]``, read from both by the matmul and never written."""
    n, width = left.shape
    joined = pypto.tensor([n, width + right.shape[1]], left.dtype, name)
    pypto.assemble(left, [0, 0], joined)
    pypto.assemble(right, [0, width], joined)
    return joined


def options(facts: AttentionFacts) -> dict:
    """Options of the kernels of both attentions."""
    lengths, ready = ("query_lengths", "key_lengths"), facts.ready_on_host
    return runtime_options(*lengths, ready_on_host=ready, layout=facts.layout)


@functools.cache
def kernel(facts: Facts) -> Callable:
    """The kernel of :func:`program`."""
    D, S = pypto.DYNAMIC, pypto.STATIC
    dtype = PYPTO_DTYPES[facts.dtype]

    @jit(runtime_options=options(facts))
    def sparse_flash_attention(
        query: pypto.Tensor([D, S], dtype),
        query_rope: pypto.Tensor([D, S], dtype),
        key: pypto.Tensor([D, S], dtype),
        key_rope: pypto.Tensor([D, S], dtype),
        value: pypto.Tensor([D, S], dtype),
        indices: pypto.Tensor([D, S], I32),
        sinks: pypto.Tensor([S, S], F32),
        query_lengths: pypto.Tensor([D], I32),
        key_lengths: pypto.Tensor([D], I32),
        block_table: pypto.Tensor([D, D], I32),
        out: pypto.Tensor([D, S], dtype),
        softmax_max: pypto.Tensor([D, S], F32),
        softmax_sum: pypto.Tensor([D, S], F32),
    ):
        program(arguments(locals(), facts.absent), facts)

    return sparse_flash_attention
