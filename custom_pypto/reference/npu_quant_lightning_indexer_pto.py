from collections.abc import Iterator

import torch
from torch import Tensor

from .checks import BLOCK, SIZES, cache, of_sequences
from .npu_lightning_indexer_pto import selection, selection_error
from .npu_quant_rows_pto import npu_quant_rows_pto


def scores(
    query: Tensor, keys: Tensor, weights: Tensor, query_scale: Tensor, key_scale: Tensor
) -> Tensor:
    """``key_scale[j] * sum_h weights[h] * query_scale[h] * relu(query[h] . keys[j])`` of one token,
    in float64; the integer products are exact."""
    weights = weights.double() * query_scale.double()
    # + 0.0 turns -0 into +0, which must tie
    return weights @ torch.relu(query.double() @ keys.double().T) * key_scale.double() + 0.0


def npu_quant_lightning_indexer_pto(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    query_dequant_scale: Tensor,
    key_dequant_scale: Tensor,
    query_quant_mode: int,
    key_quant_mode: int,
    *,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "PA_BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
) -> Tensor:
    """The best ``sparse_count`` positions by :func:`scores`; ties by ascending position."""
    q, w, query_scale, k, key_scale = flattened(
        query, key, weights, query_dequant_scale, key_dequant_scale
    )
    return selection(
        lambda row, slots: scores(q[row], k[slots], w[row], query_scale[row], key_scale[slots]),
        query,
        key,
        actual_seq_lengths_query,
        actual_seq_lengths_key,
        block_table,
        layout_query,
        layout_key,
        sparse_count,
        sparse_mode,
    )


def flattened(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    query_dequant_scale: Tensor,
    key_dequant_scale: Tensor,
    **_,
) -> tuple[Tensor, ...]:
    """Query, weights and scales by token, keys and scales by slot."""
    by_token = query.flatten(0, -3), weights.flatten(0, -2), query_dequant_scale.flatten(0, -2)
    return *by_token, key.reshape(-1, key.size(-1)), key_dequant_scale.flatten()


def checks(dtypes: list[torch.dtype]) -> Iterator[tuple]:
    yield from of_sequences([torch.int8], SIZES, _arguments)


def _arguments(dtype: torch.dtype, lengths: list[int], S1: int, K: int) -> dict:
    g = torch.Generator().manual_seed(1)
    actual, table, blocks = cache(lengths, g)
    heads, dim = 64, 128
    query, query_scale = npu_quant_rows_pto(torch.randn(len(lengths), S1, heads, dim, generator=g))
    key, key_scale = npu_quant_rows_pto(torch.randn(blocks, BLOCK, 1, dim, generator=g))
    key[::2, ::5] = -128  # no quantizer writes it
    return dict(
        query=query,
        key=key,
        weights=torch.randn(len(lengths), S1, heads, generator=g),
        query_dequant_scale=query_scale,
        key_dequant_scale=key_scale,
        query_quant_mode=0,
        key_quant_mode=0,
        actual_seq_lengths_key=actual,
        block_table=table,
        sparse_count=K,
    )


def error(got: Tensor, expected: Tensor, mine: dict, theirs: dict) -> tuple[float, float]:
    q, w, query_scale, k, key_scale = flattened(**theirs)

    def scored(row: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        call = q[row], k[slots], w[row], query_scale[row], key_scale[slots]
        magnitudes = (x.abs() for x in call[2:])
        return scores(*call), scores(*call[:2], *magnitudes)

    return selection_error(got, expected, theirs, scored)
