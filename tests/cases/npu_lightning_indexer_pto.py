"""Arguments of ``npu_lightning_indexer_pto``."""

import torch

from . import place, random, stored, token_counts
from .hostile import HEADS, Maker, sequences

ON_NPU = dict(dim=128)
WEIGHT = 7


def inputs(
    lengths_query: list[int],
    lengths_key: list[int],
    *,
    heads: int = 4,
    dim: int = 32,
    layout_query: str = "BSND",
    layout_key: str = "PA_BSND",
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    weights_dtype: torch.dtype | None = None,
    sparse_count: int = 8,
    sparse_mode: int = 3,
    integers: bool = False,
    strided: bool = False,
    seed: int = 0,
) -> dict:
    g = torch.Generator().manual_seed(seed)
    query = [random((n, heads, dim), dtype, g, integers) for n in lengths_query]
    weights = [random((n, heads), weights_dtype or dtype, g, integers) for n in lengths_query]
    keys = [random((n, 1, dim), dtype, g, integers) for n in lengths_key]
    key, actual_key, table = stored(keys, layout_key, block_size, strided, g)
    return dict(
        query=place(query, layout_query, padding=1),
        key=key,
        weights=place(weights, layout_query, padding=1),
        actual_seq_lengths_query=token_counts(lengths_query, layout_query),
        actual_seq_lengths_key=actual_key,
        block_table=table,
        layout_query=layout_query,
        layout_key=layout_key,
        sparse_count=sparse_count,
        sparse_mode=sparse_mode,
    )


def not_default() -> dict:
    return inputs(
        [2, 3],
        [20, 30],
        dtype=torch.float16,
        weights_dtype=torch.float32,
        layout_query="TND",
        sparse_count=4,
        sparse_mode=0,
        **ON_NPU,
    )


def random_call(m: Maker) -> dict:
    rng = m.rng
    large = rng.random() < 0.02
    s = sequences(m, large, "actual_seq_lengths_key")
    heads, dim = rng.choice(HEADS), rng.choice([16, 16, 32, 48])
    return dict(
        query=m.tensor((*s.tokens, heads, dim)),
        key=m.rows(*s.rows, 1, dim),
        weights=m.tensor((*s.tokens, heads), m.floats(rng.choice([m.dtype, torch.float32]))),
        layout_query=s.layout_query,
        layout_key=s.layout_key,
        sparse_count=rng.choice([1, 2, 3, 7, 8, 16, 40, 64, 2048] + [3072, 8192] * large),
        sparse_mode=rng.choice([0, 3]),
        **s.arguments,
    )
