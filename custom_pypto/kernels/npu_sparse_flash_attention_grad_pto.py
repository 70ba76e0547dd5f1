"""npu_sparse_flash_attention_grad_pto as a PyPTO program.

Stages per query token:

1. vector: the cache rows that the indices name, and the places of their terms in the sums;
2. cube: the scores again, and ``dP = d_out x values^T``, float32;
3. vector: P from the forward's statistics, ``D = sum(P * dP)``, ``dS = scale * P * (dP - D)``;
4. cube: ``dS x keys``, the query's gradient, and ``[dS; P]^T x [query; d_out]``, a row of terms for
   each index, of its key's and its value's role together;
5. vector: adds these rows to the sums of :mod:`.row_sums`.

Behind all tokens, vector: the sums in the dtype of the keys.

Memory besides the results: sums of rows of L + R elements, and of L for values of their own.
Workspace per token in flight, in bytes: K * (N1 * (8 + 4) + (L + R) * 4 + 16).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pypto

from . import F32, I32, PYPTO_DTYPES, Arguments, arguments, loop, runtime_options
from .gradient_tiling import GradientTiling
from .pypto_versions import after_all, jit
from .row_sums import PARTS, add_rows, parts_of, row_tiles, store_total, sums_of
from .selected_attention import attention_scores
from .selected_rows import KeyFacts, capacity, gather_rows, selected_rows
from .sequences import query_tiles

NOTHING = 3e38  # as the maximum of a token without a key it makes exp 0


@dataclass(frozen=True, kw_only=True)
class Facts(KeyFacts):
    scale: float
    rope: bool  # whether the call has it, like the next two
    own_value: bool
    sinks: bool
    ready_on_host: bool
    tiling: GradientTiling = GradientTiling()

    @property
    def absent(self) -> tuple[str, ...]:
        """The arguments that the call lacks."""
        found = [] if self.rope else ["query_rope", "key_rope", "d_query_rope", "d_key_rope"]
        if not self.own_value:
            found += ["d_value", *(f"value_sums_{part}" for part in range(PARTS))]
        return tuple(found if self.sinks else [*found, "sinks", "sink_terms", "d_sinks"])


class Backward:
    """The stages. ``token(row, sequence, visible, part)`` and ``nothing(row)`` build the rows of
    one token, ``results()`` those of the cache.
    """

    def __init__(self, a: Arguments, facts: Facts):
        self.a, self.facts, self.tiling = a, facts, facts.tiling
        self.dtype, self.latent, self.heads = a.key.dtype, a.key.shape[1], facts.rows
        self.rope = 0 if a.query_rope is None else a.query_rope.shape[1]
        self.sums, self.value_sums = sums_of(a, "sums"), sums_of(a, "value_sums")

    def token(self, row, sequence, visible, part: int) -> None:
        pypto.set_pass_options(**self.tiling.pass_options)  # of the calling loop
        pypto.experimental.set_operation_options(combine_axis=True)
        a, heads, latent, tiling = self.a, self.heads, self.latent, self.tiling
        splits = functools.partial(tiling.splits, heads, latent, self.rope)
        found, places, mask = selected_rows(a, self.facts, row, sequence, visible, splits)
        width = mask.shape[1]
        for_rope, for_scores, for_query, for_query_rope = found
        gather = gather_rows(a)

        query, caches, selected = [self.of_query(row)], [a.key], [for_scores]
        if self.rope:
            query, caches = [*query, self.of_rope(row)], [*caches, a.key_rope]
            selected = [*selected, for_rope]
        logits = attention_scores(query, caches, selected, gather, tiling)
        v = gather(a.value, for_scores, transposed=True)
        dp = pypto.matmul(self.of_out(row), v, F32, a_trans=False, b_trans=True)

        pypto.set_vec_tile_shapes(tiling.softmax_rows(width), width)
        both = pypto.tensor([2 * heads, width], self.dtype, "dS_P")
        for i, half in enumerate(self.probabilities(row, logits, dp, mask)):
            pypto.assemble(half, [i * heads, 0], both)

        # of the heads alone: their products are stored as they are
        ds = pypto.view(both, [self.facts.heads, width], [0, 0])
        pypto.set_cube_tile_shapes(*tiling.query(heads, latent, width))
        keys = gather(a.key, for_query, transposed=False)
        of_heads = pypto.matmul(ds, keys, self.dtype)
        pypto.assemble(of_heads, [row * self.facts.heads, 0], a.d_query)
        if self.rope:
            pypto.set_cube_tile_shapes(*tiling.query(heads, self.rope, width))
            keys = gather(a.key_rope, for_query_rope, transposed=False)
            of_heads = pypto.matmul(ds, keys, self.dtype)
            pypto.assemble(of_heads, [row * self.facts.heads, 0], a.d_query_rope)
        self.add(row, both, places, part)

    def of_query(self, row):
        return pypto.view(
            self.a.query_and_d_out, [self.heads, self.latent], [row * 2 * self.heads, 0]
        )

    def of_out(self, row):
        return pypto.view(
            self.a.query_and_d_out, [self.heads, self.latent], [(row * 2 + 1) * self.heads, 0]
        )

    def of_rope(self, row):
        return pypto.view(self.a.query_rope, [self.heads, self.rope], [row * self.heads, 0])

    def probabilities(self, row, logits, dp, mask) -> tuple:
        """``dS`` and ``P``, in the dtype of the products."""
        a, heads, scale = self.a, self.heads, self.facts.scale
        top = pypto.view(a.softmax_max, [heads, 1], [row * heads, 0])
        total = pypto.view(a.softmax_sum, [heads, 1], [row * heads, 0])
        nothing = pypto.lt(total, 1e-30)
        # exp(x - top) / total as one exponential
        top = pypto.where(
            nothing, NOTHING, pypto.add(top, pypto.log(pypto.where(nothing, 1.0, total)))
        )
        p = pypto.mul(pypto.exp(pypto.sub(pypto.mul(logits, scale), top)), mask)
        delta = pypto.sum(pypto.mul(p, dp), dim=-1, keepdim=True)
        if a.sinks is not None:
            sinks = pypto.view(a.sinks, [heads, 1], [0, 0])
            terms = pypto.mul(pypto.mul(pypto.exp(pypto.sub(sinks, top)), delta), -1.0)
            pypto.assemble(terms, [row * heads, 0], a.sink_terms)
        ds = pypto.mul(pypto.mul(p, pypto.sub(dp, delta)), scale)
        return pypto.cast(ds, self.dtype), pypto.cast(p, self.dtype)

    def add(self, row, both, places, part: int) -> None:
        """Adds the terms of the token's keys and values to the sums."""
        a, heads, latent, tiling = self.a, self.heads, self.latent, self.tiling
        width = both.shape[1]
        ds = pypto.view(both, [heads, width], [0, 0])
        product = functools.partial(pypto.matmul, out_dtype=F32, a_trans=True, b_trans=False)
        rows = pypto.tensor([width, latent + self.rope], F32, "rows")
        if a.d_value is None:
            factors = pypto.view(a.query_and_d_out, [2 * heads, latent], [row * 2 * heads, 0])
            pypto.set_cube_tile_shapes(*tiling.sums(2 * heads, latent, width))
            pypto.assemble(product(both, factors), [0, 0], rows)
        else:
            p = pypto.view(both, [heads, width], [heads, 0])
            pypto.set_cube_tile_shapes(*tiling.sums(heads, latent, width))
            pypto.assemble(product(ds, self.of_query(row)), [0, 0], rows)
            of_value = product(p, self.of_out(row))
            add_rows(self.value_sums[part], places, of_value, tiling.add_rows)
        if self.rope:
            pypto.set_cube_tile_shapes(*tiling.sums(heads, self.rope, width))
            pypto.assemble(product(ds, self.of_rope(row)), [0, latent], rows)
        add_rows(self.sums[part], places, rows, tiling.add_rows)

    def nothing(self, row) -> None:
        a, heads = self.a, self.facts.heads
        for argument, width in ((a.d_query, self.latent), (a.d_query_rope, self.rope)):
            if argument is not None:
                pypto.set_vec_tile_shapes(16, width)
                zeros = pypto.full([heads, width], 0.0, self.dtype)
                pypto.assemble(zeros, [row * heads, 0], argument)

    def results(self) -> None:
        """The sums over all parts, in the dtype of the cache."""
        a, tiling = self.a, self.tiling
        size, tile = tiling.result_rows, tiling.result_tile
        if a.sinks is not None:
            self.of_sinks()
        for first, count in row_tiles("SFAG", a.key.shape[0], size):
            store = functools.partial(store_total, first=first, count=count, size=size, tile=tile)
            store(self.sums, 0, a.d_key)
            if self.rope:
                store(self.sums, self.latent, a.d_key_rope)
            if a.d_value is not None:
                store(self.value_sums, 0, a.d_value)

    def of_sinks(self) -> None:
        """Adds the terms of all tokens to ``d_sinks``, 64 tokens at a time."""
        a, size, tokens = self.a, 64, self.a.indices.shape[0]
        terms = pypto.reshape(a.sink_terms, [tokens, self.heads], inplace=True)
        for i in loop("SFAG_SINKS", (tokens + size - 1) // size):
            pypto.set_vec_tile_shapes(size, self.heads)
            valid = [(tokens - i * size).min(size), self.heads]
            tile = pypto.view(terms, [size, self.heads], [i * size, 0], valid_shape=valid)
            total = pypto.sum(tile, dim=0, keepdim=True)
            total = pypto.view(total, [1, self.facts.heads], [0, 0])
            pypto.set_vec_tile_shapes(16)
            first = pypto.full([1], 0, I32)
            pypto.index_put_(a.d_sinks, (first,), total, accumulate=True)


def program(a: Arguments, facts: Facts) -> None:
    """Writes the gradients.

    Args:
        a: the arguments of :func:`query_tiles` and :func:`.selected_rows.selected_rows`;
            ``query_and_d_out [T * 2 * rows, L]``, per token the query, then the output's gradient;
            ``query_rope [T * rows, R]``; ``key``, ``value``, ``key_rope``, the cache;
            ``softmax_max`` and ``softmax_sum [T * rows, 1]``; ``sums_<part>`` and, for values that
            are not the keys, ``value_sums_<part>``, zeros; ``d_query [T * heads, L]``, ….
    """
    backward = Backward(a, facts)
    tokens = a.indices.shape[0]
    for row, sequence, (visible,) in query_tiles(
        facts, a.query_lengths, a.key_lengths, tokens, capacity(a, facts), name="SFAG"
    ):
        for part in parts_of("SFAG", row, visible):
            backward.token(row, sequence, visible, part)
        for _ in loop("SFAG_NONE", visible <= 0):
            backward.nothing(row)
    for _ in after_all("SFAG_RESULTS"):
        backward.results()


@functools.cache
def kernel(facts: Facts) -> Callable:
    """The kernel of :func:`program`."""
    D, S = pypto.DYNAMIC, pypto.STATIC
    dtype = PYPTO_DTYPES[facts.dtype]
    control_flow = ["query_lengths"] + ["key_lengths"] * (facts.block_size > 0)
    options = runtime_options(*control_flow, ready_on_host=facts.ready_on_host, layout=facts.layout)

    @jit(runtime_options=options)
    def sparse_flash_attention_grad(
        query_and_d_out: pypto.Tensor([D, S], dtype),
        query_rope: pypto.Tensor([D, S], dtype),
        key: pypto.Tensor([D, S], dtype),
        key_rope: pypto.Tensor([D, S], dtype),
        value: pypto.Tensor([D, S], dtype),
        softmax_max: pypto.Tensor([D, S], F32),
        softmax_sum: pypto.Tensor([D, S], F32),
        indices: pypto.Tensor([D, S], I32),
        sinks: pypto.Tensor([S, S], F32),
        query_lengths: pypto.Tensor([D], I32),
        key_lengths: pypto.Tensor([D], I32),
        key_starts: pypto.Tensor([D], I32),
        block_table: pypto.Tensor([D, D], I32),
        one_block: pypto.Tensor([S, S], I32),
        sink_terms: pypto.Tensor([D, S], F32),
        sums_0: pypto.Tensor([S, S], F32),
        sums_1: pypto.Tensor([S, S], F32),
        sums_2: pypto.Tensor([S, S], F32),
        sums_3: pypto.Tensor([S, S], F32),
        value_sums_0: pypto.Tensor([S, S], F32),
        value_sums_1: pypto.Tensor([S, S], F32),
        value_sums_2: pypto.Tensor([S, S], F32),
        value_sums_3: pypto.Tensor([S, S], F32),
        d_query: pypto.Tensor([D, S], dtype),
        d_query_rope: pypto.Tensor([D, S], dtype),
        d_key: pypto.Tensor([D, S], dtype),
        d_key_rope: pypto.Tensor([D, S], dtype),
        d_value: pypto.Tensor([D, S], dtype),
        d_sinks: pypto.Tensor([S, S], F32),
    ):
        program(arguments(locals(), facts.absent), facts)

    return sparse_flash_attention_grad
