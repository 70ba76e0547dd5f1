from collections.abc import Iterator

import torch
from torch import Tensor

from .checks import BLOCK, ROUNDING, row_error
from .npu_quant_index_update_pto import npu_quant_index_update_pto
from .npu_quant_rows_pto import dequantized_rows, hadamard_matrix, npu_quant_rows_pto
from .npu_sparse_attention_pto import index_key, index_weights, rope_half_split


def npu_lightning_indexer_prolog_pto(
    token_x: Tensor,
    q_norm: Tensor,
    q_norm_scale: Tensor | None,
    wq_b: Tensor,
    wq_b_scale: Tensor | None,
    wk: Tensor,
    weights_proj: Tensor,
    ln_gamma_k: Tensor,
    ln_beta_k: Tensor,
    cos_idx_rope: Tensor,
    sin_idx_rope: Tensor,
    hadamard_q: Tensor,
    hadamard_k: Tensor,
    idx_k_cache: Tensor,
    idx_k_scale_cache: Tensor,
    idx_k_cache_index: Tensor,
    layernorm_epsilon_k: float,
    *,
    layout_query: str = "TND",
    layout_key: str = "PA_BSND",
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and index weights of new tokens, and their keys into the int8 cache."""
    angles, (N1, D) = (sin_idx_rope, cos_idx_rope), (weights_proj.size(1), wk.size(1))
    q = q_norm @ wq_b if q_norm_scale is None else (q_norm.double() @ wq_b.double()).float()
    if q_norm_scale is not None:
        q = (q * q_norm_scale.view(-1, 1) * wq_b_scale.view(1, -1)).to(token_x.dtype)
    q = rope_half_split(q.unflatten(-1, (N1, D)), *angles)
    query, query_scale = npu_quant_rows_pto(q, hadamard=hadamard_q)
    key = index_key(token_x, wk, ln_gamma_k, ln_beta_k, *angles, layernorm_epsilon_k)
    weights = index_weights(token_x, weights_proj, D)
    npu_quant_index_update_pto(
        key.squeeze(1),
        idx_k_cache_index,
        idx_k_cache,
        idx_k_scale_cache.view(idx_k_cache.shape[:3]),
        hadamard=hadamard_k,
    )
    return query, query_scale.unsqueeze(-1), weights.half()


def checks(dtypes: list[torch.dtype]) -> Iterator[tuple]:
    for dtype in dtypes:
        for tokens, w8a8 in ((1, True), (3, False), (40, True)):
            shape = f"T {tokens}, {'W8A8' if w8a8 else 'no scales'}"
            yield dtype, shape, _arguments(tokens, w8a8, dtype)


def _arguments(T: int, w8a8: bool, dtype: torch.dtype) -> dict:
    g = torch.Generator().manual_seed(4)
    hidden, q_rank, heads, dim, rope, blocks = 256, 128, 64, 128, 64, 3

    def weight(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g) * shape[-2] ** -0.5

    q_norm, wq_b, scales = torch.randn(T, q_rank, generator=g), weight(q_rank, heads * dim), {}
    if w8a8:
        row, column = (x.abs().amax(d) / 127 for x, d in ((q_norm, 1), (wq_b, 0)))
        q_norm, wq_b = ((q_norm / row[:, None]).round(), (wq_b / column).round())
        scales = dict(q_norm_scale=row, wq_b_scale=column)
    made = torch.int8 if w8a8 else dtype
    position = torch.randint(10000, (T,), generator=g)
    angle = (position[:, None] * 10000.0 ** (-torch.arange(0, rope, 2) / rope)).repeat(1, 2)
    slots = torch.randperm(blocks * BLOCK, generator=g)[:T]
    slots[2::6] = -1  # padding
    return dict(
        token_x=torch.randn(T, hidden, generator=g).to(dtype),
        q_norm=q_norm.to(made),
        q_norm_scale=scales.get("q_norm_scale"),
        wq_b=wq_b.to(made),
        wq_b_scale=scales.get("wq_b_scale"),
        wk=weight(hidden, dim).to(dtype),
        weights_proj=weight(hidden, heads).to(dtype),
        ln_gamma_k=(1 + torch.randn(dim, generator=g) / 8).to(dtype),
        ln_beta_k=(torch.randn(dim, generator=g) / 8).to(dtype),
        cos_idx_rope=angle.cos().to(dtype),
        sin_idx_rope=angle.sin().to(dtype),
        hadamard_q=hadamard_matrix(dim).to(dtype),
        hadamard_k=hadamard_matrix(dim).to(dtype),
        idx_k_cache=torch.randint(-128, 128, (blocks, BLOCK, 1, dim), generator=g).to(torch.int8),
        idx_k_scale_cache=torch.rand(blocks, BLOCK, 1, generator=g).half() + 1,
        idx_k_cache_index=slots,
        layernorm_epsilon_k=1e-6,
    )


def error(got: tuple, expected: tuple, mine: dict, theirs: dict) -> tuple[float, float]:
    """The largest relative error of a row: of dequantized queries and caches, and of weights."""

    def tensors(result: tuple, arguments: dict) -> tuple:
        query, scale, weights = result
        keys, scales = arguments["idx_k_cache"], arguments["idx_k_scale_cache"]
        return dequantized_rows(query, scale[..., 0]), dequantized_rows(keys, scales), weights

    pairs = zip(tensors(got, mine), tensors(expected, theirs), strict=True)
    # one of the 127 steps; four results are rounded before: projection, LayerNorm, RoPE, rotation
    return max(row_error(*pair) for pair in pairs), 1 / 127 + 4 * ROUNDING[theirs["token_x"].dtype]
