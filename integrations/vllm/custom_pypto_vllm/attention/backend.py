"""Sparse attention as an attention backend of vLLM: a step's metadata, the caches, the op calls.

vLLM pages both caches, with one block table: a token has a row of latent and RoPE key in one, and a
row of its index key in the other, in a format of :mod:`custom_pypto.rows` by ``--kv-cache-dtype``.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.attention.sparse_mla_attention import SharedTopkIndicesBuffer
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionMetadataBuilder,
    MLAAttentionImpl,
    MultipleOf,
)

from custom_pypto.rows import latent_format
from custom_pypto.rows.expanded import FEWEST_TOKENS, Heads, attend_expanded
from custom_pypto.rows.index import by_position
from custom_pypto.rows.parts import row_bytes, side_by_side

from ..config import FORMATS


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
    selected: Tensor | None = None  # of a step's tokens, those of some sequences; None: all

    @cached_property
    def sequences(self) -> Tensor:
        """``[tokens]``: the sequence of each token."""
        tokens = torch.arange(self.num_actual_tokens)
        return torch.searchsorted(self.query_ends, tokens, right=True)

    @cached_property
    def seen(self) -> Tensor:
        """``[tokens, 1]``: the keys that each token sees, its own included."""
        behind = self.query_ends[self.sequences] - torch.arange(1, self.num_actual_tokens + 1)
        return (self.seq_lens[self.sequences] - behind)[:, None]

    @cached_property
    def fewest_and_most(self) -> tuple[int, int]:
        """Of the keys that tokens of this step see; every layer asks."""
        return int(self.seen.min()), int(self.seen.max())

    def select(self, count: int, scored: Callable[[], Tensor], ratio: int = 1) -> Tensor:
        """``[tokens, count]`` int32 rows of ``ratio`` tokens each, -1 behind the last: of a token
        that sees at most ``count`` all, by position, as in the models; else what ``scored()``
        selects, ``[tokens, 1, count]``, which is asked where some token sees more.

        Attention adds in the order of the rows, which must not depend on the other tokens of a
        step.
        """
        fewest, most = self.fewest_and_most
        seen = self.seen // ratio
        if most // ratio <= count:
            return by_position(count, seen)
        selected = scored().squeeze(1)
        if fewest // ratio > count:
            return selected
        return torch.where(seen <= count, by_position(count, seen), selected)

    @cached_property
    def prompts(self) -> list[tuple[int, slice]]:
        """Sequences, and their new tokens, that may attend to keys and values of all heads."""
        ends = [0, *self.query_ends.tolist()]
        tokens = [slice(*both) for both in zip(ends[:-1], ends[1:], strict=True)]
        return [(b, new) for b, new in enumerate(tokens) if new.stop - new.start >= FEWEST_TOKENS]

    def without(self, sequences: list[int]) -> "SparseMetadata":
        """The step of the other sequences."""
        counts = self.query_ends.diff(prepend=self.query_ends.new_zeros(1))
        kept = torch.ones(len(counts), dtype=torch.bool)
        kept[sequences] = False
        selected = kept[self.sequences].nonzero().flatten()
        return replace(
            self,
            num_actual_tokens=len(selected),
            query_ends=counts[kept].cumsum(0).int(),
            seq_lens=self.seq_lens[kept],
            block_table=self.block_table[kept],
            num_decodes=int(kept.sum()),
            num_decode_tokens=len(selected),
            selected=selected,
        )

    @property
    def paged(self) -> dict:
        """The arguments that all ops share: whose tokens these are, and where their keys are."""
        return dict(
            block_table=self.block_table,
            actual_seq_lengths_query=self.query_ends,
            layout_query="TND",
        )


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
    supported_kv_cache_dtypes: ClassVar = ["auto", "bfloat16", "float16", *FORMATS]

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

    @classmethod
    def supports_sink(cls):
        return True


class IndexerBackend(SparseAttentionBackend):
    """The backend of the index keys: the same pages and metadata, other rows."""

    @staticmethod
    def get_name():
        return "CUSTOM_PYPTO_INDEXER"


def without_padding(slots: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
    """Slots ``block * block_size + row``, and the rows for them; padding has negative ones."""
    if (real := slots >= 0).all():
        return slots, *rows
    return slots[real], *(x[real] for x in rows)


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
        sinks=None,
    ):
        if kv_cache_dtype not in SparseAttentionBackend.supported_kv_cache_dtypes:
            raise ValueError(
                "custom_pypto_vllm: --kv-cache-dtype must be auto, the dtype of the model, or "
                f"{' or '.join(FORMATS)}, got {kv_cache_dtype}"
            )
        self.rows = latent_format(FORMATS.get(kv_cache_dtype))(torch.get_default_dtype())
        self.parts = self.rows.parts(kv_lora_rank, qk_rope_head_dim)
        self.scale, self.kv_cache_dtype = float(scale), kv_cache_dtype
        self.sinks = {} if sinks is None else {"sinks": sinks}
        # the indexer's buffer if the layer has an indexer: speculative decoding replaces it
        self.init_topk_indices_buffer(indexer, topk_indices_buffer)

    # k_scale is of caches in fp8
    def do_kv_cache_update(self, kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale):
        if kv_cache.numel() == 0:
            return  # vLLM's profile run, before it allocates the caches
        tokens, pools = slot_mapping.numel(), side_by_side(kv_cache, self.parts)
        rows = kv_c[:tokens], k_pe[:tokens].squeeze(1)
        self.rows.write(pools, *without_padding(slot_mapping.flatten(), *rows))

    def forward_mqa(self, q, kv_cache, metadata, layer):
        """Attention of all new tokens over the selected rows: [tokens, heads, kv_lora_rank]."""
        own = slice(len(q[0])) if metadata.selected is None else metadata.selected
        indices = self.topk_indices_buffer[own, None]
        output = self.rows.attend(
            side_by_side(kv_cache, self.parts),
            *q,
            indices,
            self.scale,
            lengths=metadata.seq_lens,
            **metadata.paged,
            **self.sinks,
        )
        return output, None


class SparseAttention(MLAAttention):
    """vLLM's layer, which declares the bytes of these rows, and absorbs the queries of all tokens
    but of prompts for which expansion is cheaper (:mod:`custom_pypto.rows.expanded`)."""

    # churn: the arguments of MLAAttention.forward_impl
    def forward_impl(self, q, k_c, k_pe, kv_cache, attn_metadata, output, *others, **keywords):
        step = attn_metadata
        expanded = self.expand(q, kv_cache, step, output) if step and not self.impl.sinks else []
        if not expanded:
            return super().forward_impl(q, k_c, k_pe, kv_cache, step, output, *others, **keywords)
        rest = step.without(expanded)
        if len(own := rest.selected):
            absorbed = output[own]
            inputs = q[own], k_c[own], k_pe[own], kv_cache, rest, absorbed
            super().forward_impl(*inputs, *others, **keywords)
            output[own] = absorbed
        return output

    def expand(self, q, kv_cache, step: SparseMetadata, output) -> list[int]:
        """Writes the outputs of prompts that are cheaper expanded, and returns their sequences."""
        found, impl, weight = [], self.impl, None
        for b, new in step.prompts:
            if weight is None:
                weight = torch.cat([self.W_UK_T, self.W_UV.transpose(1, 2)], 1)
            q_nope, q_pe = q[None, new].tensor_split([self.qk_nope_head_dim], -1)
            heads = Heads(q_nope, q_pe, weight, impl.scale, None)
            pools, table = side_by_side(kv_cache, impl.parts), step.block_table[b : b + 1]
            first = partial(impl.rows.first, pools, table, latent=self.kv_lora_rank)
            indices = impl.topk_indices_buffer[None, new, None]
            x = attend_expanded(heads, indices, step.seq_lens[b : b + 1], first)
            if x is not None:
                output[new] = x.flatten(2).squeeze(0)
                found.append(b)
        return found

    # churn: state_content_bytes, the bytes of a row that are no multiple of values
    def get_kv_cache_spec(self, vllm_config):
        spec = super().get_kv_cache_spec(vllm_config)
        if self.kv_cache_dtype not in FORMATS:
            return spec
        return replace(spec, state_content_bytes=row_bytes(self.impl.parts))
