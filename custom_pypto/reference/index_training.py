"""Gradients of an indexer by autograd in float64, and how far those of a kernel may be from them.

The attention of a divergence is in float64 too, from the statistics that the caller passes.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from . import npu_lightning_indexer_pto as lightning_indexer
from .checks import GRADIENT_ROUNDING, ROUNDING, excess
from .sequences import selected_rows, visible_rows

# a product of query and key this close to 0, relative to its terms, may have either sign; so may
# one below the normal numbers of float32, which hardware may take as 0, or of as many bfloat16
# terms as it has
NEARLY_ZERO = 2**-20
SMALLEST = torch.finfo(torch.float32).tiny


class Indexer:
    """Flattened leaves in float64 of an indexer's query, key and weights."""

    def __init__(self, query: Tensor, key: Tensor, weights: Tensor):
        self.given = query, key, weights
        self.leaves = [x.detach().double().requires_grad_() for x in self.given]
        query, key, weights = self.leaves
        self.query, self.weights = query.flatten(0, -3), weights.flatten(0, -2)
        self.key = key.reshape(-1, key.size(-1))

    def scores(self, row: int, slots: Tensor) -> Tensor:
        return self.weights[row] @ torch.relu(self.query[row] @ self.key[slots].T)

    def gradients(self, total: Tensor) -> tuple[Tensor, ...]:
        # zeros where no token reads a key
        total = total + torch.stack([(0 * x).sum() for x in self.leaves]).sum()
        found = torch.autograd.grad(total, self.leaves)
        return tuple(x.to(like.dtype) for x, like in zip(found, self.given, strict=True))


class Attention(NamedTuple):
    """The attention for which an indexer selects, with statistics of its softmax."""

    query: Tensor
    key: Tensor
    query_rope: Tensor | None
    key_rope: Tensor | None
    scale_value: float
    softmax_max: Tensor | None = None
    softmax_sum: Tensor | None = None

    def logits(self, row: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """``[N1, keys]``, and the sums of the magnitudes of their terms."""
        found = magnitudes = torch.zeros((), dtype=torch.float64)
        for query, key in ((self.query, self.key), (self.query_rope, self.key_rope)):
            if query is not None and key is not None:
                q = self.scale_value * query.flatten(0, -3)[row].double()
                k = key.reshape(-1, key.size(-1))[slots].double()
                found, magnitudes = found + q @ k.T, magnitudes + q.abs() @ k.T.abs()
        return found, magnitudes

    def sums(self, row: int, slots: Tensor) -> Tensor:
        """Sums over the heads of the probabilities of these keys."""
        largest, total = (
            x.double().reshape(-1, x.size(-1))[row, :, None]
            for x in (self.softmax_max, self.softmax_sum)
        )
        return ((self.logits(row, slots)[0] - largest).exp() / total).sum(0)


def attention_of(call: dict) -> Attention:
    return Attention(*(call.get(name) for name in Attention._fields))


def lengths(given: list[int] | None) -> Tensor | None:
    """The lengths of a call as the tensor of other ops."""
    limits = torch.iinfo(torch.int32)
    if given is None:
        return None
    return torch.tensor([min(max(n, limits.min), limits.max) for n in given], dtype=torch.int32)


def of_index(call: dict) -> tuple[Tensor, Tensor, Tensor]:
    return call["query_index"], call["key_index"], call["weights"]


def rows_of(call: dict, indices: Tensor | None) -> Iterator[tuple[int, Tensor]]:
    """Of each token with keys: its row, and the rows of those that ``indices`` name, or without
    indices of all that it sees."""
    query, key = call.get("query", call["query_index"]), call.get("key", call["key_index"])
    layout = call.get("layout", "BSND")
    sequences = dict(
        layout_query=layout,
        layout_kv=layout,
        actual_seq_lengths_query=lengths(call.get("actual_seq_qlen")),
        actual_seq_lengths_kv=lengths(call.get("actual_seq_klen")),
        block_table=None,
        sparse_mode=call.get("sparse_mode", 3),
        cmp_ratio=call.get("cmp_ratio", 1),
    )
    if indices is not None:
        for row, slots, _ in selected_rows(query, key, indices, **sequences):
            yield row, slots
        return
    for row, slots in visible_rows(query, key, **sequences):
        if len(slots):
            yield row, slots


def divergence(call: dict, of_selection: bool) -> tuple[Tensor, ...]:
    """The gradients of an indexer's query, key and weights, and the loss ``[1]``: the sum over
    tokens of the divergence of its softmax from the attention's. The attention of a selection is
    normalised to 1; that of all keys is the mean over the heads."""
    indexer, attention = Indexer(*of_index(call)), attention_of(call)
    total = torch.zeros((), dtype=torch.float64)
    for row, slots in rows_of(call, call.get("sparse_indices")):
        sums = attention.sums(row, slots)
        whole = sums.sum() if of_selection else torch.tensor(attention.query.size(-2))
        if whole == 0:
            continue
        p = sums / whole
        log_q = indexer.scores(row, slots).log_softmax(0)
        total = total + (torch.special.xlogy(p, p) - p * log_q).sum()
    return *indexer.gradients(total), total.detach().float()[None]


class Magnitudes:
    """Sums of the magnitudes of the terms of an indexer's gradients, by elements."""

    def __init__(self, query: Tensor, key: Tensor, weights: Tensor):
        self.shapes = query.shape, key.shape, weights.shape
        self.dtype, self.allowed = query.dtype, GRADIENT_ROUNDING[query.dtype]
        self.indexer = Indexer(query, key, weights)
        flat = self.indexer.query, self.indexer.key, self.indexer.weights
        self.query, self.key, self.weights = (torch.zeros_like(x) for x in flat)
        # What a product of query and key may lose, and a gradient: in bfloat16 each number below
        # 2^-126 may count as 0, an operand or a sum on its way, times what it would meet.
        self.flushed_product, self.flushed = SMALLEST, 0.0
        if self.dtype == torch.bfloat16:
            self.flushed_product *= query.size(-1) * max(_largest(query), _largest(key))

    def scores(self, row: int, slots: Tensor) -> Tensor:
        """Those of the scores."""
        q, w = self.indexer.query[row].abs(), self.indexer.weights[row].abs()
        return (w @ (q @ self.indexer.key[slots].T.abs())).detach()

    def add(self, row: int, slots: Tensor, d_scores: Tensor) -> None:
        """Adds those of a token, given those of the gradients of its scores."""
        with torch.no_grad():
            q, k, w = self.indexer.query[row], self.indexer.key[slots], self.indexer.weights[row]
            products, terms = q @ k.T, q.abs() @ k.T.abs()
            unsure = products.abs() <= NEARLY_ZERO * terms + self.flushed_product
            self.weights[row] += terms @ d_scores
            d_products = w.abs()[:, None] * d_scores * (~(products <= 0) | unsure)
            # such a term may be there or not, rounded as any other
            d_products = d_products + torch.where(unsure, d_products / self.allowed, 0)
            self.query[row] += d_products @ k.abs()
            self.key.index_add_(0, slots, d_products.T @ q.abs())
        if self.dtype == torch.bfloat16:
            count = max(self.weights.numel(), len(slots))  # terms of a key, of a query
            of_term = max(self.flushed_product, SMALLEST * _largest(self.indexer.weights))
            self.flushed = max(self.flushed, count * of_term * _largest(d_scores))

    def error(self, got: tuple, expected: tuple, *more: Tensor) -> tuple[float, float]:
        """Of the gradients, and of ``more`` results with these magnitudes. Only the operands of the
        gradients of query and key are rounded."""
        flat = self.query, self.key, self.weights
        query, key, *rest = (x.view(shape) for x, shape in zip(flat, self.shapes, strict=True))
        unrounded = ROUNDING[self.dtype] / self.allowed
        magnitudes = query, key, *(unrounded * x for x in (*rest, *more))
        return excess(got, expected, magnitudes, self.flushed), self.allowed


def _largest(x: Tensor) -> float:
    """Of the finite elements and 1."""
    finite = x.detach().double().nan_to_num(0, 0, 0).abs()
    return max(1.0, float(finite.max())) if x.numel() else 1.0


def divergence_error(
    got: tuple, expected: tuple, call: dict, of_selection: bool
) -> tuple[float, float]:
    """The error of the results of a divergence, and its bound."""
    attention, magnitudes = attention_of(call), Magnitudes(*of_index(call))
    loss = torch.zeros((), dtype=torch.float64)
    for row, slots in rows_of(call, call.get("sparse_indices")):
        sums = attention.sums(row, slots)
        p = sums / (sums.sum() if of_selection else attention.query.size(-2))
        q = magnitudes.indexer.scores(row, slots).detach().softmax(0)
        of_logits = attention.logits(row, slots)[1].amax(0)
        of_scores = magnitudes.scores(row, slots)
        # an exponential has the absolute error of its exponent, a softmax also that of the others
        spread = 1 + of_scores + (q * of_scores).sum()
        of_p = 1 + of_logits + (of_logits * p).sum()
        magnitudes.add(row, slots, q * spread + p * of_p)
        logs = (p.log().nan_to_num(0, 0, 0) - q.log().nan_to_num(0, 0, 0)).abs()
        loss += (p * (1 + logs) * of_p + p * spread).sum()
    return magnitudes.error(got, expected, loss[None])


def arguments(dtype: torch.dtype, tokens: list[int], keys: list[int]) -> dict:
    """A packed call of a divergence without statistics, of the sizes of DeepSeek-V3.2."""
    g = torch.Generator().manual_seed(4)
    heads, latent, rope, index_heads, dim = 128, 512, 64, 64, 128
    T1, T2 = sum(tokens), sum(keys)
    return dict(
        query=torch.randn(T1, heads, latent, generator=g).to(dtype),
        key=torch.randn(T2, 1, latent, generator=g).to(dtype),
        query_index=torch.randn(T1, index_heads, dim, generator=g).to(dtype),
        key_index=torch.randn(T2, 1, dim, generator=g).to(dtype),
        weights=torch.randn(T1, index_heads, generator=g) / 8,
        scale_value=192**-0.5,
        query_rope=torch.randn(T1, heads, rope, generator=g).to(dtype),
        key_rope=torch.randn(T2, 1, rope, generator=g).to(dtype),
        actual_seq_qlen=[*accumulate(tokens)],
        actual_seq_klen=[*accumulate(keys)],
        layout="TND",
    )


def with_selection(call: dict, sparse_count: int) -> dict:
    """The call of a divergence over the selection of its indexer."""
    layout = call["layout"]
    indices = lightning_indexer.npu_lightning_indexer_pto(
        *of_index(call),
        actual_seq_lengths_query=lengths(call["actual_seq_qlen"]),
        actual_seq_lengths_key=lengths(call["actual_seq_klen"]),
        layout_query=layout,
        layout_key=layout,
        sparse_count=sparse_count,
        sparse_mode=call.get("sparse_mode", 3),
        cmp_ratio=call.get("cmp_ratio", 1),
    )
    return call | attention_statistics(call, indices) | dict(sparse_indices=indices)


def attention_statistics(call: dict, indices: Tensor | None) -> dict:
    """The statistics of the attention of a call, over these keys of each token, or all it sees."""
    attention = attention_of(call)
    heads_last = attention.query[..., 0].unsqueeze(-3)
    largest = torch.full_like(heads_last, -torch.inf, dtype=torch.float32).contiguous()
    total = torch.zeros_like(largest)
    maxima, sums = (x.view(-1, x.size(-1)) for x in (largest, total))
    for row, slots in rows_of(call, indices):
        logits, _ = attention.logits(row, slots)
        maxima[row] = logits.amax(-1).float()
        sums[row] = (logits - maxima[row, :, None].double()).exp().sum(-1).float()
    return dict(softmax_max=largest, softmax_sum=total)
