from collections.abc import Iterator

import torch
from torch import Tensor

from .checks import ROUNDING, SIZES, of_sequences, row_error
from .npu_kv_quant_update_pto import SCALE_GROUP, npu_kv_quant_update_pto
from .npu_sparse_flash_attention_pto import arguments as unquantized
from .npu_sparse_flash_attention_pto import npu_sparse_flash_attention_pto


def dequantized_latents(cache: Tensor, latent: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``(latent, rope)`` of the rows of an int8 cache, in ``dtype``: each int8 times the scale of
    its group, in float32, then rounded."""
    scales = cache.size(-1) - latent // SCALE_GROUP * 4
    values, rope, scale = cache.tensor_split([latent, scales], -1)
    # views of another dtype need rows of their own, which start at a multiple of its size
    scale, rope = (part.clone(memory_format=torch.contiguous_format) for part in (scale, rope))
    scale = scale.view(torch.float32)
    values = values.unflatten(-1, (-1, SCALE_GROUP)).float() * scale.unsqueeze(-1)
    return values.flatten(-2).to(dtype).contiguous(), rope.view(dtype)


def npu_kv_quant_sparse_flash_attention_pto(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    key_quant_mode: int,
    value_quant_mode: int,
    *,
    key_dequant_scale: Tensor | None = None,
    value_dequant_scale: Tensor | None = None,
    block_table: Tensor | None = None,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "PA_BSND",
    sparse_mode: int = 3,
    attention_mode: int = 2,
    quant_scale_repo_mode: int = 1,
    tile_size: int = SCALE_GROUP,
    rope_head_dim: int = 64,
) -> Tensor:
    """Sparse attention over the dequantized rows."""
    latent = query.size(-1) - rope_head_dim
    keys, key_rope = dequantized_latents(key, latent, query.dtype)
    return npu_sparse_flash_attention_pto(
        query[..., :latent],
        keys,
        None,
        sparse_indices,
        scale_value,
        block_table=block_table,
        actual_seq_lengths_query=actual_seq_lengths_query,
        actual_seq_lengths_kv=actual_seq_lengths_kv,
        query_rope=query[..., latent:],
        key_rope=key_rope,
        layout_query=layout_query,
        layout_kv=layout_kv,
        sparse_mode=sparse_mode,
    )


def checks(dtypes: list[torch.dtype]) -> Iterator[tuple]:
    return of_sequences([dtype for dtype in dtypes if dtype.itemsize == 2], SIZES, _arguments)


def _arguments(*sizes) -> dict:
    x = unquantized(*sizes)
    key, key_rope = x.pop("key"), x.pop("key_rope")
    cache = key.new_empty(*key.shape[:-1], 656, dtype=torch.int8)
    slots = torch.arange(key.size(0) * key.size(1)).view(key.shape[:2])
    npu_kv_quant_update_pto(key.squeeze(2), key_rope.squeeze(2), slots, cache)
    query = torch.cat([x.pop("query"), x.pop("query_rope")], -1)
    modes = dict(key_quant_mode=2, value_quant_mode=2)
    return dict(query=query, key=cache) | x | modes


def error(got: Tensor, expected: Tensor, mine: dict, theirs: dict) -> tuple[float, float]:
    # as of npu_sparse_flash_attention_pto
    return row_error(got, expected), 2 * ROUNDING[expected.dtype]
