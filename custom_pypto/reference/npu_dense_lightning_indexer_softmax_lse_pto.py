from collections.abc import Iterator

import torch
from torch import Tensor

from .index_training import Indexer, Magnitudes, arguments, of_index, rows_of


def npu_dense_lightning_indexer_softmax_lse_pto(
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    *,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_klen: list[int] | None = None,
    layout: str = "BSND",
    sparse_mode: int = 3,
    cmp_ratio: int = 1,
) -> tuple[Tensor, Tensor]:
    """In float64; -inf and 0 for a token that sees no key."""
    call, indexer = locals(), Indexer(query_index, key_index, weights)
    one_head = weights[..., 0].unsqueeze(-2)
    largest = torch.full_like(one_head, -torch.inf, dtype=torch.float32).contiguous()
    total = torch.zeros_like(largest)
    for row, slots in rows_of(call, None):
        scores = indexer.scores(row, slots).detach()
        largest.view(-1)[row] = scores.max()
        # NaN reaches the sum only
        total.view(-1)[row] = (scores - scores.max()).exp().sum()
    return largest, total


def of_indexer(call: dict) -> dict:
    """The arguments of this op in a call of a divergence."""
    attention = ("query", "key", "query_rope", "key_rope", "scale_value")
    return {name: x for name, x in call.items() if name not in attention}


def checks(dtypes: list[torch.dtype]) -> Iterator[tuple]:
    for dtype in dtypes:
        for tokens, keys in (([1], [1]), ([3, 0, 9], [300, 5, 700])):
            yield dtype, f"tokens {tokens}, keys {keys}", of_indexer(arguments(dtype, tokens, keys))


def error(got: tuple, expected: tuple, mine: dict, theirs: dict) -> tuple[float, float]:
    """Of the logarithm of the sum of exponentials, relative to the largest sum of the magnitudes of
    a score's terms."""
    magnitudes, worst = Magnitudes(*of_index(theirs)), 0.0
    one, other = ((x.double() + y.double().log()).view(-1) for x, y in (got, expected))
    for row, slots in rows_of(theirs, None):
        scale = 1 + float(magnitudes.scores(row, slots).amax())
        worst = max(worst, float((one[row] - other[row]).abs().nan_to_num(nan=torch.inf)) / scale)
    # float32 sums of some hundred products, and of their exponentials
    return worst, 2**-19
