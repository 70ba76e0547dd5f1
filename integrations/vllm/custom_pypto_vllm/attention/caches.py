"""Caches that vLLM pages beside those of its own layers: index keys; and of DeepSeek-V4 a window of
tokens, compressed rows, and their states.

Each is a layer to vLLM, with a spec of its own, so that prefix cache, preemption and chunked
prefill hold. Shapes: T new tokens of all sequences, packed; r tokens per compressed row; D width of
a row.
"""

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.kv_cache_interface import (
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SparseCacheRole,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from custom_pypto import layer_ops
from custom_pypto.rows import index_format
from custom_pypto.rows.compressed import pooled
from custom_pypto.rows.parts import row_bytes, write

from ..config import FORMATS, GROUPS
from .backend import IndexerBackend, SparseAttentionBackend, without_padding

WINDOW_BLOCK = 64
STATE_BLOCKS = {4: 4, 128: 8}  # tokens, by r: about as many bytes as a block of compressed rows


class RowsBackend(SparseAttentionBackend):
    """Blocks of any size: states have fewer tokens in a block than the ops read."""

    @staticmethod
    def get_name():
        return "CUSTOM_PYPTO_ROWS"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls):
        # blocks of all caches side by side, each of its own size: with equal blocks the smallest
        # rows have blocks of 8192 tokens, and the prefix cache finds only multiples of that
        return (KVCacheLayout.BLHNC, KVCacheLayout.BLNHC)


class Rows(nn.Module, AttentionLayerBase):
    """A cache ``[blocks, rows, D]`` that vLLM allocates by ``spec`` and finds by ``prefix``."""

    backend: type[SparseAttentionBackend] = RowsBackend

    # churn: the methods that vLLM's own caches of index keys have
    def __init__(self, prefix: str, spec: KVCacheSpec):
        super().__init__()
        self.prefix, self.spec, self.kv_cache = prefix, spec, torch.tensor([])
        get_current_vllm_config().compilation_config.static_forward_context[prefix] = self

    def get_kv_cache_spec(self, vllm_config) -> KVCacheSpec:
        return self.spec

    def get_attn_backend(self):
        return self.backend

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        self.kv_cache = kv_cache.squeeze(1)

    @property
    def pool(self) -> Tensor:
        """``[blocks, rows, 1, D]``, as the ops take it."""
        return self.kv_cache.unsqueeze(-2)

    @property
    def block_tokens(self) -> int:
        """Tokens in a block, of the block table of a step."""
        return self.kv_cache.shape[1] * self.spec.tokens_per_state

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Writes ``rows [T, D]``."""
        write(self.pool, *without_padding(slots, rows))

    def forward(self): ...


class IndexCache(Rows):
    """Index keys in a format of :mod:`custom_pypto.rows`, in place of vLLM's cache of an
    ``indexer``, whose fp8 keys stand beside their scales."""

    backend = IndexerBackend

    def __init__(self, indexer, kv_cache_dtype: str):
        rows = index_format(FORMATS.get(kv_cache_dtype))
        rows = rows(torch.get_default_dtype(), indexer.head_dim, "cpu")
        parts = rows.parts(indexer.head_dim)
        dtype = parts["index"].dtype
        spec = MLAAttentionSpec(
            block_size=get_current_vllm_config().cache_config.block_size,
            num_kv_heads=1,
            max_tp_shards=1,
            head_size=row_bytes(parts) // dtype.itemsize,
            dtype=dtype,
            cache_role=SparseCacheRole.INDEXER,
        )
        super().__init__(indexer.k_cache.prefix, spec)
        self.format, self.parts = rows, parts
        self.recorder = None  # of selections.py
        # by this name speculative decoding finds it in a draft, and sets it to the target's buffer
        self.topk_indices_buffer = indexer.topk_indices_buffer

    @property
    def recorded_with(self) -> Rows:
        """The cache whose blocks keep what :mod:`..selections` records of this layer."""
        return self


def window_rows(prefix: str, width: int, tokens: int) -> Rows:
    return Rows(prefix, _recent(WINDOW_BLOCK, width, torch.get_default_dtype(), tokens))


def compressed_rows(prefix: str, width: int, ratio: int) -> Rows:
    spec = MLAAttentionSpec(
        block_size=get_current_vllm_config().cache_config.block_size,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=width,
        dtype=torch.get_default_dtype(),
        tokens_per_state=ratio,
    )
    return Rows(prefix, spec)


def _recent(block: int, width: int, dtype: torch.dtype, tokens: int) -> SlidingWindowMLASpec:
    return SlidingWindowMLASpec(
        block_size=block,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=width,
        dtype=dtype,
        sliding_window=tokens,
    )


def paged_rows(cache: Tensor, block_table: Tensor, sequence: Tensor, rows: Tensor) -> Tensor:
    """``[n, D]``: rows by number, ``[n]``, of sequences ``[n]``."""
    size = cache.shape[1]
    return cache[block_table[sequence, rows // size].long(), rows % size]


def rotate(rope, x: Tensor, positions: Tensor, sign: int = 1) -> Tensor:
    """RoPE on pairs of the last dims of ``x [T, heads, dim]``; back again with ``sign`` -1."""
    cos, sin = rope.cos_sin_cache[positions].float()[None].chunk(2, dim=-1)
    # in float32, as vLLM's angles: the op takes those of the dtype of x
    return layer_ops.rotate_pairs(x.float()[None], cos, sign * sin)[0].to(x.dtype)


class Compressor(nn.Module):
    """Rows of r tokens (:mod:`custom_pypto.rows.compressed`), for r = 4 with overlap, by parameters
    with the names of vLLM's class.

    Args:
        runs: False: it has its parameters alone.
    """

    def __init__(self, config, width: int, ratio: int, prefix: str, runs: bool = True):
        super().__init__()
        self.ratio, self.groups, self.width = ratio, GROUPS[ratio], width
        inner = self.groups * width
        self.ape = nn.Parameter(torch.empty(ratio, inner, dtype=torch.float32), False)
        self.fused_wkv_wgate = MergedColumnParallelLinear(
            config.hidden_size,
            [inner, inner],
            bias=False,
            return_bias=False,
            disable_tp=True,
            prefix=f"{prefix}.fused_wkv_wgate",
        )
        self.norm = RMSNorm(width, config.rms_norm_eps)
        if runs:
            spec = _recent(STATE_BLOCKS[ratio], 2 * inner, torch.float32, self.groups * ratio)
            self.state = Rows(f"{prefix}.state_cache", spec)

    def write(self, new: Tensor, positions: Tensor, rows: Rows, rope, metadata: dict) -> None:
        """Writes the states ``new [T, 2 * groups * D]``, and the rows that these tokens complete,
        rotated by the position of their first token."""
        step = metadata[self.state.prefix]
        values, gates = new.float().chunk(2, dim=-1)
        gates = gates + self.ape[positions % self.ratio]
        self.state.write(step.slot_mapping, torch.cat([values, gates], dim=-1))

        complete = ((positions + 1) % self.ratio == 0).nonzero().flatten()
        if not len(complete):
            return
        last, span = positions[complete], self.groups * self.ratio
        tokens = last[:, None] + torch.arange(1 - span, 1)
        sequence = step.sequences[complete, None].expand_as(tokens)
        found = paged_rows(self.state.kv_cache, step.block_table, sequence, tokens.clamp(min=0))
        values, gates = found.unflatten(1, (self.groups, -1)).chunk(2, dim=-1)
        exists = (tokens >= 0).unflatten(1, (self.groups, -1))
        sums = pooled(values, gates, exists, self.width)
        row = rotate(rope, self.norm(sums.to(new.dtype)), last + 1 - self.ratio)
        # a block has as many tokens per row as rows have tokens
        slots = metadata[rows.prefix].slot_mapping[complete] // self.ratio
        rows.write(slots, row.squeeze(1))
