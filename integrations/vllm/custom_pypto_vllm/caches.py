"""Rows of the caches that vLLM pages: how the ops write and read them.

A cache is ``[blocks, block_size, width]``. Rows are in the dtype of the model, or in int8 with
scales of their own, by ``--kv-cache-dtype int8_per_token_head``. New tokens come packed
with a slot each, ``block * block_size + row``, negative for padding.
"""

from dataclasses import replace

import torch
from torch import Tensor
from vllm.model_executor.layers.attention import MLAAttention

import custom_pypto
from custom_pypto.cache_rows import hadamard_matrix, int8_index_row_bytes, int8_row_bytes

from .checks import INT8


def write_rows(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Writes ``rows [tokens, width]`` into ``cache`` at their slots."""
    if (slots < 0).any():
        rows, slots = rows[slots >= 0], slots[slots >= 0]
    size = cache.shape[1]
    cache[slots // size, slots % size] = rows.to(cache.dtype)


def paged(metadata) -> dict:
    """The arguments that all ops share: whose tokens these are, and where their keys are."""
    return dict(
        block_table=metadata.block_table,
        actual_seq_lengths_query=metadata.query_ends,
        layout_query="TND",
    )


class ServedLatentRows:
    """``latent | rope``, in the dtype of the model."""

    def __init__(self, latent: int):
        self.latent = latent

    def write(self, cache: Tensor, slots: Tensor, latent: Tensor, rope: Tensor) -> None:
        write_rows(cache, slots, torch.cat([latent, rope], dim=-1))

    def attend(self, query, query_rope, cache, indices, scale, metadata, sinks) -> Tensor:
        """``[tokens, heads, latent]``, over the rows that ``indices [tokens, 1, K]`` select."""
        latent, key_rope = cache[..., None, :].tensor_split([self.latent], dim=-1)
        return custom_pypto.npu_sparse_flash_attention_pto(
            query,
            latent,
            None,
            indices,
            scale,
            query_rope=query_rope,
            key_rope=key_rope,
            actual_seq_lengths_kv=metadata.seq_lens,
            sinks=sinks,
            **paged(metadata),
        )


class ServedInt8LatentRows(ServedLatentRows):
    """Those of :func:`custom_pypto.npu_kv_quant_update_pto`: 656 bytes for latents of 512."""

    def write(self, cache, slots, latent, rope):
        custom_pypto.npu_kv_quant_update_pto(latent, rope, slots, cache[..., None, :])

    def attend(self, query, query_rope, cache, indices, scale, metadata, sinks):
        if sinks is not None:  # check_hy_v4 rejects the cache
            raise ValueError("custom_pypto_vllm: int8 caches take no sinks, got a tensor")
        # churn: MLAAttention.forward_impl takes any quantized cache for one in fp8
        return custom_pypto.npu_kv_quant_sparse_flash_attention_pto(
            torch.cat([query, query_rope], dim=-1),
            cache.view(torch.int8)[..., None, :],
            None,
            indices,
            scale,
            2,
            2,
            rope_head_dim=query_rope.shape[-1],
            actual_seq_lengths_kv=metadata.seq_lens,
            **paged(metadata),
        )


class ServedIndexRows:
    """Keys of the indexer, in the dtype of the model."""

    def __init__(self, dim: int):
        self.width, self.dtype = dim, torch.get_default_dtype()

    def write(self, cache: Tensor, slots: Tensor, key: Tensor) -> None:
        write_rows(cache, slots, key)

    def select(self, query, weights, cache, metadata, count: int) -> Tensor:
        """``[tokens, 1, count]`` positions, best first, -1 behind the last."""
        return custom_pypto.npu_lightning_indexer_pto(
            query, cache[..., None, :], weights, **self.arguments(metadata, count)
        )

    def arguments(self, metadata, count: int) -> dict:
        return paged(metadata) | dict(actual_seq_lengths_key=metadata.seq_lens, sparse_count=count)


class ServedInt8IndexRows(ServedIndexRows):
    """int8 keys and a float16 scale: ``key | scale``. A Hadamard matrix rotates keys and queries,
    as in DeepSeek-V3.2's own inference code.
    """

    def __init__(self, dim: int):
        self.dim, self.width, self.dtype = dim, int8_index_row_bytes(dim), torch.int8
        self.rotation = hadamard_matrix(dim).to(torch.get_default_dtype())

    def split(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys ``[blocks, block_size, 1, dim]`` and scales ``[blocks, block_size, 1]``."""
        keys, scales = cache.tensor_split([self.dim], dim=-1)
        return keys[..., None, :], scales.view(torch.float16)

    def write(self, cache, slots, key):
        custom_pypto.npu_quant_index_update_pto(
            key, slots, *self.split(cache), hadamard=self.rotation
        )

    def select(self, query, weights, cache, metadata, count):
        rows, scales = custom_pypto.npu_quant_rows_pto(query, hadamard=self.rotation)
        keys, key_scales = self.split(cache)
        return custom_pypto.npu_quant_lightning_indexer_pto(
            rows, keys, weights, scales, key_scales, 0, 0, **self.arguments(metadata, count)
        )


def latent_rows(kv_cache_dtype: str, latent: int) -> ServedLatentRows:
    return (ServedInt8LatentRows if kv_cache_dtype == INT8 else ServedLatentRows)(latent)


def index_rows(kv_cache_dtype: str, dim: int) -> ServedIndexRows:
    return (ServedInt8IndexRows if kv_cache_dtype == INT8 else ServedIndexRows)(dim)


class SparseAttention(MLAAttention):
    """vLLM's layer, which declares the bytes of these rows."""

    # churn: state_content_bytes, the bytes of a row that are no multiple of values
    def get_kv_cache_spec(self, vllm_config):
        spec = super().get_kv_cache_spec(vllm_config)
        if self.kv_cache_dtype != INT8:
            return spec
        size = int8_row_bytes(self.kv_lora_rank, self.qk_rope_head_dim)
        return replace(spec, state_content_bytes=size)
