from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from .checks import BLOCK, ROUNDING, cache, of_sequences, row_error
from .npu_lightning_indexer_pto import npu_lightning_indexer_pto
from .npu_sparse_flash_attention_pto import npu_sparse_flash_attention_pto


def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * gamma


def rope_interleaved(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """Rotates pairs (x0, x1), (x2, x3), ... of ``[B, S, N, R]``; the output has all first members,
    then all second."""
    half = x.size(-1) // 2
    sin, cos = sin[..., None, :half].float(), cos[..., None, :half].float()
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1).to(x.dtype)


def rope_half_split(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """Rotates pairs (x_i, x_{i+R/2}) of the first R dims of ``[B, S, N, D]``; the rest stays."""
    half = sin.size(-1) // 2
    sin, cos = sin[..., None, :half].float(), cos[..., None, :half].float()
    first, second, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return torch.cat([rotated.to(x.dtype), rest], -1)


def write_cache(cache: Tensor, rows: Tensor, cache_index: Tensor) -> None:
    """``cache[slot] = row``, in token order; a slot outside the cache is not written."""
    blocks, block_size = cache.shape[:2]
    rows = rows.reshape(-1, cache.size(-1))
    for slot, row in zip(cache_index.flatten().tolist(), rows, strict=True):
        if 0 <= slot < blocks * block_size:
            cache[slot // block_size, slot % block_size, 0] = row


def index_key(
    x: Tensor, w: Tensor, gamma: Tensor, beta: Tensor, sin: Tensor, cos: Tensor, eps: float
) -> Tensor:
    """Keys ``[B, S1, 1, D]`` of an indexer: LayerNorm in float32, before RoPE."""
    key = layer_norm((x @ w).float(), (w.size(1),), gamma.float(), beta.float(), eps)
    return rope_half_split(key.to(x.dtype).unsqueeze(-2), sin, cos)


def index_weights(x: Tensor, w: Tensor, dim: int) -> Tensor:
    return x.float() @ w.float() * (w.size(1) * dim) ** -0.5


def npu_sparse_attention_pto(
    x: Tensor,
    w_dq: Tensor,
    w_uq_qr: Tensor,
    w_uk: Tensor,
    w_dkv_kr: Tensor,
    gamma_cq: Tensor,
    gamma_ckv: Tensor,
    sin: Tensor,
    cos: Tensor,
    cache_index: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    block_table: Tensor,
    act_seqs: Tensor,
    w_idx_qb: Tensor,
    w_idx_k: Tensor,
    w_idx_proj: Tensor,
    in_gamma_k: Tensor,
    in_beta_k: Tensor,
    index_k_cache: Tensor,
    *,
    softmax_scale: float | None = None,
    eps: float = 1e-6,
    sparse_count: int = 2048,
) -> Tensor:
    """MLA and indexer prologs, cache writes in place, lightning indexer, sparse attention."""
    (heads, nope, latent), rope = w_uk.shape, kr_cache.size(-1)
    cq = rms_norm(x @ w_dq, gamma_cq, eps)
    q_nope, q_rope = (cq @ w_uq_qr).unflatten(-1, (heads, nope + rope)).split([nope, rope], -1)
    q_latent = torch.einsum("bshp,hpl->bshl", q_nope, w_uk)
    q_rope = rope_interleaved(q_rope, sin, cos)
    c_kv, k_rope = (x @ w_dkv_kr).split([latent, rope], -1)
    c_kv = rms_norm(c_kv, gamma_ckv, eps)
    k_rope = rope_interleaved(k_rope.unsqueeze(2), sin, cos)
    index_heads, dim = w_idx_proj.size(1), w_idx_k.size(1)
    q_idx = rope_half_split((cq @ w_idx_qb).unflatten(-1, (index_heads, dim)), sin, cos)
    k_idx = index_key(x, w_idx_k, in_gamma_k, in_beta_k, sin, cos, 1e-6)
    weights = index_weights(x, w_idx_proj, dim)

    # last, since other arguments may share memory with the caches
    for pool, rows in ((kv_cache, c_kv), (kr_cache, k_rope), (index_k_cache, k_idx)):
        write_cache(pool, rows, cache_index)
    indices = npu_lightning_indexer_pto(
        q_idx,
        index_k_cache,
        weights,
        actual_seq_lengths_key=act_seqs,
        block_table=block_table,
        sparse_count=sparse_count,
    )
    return npu_sparse_flash_attention_pto(
        q_latent,
        kv_cache,
        None,
        indices,
        (nope + rope) ** -0.5 if softmax_scale is None else softmax_scale,
        query_rope=q_rope,
        key_rope=kr_cache,
        block_table=block_table,
        actual_seq_lengths_kv=act_seqs,
    )


def checks(dtypes: list[torch.dtype]) -> Iterator[tuple]:
    # float16 runs the same NPU kernels as bfloat16, the slowest ones in the interpreter
    dtypes = [dtype for dtype in dtypes if dtype != torch.float16]
    return of_sequences(dtypes, [([40, 3], 1, 64), ([200, 130], 2, 16)], _arguments)


def _arguments(dtype: torch.dtype, lengths: list[int], S1: int, K: int) -> dict:
    g = torch.Generator().manual_seed(3)
    actual, table, blocks = cache(lengths, g)
    B, hidden, q_rank, heads, nope, latent, rope, index_heads, dim = (
        *(len(lengths), 256, 128, 16, 128, 512, 64, 64, 128),
    )

    def weight(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=g) * shape[-2] ** -0.5).to(dtype)

    position = actual[:, None] - S1 + torch.arange(S1)
    angle = (position[..., None] * 10000.0 ** (-torch.arange(0, rope, 2) / rope)).repeat(1, 1, 2)
    slot = table.long().gather(1, position // BLOCK) * BLOCK + position % BLOCK
    return dict(
        x=torch.randn(B, S1, hidden, generator=g).to(dtype),
        w_dq=weight(hidden, q_rank),
        w_uq_qr=weight(q_rank, heads * (nope + rope)),
        w_uk=weight(heads, nope, latent),
        w_dkv_kr=weight(hidden, latent + rope),
        gamma_cq=torch.ones(q_rank, dtype=dtype),
        gamma_ckv=torch.ones(latent, dtype=dtype),
        sin=angle.sin().to(dtype),
        cos=angle.cos().to(dtype),
        cache_index=slot,
        kv_cache=torch.randn(blocks, BLOCK, 1, latent, generator=g).to(dtype),
        kr_cache=torch.randn(blocks, BLOCK, 1, rope, generator=g).to(dtype),
        block_table=table,
        act_seqs=actual,
        w_idx_qb=weight(q_rank, index_heads * dim),
        w_idx_k=weight(hidden, dim),
        w_idx_proj=weight(hidden, index_heads),
        in_gamma_k=torch.ones(dim, dtype=dtype),
        in_beta_k=torch.zeros(dim, dtype=dtype),
        index_k_cache=torch.randn(blocks, BLOCK, 1, dim, generator=g).to(dtype),
        sparse_count=K,
    )


def error(got: Tensor, expected: Tensor, mine: dict, theirs: dict) -> tuple[float, float]:
    """The output and the three caches; caches only if K is less than the keys, since rounding
    changes the selection."""
    caches = ("kv_cache", "kr_cache", "index_k_cache")
    errors = [row_error(mine[name], theirs[name]) for name in caches]
    if theirs["sparse_count"] >= theirs["act_seqs"].max():
        errors.append(row_error(got, expected))
    # four consecutive matmuls round their results
    return max(errors), 4 * ROUNDING[expected.dtype]
