from collections.abc import Iterator

import torch
from torch import Tensor

from .index_training import arguments, divergence, divergence_error, with_selection


def npu_sparse_lightning_indexer_grad_kl_loss_pto(
    query: Tensor,
    key: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    sparse_indices: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
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
    """By autograd in float64, with the attention's probabilities as constants."""
    return divergence(locals(), of_selection=True)


def checks(dtypes: list[torch.dtype]) -> Iterator[tuple]:
    for dtype in dtypes:
        # the last one within the limits of torch_npu's op
        for tokens, keys, count in (
            ([3, 0, 2], [300, 5, 200], 128),
            ([1], [1], 16),
            ([1, 2], [2100, 2500], 2048),
        ):
            call = with_selection(arguments(dtype, tokens, keys), count)
            yield dtype, f"tokens {tokens}, keys {keys}, K {count}", call


def error(got: tuple, expected: tuple, mine: dict, theirs: dict) -> tuple[float, float]:
    """Relative to the sum of the magnitudes of the terms of an element."""
    return divergence_error(got, expected, theirs, of_selection=True)
