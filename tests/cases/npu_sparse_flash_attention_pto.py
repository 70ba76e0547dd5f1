"""Arguments of ``npu_sparse_flash_attention_pto``."""

import torch
from torch import Tensor

from . import INT_MAX, INT_MIN, int32, place, random, stored, token_counts, visible_keys
from .hostile import HEADS, Maker, sequences

ON_NPU = {}
WEIGHT = 7


def some_indices(
    len_q: int, len_k: int, count: int, sparse_mode: int, hostile: bool, g: torch.Generator
) -> Tensor:
    """``[len_q, 1, count]``: distinct visible positions, then -1, as the indexer returns them.

    Hostile: future and absent positions, duplicates, int32 extremes, and anything after a -1.
    """
    indices = torch.full((len_q, 1, count), -1, dtype=torch.int32)
    for i, row in enumerate(indices[:, 0]):
        if hostile:
            values = [*range(len_k), -1, -2, INT_MIN, len_k, INT_MAX]
            row[:] = int32(values)[torch.randint(len(values), (count,), generator=g)]
        else:
            chosen = torch.randperm(visible_keys(i, len_q, len_k, sparse_mode), generator=g)
            row[: len(chosen)] = chosen[:count]
    return indices


def inputs(
    lengths_query: list[int],
    lengths_key: list[int],
    *,
    heads: int = 4,
    latent: int = 32,
    rope: int = 16,
    layout_query: str = "BSND",
    layout_kv: str = "PA_BSND",
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    sparse_count: int = 8,
    sparse_mode: int = 3,
    own_value: bool = False,
    hostile: bool = False,
    strided: bool = False,
    seed: int = 0,
) -> dict:
    """``rope=0``: no rope arguments; ``strided``: key and key_rope are parts of one row."""
    g = torch.Generator().manual_seed(seed)
    width = latent + rope
    query = place(
        [random((n, heads, width), dtype, g) for n in lengths_query], layout_query, padding=1
    )
    keys = [random((n, 1, width), dtype, g) for n in lengths_key]
    kv, actual_kv, table = stored(keys, layout_kv, block_size, strided, g)
    key, key_rope = kv.split([latent, rope], -1)
    if not strided:
        key, key_rope = key.contiguous(), key_rope.contiguous()
    indices = [
        some_indices(len_q, len_k, sparse_count, sparse_mode, hostile, g)
        for len_q, len_k in zip(lengths_query, lengths_key, strict=True)
    ]
    return dict(
        query=query[..., :latent].contiguous(),
        key=key,
        value=key.flip(-1) if own_value else None,
        sparse_indices=place(indices, layout_query, padding=1, fill=0),
        scale_value=3 * width**-0.5,
        block_table=table,
        actual_seq_lengths_query=token_counts(lengths_query, layout_query),
        actual_seq_lengths_kv=actual_kv,
        query_rope=query[..., latent:].contiguous() if rope else None,
        key_rope=key_rope if rope else None,
        layout_query=layout_query,
        layout_kv=layout_kv,
        sparse_mode=sparse_mode,
    )


def not_default() -> dict:
    return inputs(
        [4, 3],
        [5, 4],
        dtype=torch.float16,
        layout_query="TND",
        sparse_mode=0,
        own_value=True,
    )


def scale(m: Maker, width: int) -> float:
    """Extreme ones only where logits are exact, so that all that matters is which is largest."""
    ordinary = m.rng.random() * 3 * width**-0.5
    if m.values in ("random", "tiny"):
        return ordinary + 1e-3
    # none that makes weights of 2^-149 … 2^-126 of logits that are apart: 0 here, not everywhere
    return m.rng.choice([0.01, 0.05, 1e-3, 1e-30, 1e-38, 1e3, 1e30])


def random_call(m: Maker) -> dict:
    rng = m.rng
    large = rng.random() < 0.02
    s = sequences(m, large, "actual_seq_lengths_kv")
    heads, latent = rng.choice(HEADS), rng.choice([16, 16, 32, 48])
    rope = rng.choice([0, 16, 16, 32])
    K = rng.choice([513, 700, 1200]) if large else rng.choice([0, 1, 2, 7, 8, 16, 40, 100])
    key = m.rows(*s.rows, 1, latent)
    value = None
    if rng.random() < 0.3:
        value = rng.choice([key, m.rows(*key.shape)])
    query_rope = key_rope = None
    if rope:
        query_rope = m.tensor((*s.tokens, heads, rope))
        key_rope = m.rows(*s.rows, 1, rope)
        if rng.random() < 0.2:  # as engines keep them
            row = m.rows(*s.rows, 1, latent + rope)
            key, key_rope = row.split([latent, rope], -1)
            value = None if value is None else key
    return dict(
        query=m.tensor((*s.tokens, heads, latent)),
        key=key,
        value=value,
        sparse_indices=m.tensor(
            (*s.tokens, 1, K), m.ints(rng.choice([0, 0, -1]), max(s.capacity - 1, 0))
        ),
        scale_value=scale(m, latent + rope),
        query_rope=query_rope,
        key_rope=key_rope,
        sparse_block_size=1,
        layout_query=s.layout_query,
        layout_kv=s.layout_key,
        sparse_mode=rng.choice([0, 3]),
        **s.arguments,
    )
