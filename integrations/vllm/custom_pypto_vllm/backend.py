"""Sparse attention as an attention backend of vLLM: a step's metadata, the caches, the op calls.

Both caches are paged by vLLM and share a block table: latent and RoPE key of a token in a row of
``[blocks, block_size, kv_lora_rank + qk_rope_head_dim]``, its index key in a row of
``[blocks, block_size, index_head_dim]``, both in the dtype of the model.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.sparse_mla_attention import SharedTopkIndicesBuffer
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionMetadataBuilder,
    MLAAttentionImpl,
    MultipleOf,
)

import custom_pypto


@dataclass
class SparseMetadata(AttentionMetadata):
    """A step of the engine: the new tokens of all sequences, packed as in the ops' layout TND."""

    num_actual_tokens: int
    query_ends: Tensor  # [sequences] int32, inclusive prefix sums of the new tokens
    seq_lens: Tensor  # [sequences] int32, keys of each sequence with the new ones
    block_table: Tensor  # [sequences, blocks] int32
    slot_mapping: Tensor  # [tokens] int64, negative for padding
    # churn: vllm's MLAAttention.forward_impl reads these, though the base class does not have
    # them; every token counts as decode, so that a mixed batch is one call
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0


class SparseMetadataBuilder(AttentionMetadataBuilder[SparseMetadata]):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    # churn: the fields of CommonAttentionMetadata
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        step = common_attn_metadata
        return SparseMetadata(
            num_actual_tokens=step.num_actual_tokens,
            query_ends=step.query_start_loc[1 : step.num_reqs + 1],
            seq_lens=step.seq_lens[: step.num_reqs],
            block_table=step.block_table_tensor[: step.num_reqs],
            slot_mapping=step.slot_mapping[: step.num_actual_tokens],
            num_decodes=step.num_reqs,
            num_decode_tokens=step.num_actual_tokens,
        )


class SparseAttentionBackend(AttentionBackend):
    supported_dtypes: ClassVar = [torch.bfloat16, torch.float16, torch.float32]
    supported_kv_cache_dtypes: ClassVar = ["auto", "bfloat16", "float16"]

    @staticmethod
    def get_name():
        return "CUSTOM_PYPTO_SPARSE"

    @staticmethod
    def get_builder_cls():
        return SparseMetadataBuilder

    @staticmethod
    def get_impl_cls():
        return SparseAttentionImpl

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(16)]

    @classmethod
    def is_mla(cls):
        return True

    @classmethod
    def is_sparse(cls):
        return True


class IndexerBackend(SparseAttentionBackend):
    """The backend of the index keys: the same pages and metadata, other rows."""

    @staticmethod
    def get_name():
        return "CUSTOM_PYPTO_INDEXER"


def write_rows(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Writes ``rows [tokens, width]`` into ``cache [blocks, block_size, width]`` at their slots.

    Rows at a negative slot are padding and not written.
    """
    if cache.numel() == 0:
        return  # vLLM's profile run, before it allocates the caches
    slots = slots.flatten()
    rows = rows[: len(slots)]
    if (slots < 0).any():
        rows, slots = rows[slots >= 0], slots[slots >= 0]
    size = cache.shape[1]
    cache[slots // size, slots % size] = rows.to(cache.dtype)


# churn: the arguments by which MLAAttention.__init__ makes an implementation, and the methods that
# its forward_impl calls; index_group_builder groups the layers of an accelerator's cache
class SparseAttentionImpl(SharedTopkIndicesBuffer, MLAAttentionImpl[SparseMetadata]):
    is_sparse = True
    supports_dense_mha_prefill = False
    supports_pcp = False

    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads,
        alibi_slopes,
        sliding_window,
        kv_cache_dtype,
        logits_soft_cap,
        attn_type,
        kv_sharing_target_layer_name,
        *,
        q_lora_rank,
        kv_lora_rank,
        qk_nope_head_dim,
        qk_rope_head_dim,
        qk_head_dim,
        v_head_dim,
        kv_b_proj,
        indexer,
        topk_indices_buffer,
    ):
        if is_quantized_kv_cache(kv_cache_dtype):
            raise ValueError(
                "custom_pypto_vllm: --kv-cache-dtype must be auto, the dtype of the model, got "
                f"{kv_cache_dtype}; this plugin keeps no quantised cache"
            )
        self.scale, self.kv_lora_rank = float(scale), kv_lora_rank
        self.kv_cache_dtype = kv_cache_dtype
        # the indexer's buffer if the layer has an indexer: speculative decoding replaces it
        self.init_topk_indices_buffer(indexer, topk_indices_buffer)

    def do_kv_cache_update(self, kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale):
        write_rows(kv_cache, slot_mapping, torch.cat([kv_c, k_pe.squeeze(1)], dim=-1))

    def forward_mqa(self, q, kv_cache, metadata, layer):
        """Attention of all new tokens over the selected rows: [tokens, heads, kv_lora_rank]."""
        query, query_rope = q
        latent, key_rope = kv_cache[..., None, :].tensor_split([self.kv_lora_rank], dim=-1)
        out = custom_pypto.npu_sparse_flash_attention_pto(
            query,
            latent,
            None,
            self.topk_indices_buffer[: len(query), None],
            self.scale,
            block_table=metadata.block_table,
            actual_seq_lengths_query=metadata.query_ends,
            actual_seq_lengths_kv=metadata.seq_lens,
            query_rope=query_rope,
            key_rope=key_rope,
            layout_query="TND",
        )
        return out, None


def select(query: Tensor, key: Tensor, weights: Tensor, indices: Tensor, cache, metadata) -> None:
    """Writes the index keys of the new tokens into ``cache [blocks, block_size, index_head_dim]``,
    then the positions that each token selects into the first rows of ``indices``."""
    tokens = metadata.num_actual_tokens
    write_rows(cache, metadata.slot_mapping, key)
    indices[:tokens] = custom_pypto.npu_lightning_indexer_pto(
        query[:tokens],
        cache[..., None, :],
        weights[:tokens],
        actual_seq_lengths_query=metadata.query_ends,
        actual_seq_lengths_key=metadata.seq_lens,
        block_table=metadata.block_table,
        layout_query="TND",
        sparse_count=indices.shape[1],
    ).squeeze(1)
