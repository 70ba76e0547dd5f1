from collections.abc import Iterator

import torch
from torch import Tensor

from . import npu_dense_lightning_indexer_softmax_lse_pto as softmax_lse
from .index_training import arguments, attention_statistics, divergence, divergence_error


def npu_dense_lightning_indexer_grad_kl_loss_pto(
    query: Tensor,
    key: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    softmax_max_index: Tensor,
    softmax_sum_index: Tensor,
    scale_value: float,
    *,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_klen: list[int] | None = None,
    layout: str = "BSND",
    sparse_mode: int = 3,
    cmp_ratio: int = 1,
) -> tuple[Tensor, ...]:
    """By autograd in float64. The indexer's softmax is computed again: statistics of another call
    show as an error."""
    return divergence(locals(), of_selection=False)


def with_statistics(call: dict) -> dict:
    """The call of a divergence over every key that a token sees."""
    largest, total = softmax_lse.npu_dense_lightning_indexer_softmax_lse_pto(
        **softmax_lse.of_indexer(call)
    )
    of_index = dict(softmax_max_index=largest, softmax_sum_index=total)
    return call | attention_statistics(call, None) | of_index


def checks(dtypes: list[torch.dtype]) -> Iterator[tuple]:
    for dtype in dtypes:
        for tokens, keys in (([3, 0, 2], [300, 5, 200]), ([1], [1])):
            call = with_statistics(arguments(dtype, tokens, keys))
            yield dtype, f"tokens {tokens}, keys {keys}", call


def error(got: tuple, expected: tuple, mine: dict, theirs: dict) -> tuple[float, float]:
    """Relative to the sum of the magnitudes of the terms of an element."""
    return divergence_error(got, expected, theirs, of_selection=False)
