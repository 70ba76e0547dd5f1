"""npu_sparse_lightning_indexer_grad_kl_loss_pto as a PyPTO program.

Stages per query token:

1. vector: the cache rows that the indices name, and the places of their terms in the sums;
2. cube: the attention's scores, and the products of the indexer, float32;
3. vector: the attention's probabilities, summed over its heads, and the scores of the indexer;
4. vector: both distributions, the token's loss, and the gradients of the scores, float32;
5. from there on as :mod:`.npu_lightning_indexer_grad_pto`.

Behind all tokens, vector: the sums in the dtype of the keys, and the loss.

Memory besides the results: sums of rows of D elements. Workspace per token in flight, in bytes:
K * (N1 * 4 + N * (4 + 2) + D * 4 + 48).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

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
from .gradient_tiling import INDEX, GradientTiling
from .index_gradients import TINY, index_scores, scaled
from .index_scores import LOWEST
from .npu_lightning_indexer_grad_pto import D_SCORES, IndexBackward
from .pypto_versions import after_all, behind, div, jit
from .row_sums import parts_of, store_sum
from .selected_attention import attention_scores
from .selected_rows import KeyFacts, capacity, gather_rows, selected_rows
from .sequences import query_tiles


@dataclass(frozen=True, kw_only=True)
class Facts(KeyFacts):
    weights_dtype: str
    index_heads: int
    scale: float
    rope: bool  # whether the call has it
    tiling: GradientTiling = INDEX

    @property
    def absent(self) -> tuple[str, ...]:
        """The arguments that the call lacks."""
        return () if self.rope else ("query_rope", "key_rope")

    @property
    def index_rows(self) -> int:
        """Rows of a token in the inputs by head of the indexer."""
        return self.index_heads + behind(self.index_heads)


class SparseDivergence(IndexBackward):
    """The stages. ``token(row, sequence, visible, part)`` builds the rows of one token."""

    def __init__(self, a: Arguments, facts: Facts):
        super().__init__(a, facts.index_heads, facts.tiling)
        self.facts, self.latent = facts, a.key.shape[1]
        self.rope = a.query_rope.shape[1] if facts.rope else 0

    def splits(self, width: int) -> list[tuple[int, int]]:
        rope, latents, *_ = self.tiling.splits(self.facts.rows, self.latent, self.rope, width)
        return [rope, latents, *super().splits(width)]

    def token(self, row, sequence, visible, part: int) -> None:
        a, facts = self.a, self.facts
        found, places, mask = selected_rows(a, facts, row, sequence, visible, self.splits)
        for_rope, for_scores, for_products, for_query = found
        sums = self.head_sums(row, for_scores, for_rope)
        products = self.products(row, for_products, mask.shape[1])
        weights = self.weights(row)
        scores = index_scores(products, weights)

        begin_task(D_SCORES)
        loss, d_scores = divergence(sums, scores, mask)
        pypto.assemble(loss, [0, row], a.loss_terms)
        d_scores = scaled(d_scores, weights, self.dim)
        end_task()
        self.add(row, products, d_scores, weights, for_query, places, part)

    def head_sums(self, row, for_scores: list, for_rope: list):
        """``[1, keys]``: the attention's probabilities of the keys, summed over its heads."""
        a, heads = self.a, self.facts.rows
        query, caches, rows = [(a.query, self.latent)], [a.key], [for_scores]
        if self.facts.rope:
            query, caches = [*query, (a.query_rope, self.rope)], [*caches, a.key_rope]
            rows = [*rows, for_rope]
        query = [pypto.view(x, [heads, width], [row * heads, 0]) for x, width in query]
        logits = attention_scores(query, caches, rows, gather_rows(a), self.tiling)
        # tiles of 32 KiB in UB
        pypto.set_vec_tile_shapes(heads, min(2**13 // heads, logits.shape[1]))
        lse = pypto.view(a.attention_lse, [heads, 1], [row * heads, 0])
        p = pypto.exp(pypto.sub(pypto.mul(logits, self.facts.scale), lse))
        return pypto.sum(p, dim=0, keepdim=True)

    def results(self, name: str) -> None:
        super().results(name)
        store_sum(name, self.a.loss_terms, self.a.loss)


def divergence(sums, scores, mask) -> tuple:
    """The loss of a token, ``[1, 1]``, and the gradients of its scores, from the attention's sums
    over the heads. All are 0 where no probability is positive.
    """
    pypto.set_vec_tile_shapes(1, mask.shape[1])
    valid = pypto.eq(mask, 1.0)
    sums = pypto.where(valid, sums, 0.0)
    total = pypto.sum(sums, dim=-1, keepdim=True)
    target = div(sums, pypto.maximum(total, TINY))
    # relative to the largest score of a valid key, whose exponential is 1
    top = pypto.amax(pypto.where(valid, scores, LOWEST), dim=-1, keepdim=True)
    shifted = pypto.where(valid, pypto.sub(scores, top), 0.0)
    exponentials = pypto.mul(pypto.exp(shifted), mask)
    of_all = pypto.maximum(pypto.sum(exponentials, dim=-1, keepdim=True), TINY)
    log_target = pypto.log(pypto.where(pypto.gt(target, 0.0), target, 1.0))
    log_found = pypto.sub(shifted, pypto.log(of_all))
    terms = pypto.mul(target, pypto.sub(log_target, log_found))
    d_scores = pypto.sub(div(exponentials, of_all), target)
    some = pypto.where(pypto.gt(total, TINY), 1.0, 0.0)
    return pypto.sum(terms, dim=-1, keepdim=True), pypto.mul(d_scores, some)


def program(a: Arguments, facts: Facts) -> None:
    """Writes the loss and the gradients.

    Args:
        a: the arguments of :func:`query_tiles`, of :func:`.selected_rows.selected_rows` and of
            :class:`IndexBackward`; ``query [T * rows, L]`` and ``query_rope [T * rows, R]``;
            ``key_rope``, a cache as ``key``; ``attention_lse [T * rows, 1]``, float32, the
            logarithms of the sums of the exponentials; ``loss_terms [1, T]``, zeros, and
            ``loss [1, 1]``, zero.
    """
    backward = SparseDivergence(a, facts)
    tokens = a.indices.shape[0]
    for row, sequence, (visible,) in query_tiles(
        facts, a.query_lengths, a.key_lengths, tokens, capacity(a, facts), name="KL"
    ):
        for part in parts_of("KL", row, visible):
            pypto.set_pass_options(**facts.tiling.pass_options)  # of the calling loop
            backward.token(row, sequence, visible, part)
        for _ in loop("KL_NONE", visible <= 0):
            backward.nothing(row)
    for _ in after_all("KL_RESULTS"):
        backward.results("KL")


@functools.cache
def kernel(facts: Facts) -> Callable:
    """The kernel of :func:`program`."""
    D, S = pypto.DYNAMIC, pypto.STATIC
    dtype, weights_dtype = PYPTO_DTYPES[facts.dtype], PYPTO_DTYPES[facts.weights_dtype]

    @jit(runtime_options=runtime_options(ready_on_host=False))
    def sparse_lightning_indexer_grad_kl_loss(
        query: pypto.Tensor([D, S], dtype),
        query_rope: pypto.Tensor([D, S], dtype),
        key: pypto.Tensor([D, S], dtype),
        key_rope: pypto.Tensor([D, S], dtype),
        attention_lse: pypto.Tensor([D, S], F32),
        query_index: pypto.Tensor([D, S], dtype),
        key_index: pypto.Tensor([D, S], dtype),
        weights: pypto.Tensor([D, S], weights_dtype),
        indices: pypto.Tensor([D, S], I32),
        query_lengths: pypto.Tensor([D], I32),
        key_lengths: pypto.Tensor([D], I32),
        key_starts: pypto.Tensor([D], I32),
        block_table: pypto.Tensor([D, D], I32),
        one_block: pypto.Tensor([S, S], I32),
        loss_terms: pypto.Tensor([S, D], F32),
        sums_0: pypto.Tensor([S, S], F32),
        sums_1: pypto.Tensor([S, S], F32),
        sums_2: pypto.Tensor([S, S], F32),
        sums_3: pypto.Tensor([S, S], F32),
        d_query_index: pypto.Tensor([D, S], dtype),
        d_key_index: pypto.Tensor([D, S], dtype),
        d_weights: pypto.Tensor([D, S], weights_dtype),
        loss: pypto.Tensor([S, S], F32),
    ):
        program(arguments(locals(), facts.absent), facts)

    return sparse_lightning_indexer_grad_kl_loss
