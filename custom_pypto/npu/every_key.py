"""Queries and keys of the programs of :mod:`custom_pypto.kernels.every_key`."""

from typing import Any

import torch
from torch import Tensor

from .common import Arguments, Limits, name, padded, query_lengths
from .key_sequences import KeySequences, as_tensor


def check(limits: Limits) -> None:
    query = limits.arguments.query_index
    limits.dtype("query_index")
    limits.countable("key_index", limits.arguments.key_index.numel() // query.size(-1))
    limits.heads(64, "query_index")
    last = query.dim() - 1
    limits.require(
        query.size(-1) <= 128, f"query_index.size({last})", "at most 128", query.size(-1)
    )


def key_sequences(a: Arguments) -> KeySequences:
    return KeySequences(a.key_index, a.layout, a.actual_seq_klen, cmp_ratio=a.cmp_ratio)


def common_facts(a: Arguments, keys: KeySequences) -> dict[str, Any]:
    """The facts of both programs."""
    tokens = a.query_index[..., 0, 0].numel()
    batch = len(a.actual_seq_klen) if a.layout == "TND" else a.query_index.size(0)
    return dict(
        dtype=name(a.query_index.dtype),
        weights_dtype=name(a.weights.dtype),
        heads=a.query_index.size(-2),
        layout=a.layout,
        ragged=a.actual_seq_qlen is not None,
        sparse_mode=a.sparse_mode,
        cmp_ratio=a.cmp_ratio,
        tokens=tokens,
        batch=batch,
        keys=keys.most,
    )


def common_tensors(a: Arguments, keys: KeySequences, size: int) -> dict[str, Tensor | None]:
    """Lengths, first rows and the mask of both programs, for tiles of ``size`` keys."""
    found = keys.tensors()
    lengths, tokens = as_tensor(a.actual_seq_qlen, a.key_index), a.query_index[..., 0, 0].numel()
    ones = a.key_index.new_ones(1, size, dtype=torch.float32)
    return dict(
        query_lengths=query_lengths(lengths, a.layout, tokens, found["key_lengths"]),
        key_lengths=found["key_lengths"],
        key_starts=found["key_starts"],
        ramp=padded(ones, columns=size),
    )


def without_padding(x: Tensor, layout: str, lengths: Tensor, ragged: bool) -> Tensor:
    """``x`` with zeros in the rows that belong to no sequence, if there may be any.

    A product adds up 0 times such a row, which must not be NaN.
    """
    if not ragged:
        return x
    if layout == "TND":
        outside = torch.arange(len(x), device=x.device) >= lengths[-1]
    else:
        outside = torch.arange(x.size(1), device=x.device) >= lengths.unsqueeze(1)
    return x.masked_fill(outside[..., None, None], 0)
