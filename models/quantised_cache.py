"""Cache rows in int8: the ops that write and read them.

A row of the latent cache is the quantised latent, RoPE's key and a float32 scale per tile of 128;
an index key has a float16 scale beside it. Index keys and queries are rotated by a Hadamard matrix,
which spreads outliers over all dims and leaves products alone, as DeepSeek-V3.2's own inference
code does. A cache rotates all of its keys or none: both kinds look alike and do not mix.
"""

import torch
from torch import Tensor

import custom_pypto

from .cache import Step
from .pools import PagedLayer


def write_latent(step: Step, layer: PagedLayer, latent: Tensor, rope: Tensor) -> None:
    """Quantises ``[B, S, L]`` and ``[B, S, 1, R]`` into the rows of new tokens."""
    dtype = step.cache.made_for["dtype"]
    custom_pypto.npu_kv_quant_update_pto(
        latent.flatten(0, 1).to(dtype), rope.flatten(0, 2).to(dtype), flat(step), layer.latent
    )


def write_index(step: Step, layer: PagedLayer, key: Tensor) -> None:
    """Rotates and quantises ``[B, S, 1, D]`` into the rows of new tokens."""
    rotation = step.cache.hadamard
    scales = layer.index_scale.squeeze(-1)
    custom_pypto.npu_quant_index_update_pto(
        key.flatten(0, 2).to(rotation.dtype), flat(step), layer.index, scales, hadamard=rotation
    )


def select(
    step: Step, layer: PagedLayer, query: Tensor, weights: Tensor, **call: Tensor | int
) -> Tensor:
    """Positions that ``query [B, S, N, D]`` selects by its products with rotated int8 keys."""
    rotation = step.cache.hadamard
    rows, scales = custom_pypto.npu_quant_rows_pto(query.to(rotation.dtype), hadamard=rotation)
    return custom_pypto.npu_quant_lightning_indexer_pto(
        rows, layer.index, weights, scales, layer.index_scale.squeeze(-1), 0, 0, **call
    )


def attend(
    layer: PagedLayer,
    query: Tensor,
    query_rope: Tensor,
    indices: Tensor,
    scaling: float,
    **call: Tensor | int,
) -> Tensor:
    """Attention of ``[B, S, H, L]`` and ``[B, S, H, R]`` over the selected int8 rows."""
    return custom_pypto.npu_kv_quant_sparse_flash_attention_pto(
        torch.cat([query, query_rope], -1),
        layer.latent,
        None,
        indices,
        scaling,
        key_quant_mode=2,
        value_quant_mode=2,
        rope_head_dim=query_rope.size(-1),
        **call,
    )


def flat(step: Step) -> Tensor:
    """Slots in the flattened pools; on an NPU a step has blocks and rows."""
    slots = step.slots
    return slots if slots.ndim == 1 else slots[:, 0] * step.cache.block_size + slots[:, 1]
