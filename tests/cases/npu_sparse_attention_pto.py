"""Arguments of ``npu_sparse_attention_pto``."""

import torch
from torch import Tensor

from . import block_tables, int32, random, slots
from .hostile import BLOCK_SIZES, Maker

CACHES = ("kv_cache", "kr_cache", "index_k_cache")
ON_NPU = dict(hidden=64, q_rank=32, index_dim=128, sparse_count=8)
WEIGHT = 5


def fused_inputs(
    lengths: list[int],
    S1: int,
    *,
    hidden: int = 48,
    q_rank: int = 24,
    heads: int = 3,
    nope: int = 16,
    latent: int = 32,
    rope: int = 16,
    index_heads: int = 4,
    index_dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    strided: bool = False,
    seed: int = 0,
    **keywords,
) -> dict:
    """The last ``S1`` of each sequence's ``lengths`` tokens are new, the caches hold the ones
    before; where a sequence is shorter than ``S1``, its first tokens are padding.
    """
    g = torch.Generator().manual_seed(seed)
    batch = len(lengths)

    def normal(*shape: int) -> Tensor:
        return random(shape, dtype, g)

    def weight(inputs: int, *outputs: int) -> Tensor:
        return (torch.randn(inputs, *outputs, generator=g) * inputs**-0.5).to(dtype)

    table, blocks = block_tables(lengths, block_size, g)
    position = int32(lengths)[:, None] - S1 + torch.arange(S1)
    cache_index = torch.full((batch, S1), -1)
    caches = torch.full((blocks, block_size, 1, latent + rope + index_dim), torch.nan, dtype=dtype)
    flat = caches.view(-1, caches.size(-1))
    for b, n in enumerate(lengths):
        slot = slots(table[b], n, block_size)
        cache_index[b, max(S1 - n, 0) :] = slot[max(n - S1, 0) :]
        flat[slot[: max(n - S1, 0)]] = normal(max(n - S1, 0), caches.size(-1))
    caches = caches.split([latent, rope, index_dim], -1)  # one row, as engines keep them
    if not strided:
        caches = [c.contiguous() for c in caches]
    kv_cache, kr_cache, index_k_cache = caches

    frequency = 10000.0 ** (-torch.arange(0, rope, 2) / rope)
    angle = (position[..., None] * frequency).repeat(1, 1, 2)
    return dict(
        x=normal(batch, S1, hidden),
        w_dq=weight(hidden, q_rank),
        w_uq_qr=weight(q_rank, heads * (nope + rope)),
        w_uk=(torch.randn(heads, nope, latent, generator=g) * nope**-0.5).to(dtype),
        w_dkv_kr=weight(hidden, latent + rope),
        gamma_cq=1 + normal(q_rank) / 8,
        gamma_ckv=1 + normal(latent) / 8,
        sin=angle.sin().to(dtype),
        cos=angle.cos().to(dtype),
        cache_index=cache_index.int(),
        kv_cache=kv_cache,
        kr_cache=kr_cache,
        block_table=table,
        act_seqs=int32(lengths),
        w_idx_qb=weight(q_rank, index_heads * index_dim),
        w_idx_k=weight(hidden, index_dim),
        w_idx_proj=weight(hidden, index_heads),
        in_gamma_k=1 + normal(index_dim) / 8,
        in_beta_k=normal(index_dim) / 8,
        index_k_cache=index_k_cache,
        **keywords,
    )


def inputs(lengths_query: list[int], lengths_key: list[int], **keywords) -> dict:
    return fused_inputs(lengths_key, max(lengths_query), **keywords)


def of_angles_and_slots(x: dict) -> dict:
    """The same with angles in float32 and slots in int64."""
    return x | dict(sin=x["sin"].float(), cos=x["cos"].float(), cache_index=x["cache_index"].long())


def not_default() -> dict:
    # the sizes make gammas and caches of one shape
    sizes = ON_NPU | dict(hidden=48, rope=32, sparse_count=4, dtype=torch.float16)
    return of_angles_and_slots(fused_inputs([20, 30], 2, **sizes, softmax_scale=0.4, eps=0.5))


def random_call(m: Maker) -> dict:
    rng = m.rng
    B, S1 = rng.choice([0, 1, 1, 1, 2]), rng.choice([0, 1, 1, 1, 2, 3])
    H, Q = rng.choice([0, 1, 16, 40]), rng.choice([0, 3, 16, 24])
    N1, P, L = rng.choice([1, 2, 3, 17]), rng.choice([0, 1, 8, 16]), rng.choice([16, 32])
    R = rng.choice([16, 16, 32])
    heads, D = rng.choice([1, 2, 3, 17]), rng.choice([R, R + 16, 48])
    block_size, blocks = rng.choice(BLOCK_SIZES), rng.choice([0, 1, 2, 3, 4])
    width = rng.choice([0, 1, 2, 3])
    index_dtype = rng.choice([torch.int32, torch.int64])
    widths = [L, R, D]
    if rng.random() < 0.25:  # parts of one row
        caches = m.rows(blocks, block_size, 1, sum(widths)).split(widths, -1)
    else:
        caches = [m.rows(blocks, block_size, 1, n) for n in widths]
    kv_cache, kr_cache, index_k_cache = caches
    x = dict(
        x=m.tensor((B, S1, H)),
        w_dq=m.tensor((H, Q)),
        w_uq_qr=m.tensor((Q, N1 * (P + R))),
        w_uk=m.tensor((N1, P, L)),
        w_dkv_kr=m.tensor((H, L + R)),
        gamma_cq=m.tensor((Q,)),
        gamma_ckv=m.tensor((L,)),
        sin=m.tensor((B, S1, R), m.floats(rng.choice([m.dtype, torch.float32]))),
        cos=m.tensor((B, S1, R), m.floats(rng.choice([m.dtype, torch.float32]))),
        cache_index=m.tensor((B, S1), m.ints(-1, blocks * block_size, index_dtype)),
        kv_cache=kv_cache,
        kr_cache=kr_cache,
        block_table=m.tensor((B, width), m.ints(0 if blocks else -1, blocks - 1)),
        act_seqs=m.tensor((B,), m.ints(0, width * block_size + 1)),
        w_idx_qb=m.tensor((Q, heads * D)),
        w_idx_k=m.tensor((H, D)),
        w_idx_proj=m.tensor((H, heads)),
        in_gamma_k=m.tensor((D,)),
        in_beta_k=m.tensor((D,)),
        index_k_cache=index_k_cache,
        softmax_scale=rng.choice([None, 0.01, 0.05]),
        eps=rng.choice([1e-6, 0.0, 1.0]),
        sparse_count=rng.choice([1, 2, 8, 16, 2048]),
    )
    if rng.random() < 0.05:  # memory of a cache is read as something else
        name = rng.choice([n for n, t in x.items() if isinstance(t, Tensor) and t.dtype == m.dtype])
        cache, wanted = x[rng.choice(CACHES)], x[name]
        if cache.untyped_storage().nbytes() >= wanted.nbytes:
            strides = torch.empty(wanted.shape, device="meta").stride()
            x[name] = cache.as_strided(wanted.shape, strides, 0)
    return x
