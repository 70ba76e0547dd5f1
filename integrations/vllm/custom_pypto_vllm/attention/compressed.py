"""The attention of DeepSeek-V4 in vLLM, by the ops, on any CPU.

vLLM has this model for CPUs too, but attends by kernels in AMX and AVX-512 over caches in fp8.
Here caches are in the dtype of the model.
"""

import torch
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.models.utils import extract_layer_index
from vllm.models.deepseek_v4.common.rope import build_deepseek_v4_rope
from vllm.models.deepseek_v4.cpu.cpu_sparse import _dequant_linear_weight
from vllm.utils.torch_utils import direct_register_custom_op

import custom_pypto
from custom_pypto import layer_ops
from custom_pypto.rows import IndexRows
from custom_pypto.rows.index import score_weights

from ..config import compress_ratios, sharing
from .caches import Compressor, Rows, compressed_rows, paged_rows, rotate, window_rows

INDEXED = 4  # tokens per row in the layers that select rows


class CompressedIndexer(nn.Module):
    """The lightning indexer of compressed rows, with the parameters of vLLM's class.

    Args:
        runs: False: the layer shares the selection of another one; checkpoints still have these
            parameters.
    """

    def __init__(self, config, quant_config, prefix: str, runs: bool):
        super().__init__()
        self.heads, self.width = config.index_n_heads, config.index_head_dim
        self.count = config.index_topk
        self.format = IndexRows(torch.get_default_dtype(), self.width, "cpu")
        self.wq_b = ReplicatedLinear(
            config.q_lora_rank,
            self.heads * self.width,
            bias=False,
            return_bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.wq_b",
        )
        self.weights_proj = ReplicatedLinear(
            config.hidden_size,
            self.heads,
            bias=False,
            return_bias=False,
            prefix=f"{prefix}.weights_proj",
        )
        self.compressor = Compressor(config, self.width, INDEXED, f"{prefix}.compressor", runs)
        if runs:
            self.rows = compressed_rows(f"{prefix}.k_cache", self.width, INDEXED)

    def select(self, query: Tensor, weights: Tensor, metadata) -> Tensor:
        """``[T, 1, index_topk]`` rows of each token's sequence, best first, -1 behind the last."""
        return self.format.select(
            {"index": self.rows.pool},
            query,
            score_weights(weights, self.width),
            self.count,
            lengths=metadata.seq_lens,
            cmp_ratio=INDEXED,
            **metadata.paged,
        )


class ServedCompressedAttention(nn.Module):
    """Attention over a window of tokens and compressed rows of all tokens before them.

    One latent is key and value of all heads, rotated in its last dims, so that the output is
    rotated back; a sink per head joins the softmax. Formula: DeepSeek-V4, technical report, 2.3.
    """

    # churn: the constructor and the names of the parameters, by which vLLM builds and loads
    def __init__(self, vllm_config, prefix, topk_indices_buffer=None):
        super().__init__()
        config, quantized = vllm_config.model_config.hf_config, vllm_config.quant_config
        ranks, layer = get_tensor_model_parallel_world_size(), extract_layer_index(prefix)
        self.prefix, self.width, self.window = prefix, config.head_dim, config.sliding_window
        self.heads, self.groups = config.num_attention_heads // ranks, config.o_groups // ranks
        self.q_lora_rank, self.o_lora_rank = config.q_lora_rank, config.o_lora_rank
        self.eps, self.ratio = config.rms_norm_eps, compress_ratios(config.to_dict())[layer]
        self.attn_sink = nn.Parameter(torch.zeros(self.heads, dtype=torch.float32), False)
        self.fused_wqa_wkv = MergedColumnParallelLinear(
            config.hidden_size,
            [config.q_lora_rank, config.head_dim],
            disable_tp=True,
            **_linear(quantized, f"{prefix}.fused_wqa_wkv"),
        )
        self.wq_b = ColumnParallelLinear(
            config.q_lora_rank,
            config.num_attention_heads * config.head_dim,
            **_linear(quantized, f"{prefix}.wq_b"),
        )
        self.wo_a = ColumnParallelLinear(
            config.num_attention_heads * config.head_dim // config.o_groups,
            config.o_groups * config.o_lora_rank,
            **_linear(quantized, f"{prefix}.wo_a"),
        )
        self.wo_b = RowParallelLinear(
            config.o_groups * config.o_lora_rank,
            config.hidden_size,
            **_linear(quantized, f"{prefix}.wo_b"),
        )
        self.q_norm = RMSNorm(config.q_lora_rank, self.eps)
        self.kv_norm = RMSNorm(config.head_dim, self.eps)
        self.rotary_emb = build_deepseek_v4_rope(
            config,
            head_dim=config.head_dim,
            rope_head_dim=config.qk_rope_head_dim,
            max_position_embeddings=config.max_position_embeddings,
            compress_ratio=self.ratio,
        )
        self.near = window_rows(f"{prefix}.swa_cache", self.width, self.window)
        self.compressor = self.rows = self.indexer = None
        if self.ratio > 1:
            self.compressor = Compressor(config, self.width, self.ratio, f"{prefix}.compressor")
            self.rows = compressed_rows(prefix, self.width, self.ratio)
        self.selects = self.shares = False
        if self.ratio == INDEXED:
            sources = sharing(config.to_dict())
            self.shares = layer in sources
            self.selects, self.is_source = not self.shares, layer in sources.values()
            # of all layers: a step's selection of the last of them whose others share
            self.topk_indices_buffer = topk_indices_buffer
            name = f"{prefix}.indexer"
            self.indexer = CompressedIndexer(config, quantized, name, self.selects)
        if self.selects:
            self.recorder = None  # of selections.py
        self.name = f"{prefix}.attention"  # a cache may have the prefix itself
        vllm_config.compilation_config.static_forward_context[self.name] = self
        self._keep_wo_a(vllm_config.model_config.dtype)

    @property
    def recorded_with(self) -> Rows:
        return self.indexer.rows

    def _keep_wo_a(self, dtype: torch.dtype) -> None:
        """Takes the weight of ``wo_a``, one matrix per group, before vLLM packs it for a product
        with all of its rows."""
        method = self.wo_a.quant_method

        def process(layer):
            weight = _dequant_linear_weight(layer).to(dtype)
            self.output_weight = weight.unflatten(0, (self.groups, -1)).transpose(1, 2)
            for name, parameter in layer.named_parameters():
                setattr(layer, name, nn.Parameter(parameter.new_empty(0), False))

        # churn: a method per layer, whose hook runs once after loading
        method.process_weights_after_loading = process

    def forward(self, positions, hidden_states, llama_4_scaling=None):
        latent, kv = self.fused_wqa_wkv(hidden_states).split([self.q_lora_rank, self.width], -1)
        latent, kv = self.q_norm(latent), self.kv_norm(kv)
        new = index_new = index_query = index_weights = None
        if self.compressor is not None:
            new = self.compressor.fused_wkv_wgate(hidden_states)
        if self.selects:
            index_new = self.indexer.compressor.fused_wkv_wgate(hidden_states)
            index_query = self.indexer.wq_b(latent)
            index_weights = self.indexer.weights_proj(hidden_states)
        output = hidden_states.new_empty(len(hidden_states), self.groups * self.o_lora_rank)
        torch.ops.vllm.custom_pypto_compressed_attention(
            positions,
            self.wq_b(latent),
            kv,
            new,
            index_new,
            index_query,
            index_weights,
            output,
            self.name,
        )
        return self.wo_b(output)

    def attend(self, positions, query, kv, new, index_new, index_query, index_weights) -> Tensor:
        """``[T, groups * o_lora_rank]`` of the new tokens, whose rows it writes first."""
        metadata, rope = get_forward_context().attn_metadata, self.rotary_emb
        step = metadata[self.near.prefix]
        kv = rotate(rope, kv[:, None], positions).squeeze(1)
        self.near.write(step.slot_mapping, kv)
        query = query.unflatten(-1, (self.heads, -1))
        query = rotate(rope, layer_ops.rms_norm(query, None, self.eps), positions)
        parts = [self.attend_near(query, positions, step)]
        if self.ratio > 1:
            self.compressor.write(new, positions, self.rows, rope, metadata)
            selected, tokens = None, len(positions)
            if self.selects:
                selected = self.select(positions, index_new, index_query, index_weights, metadata)
                if self.is_source:
                    self.topk_indices_buffer[:tokens] = selected
            elif self.shares:
                selected = self.topk_indices_buffer[:tokens]
            parts.append(self.attend_rows(query, positions, selected, metadata[self.rows.prefix]))
        output = rotate(rope, merge(parts).to(query.dtype), positions, -1)
        grouped = output.reshape(len(output), self.groups, -1).transpose(0, 1)
        return torch.bmm(grouped, self.output_weight).transpose(0, 1).flatten(1)

    def select(self, positions, new, query, weights, metadata) -> Tensor:
        """``[T, index_topk]`` of the new tokens, whose rows it writes first."""
        indexer, step = self.indexer, metadata[self.indexer.rows.prefix]
        indexer.compressor.write(new, positions, indexer.rows, self.rotary_emb, metadata)

        def scored() -> Tensor:
            heads = query.unflatten(-1, (indexer.heads, -1))
            return indexer.select(rotate(self.rotary_emb, heads, positions), weights, step)

        selected = step.select(indexer.count, scored, INDEXED)
        if self.recorder is not None:
            self.recorder.add(self.name, step, selected)
        return selected

    def attend_near(self, query: Tensor, positions: Tensor, step):
        seen = positions[:, None] - torch.arange(self.window)
        indices = torch.where(seen < 0, -1, seen).int()
        return self.sparse(
            query,
            self.near.pool,
            indices,
            actual_seq_lengths_kv=step.seq_lens,
            sinks=self.attn_sink,
            **step.paged,
        )

    def attend_rows(self, query: Tensor, positions: Tensor, selected: Tensor | None, step):
        lengths = step.seq_lens // self.ratio
        if selected is not None:
            return self.sparse(
                query,
                self.rows.pool,
                selected,
                actual_seq_lengths_kv=lengths,
                sparse_mode=0,
                **step.paged,
            )
        # every row, too few in a block for the op to page them
        ends = lengths.cumsum(0).int()
        sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
        number = torch.arange(len(sequence)) - (ends - lengths)[sequence]
        keys = paged_rows(self.rows.kv_cache, step.block_table, sequence, number)
        every = torch.arange(int(lengths.max())).expand(len(query), -1)
        visible = (positions[:, None] + 1) // self.ratio
        return self.sparse(
            query,
            keys[:, None],
            torch.where(every < visible, every, -1).int(),
            actual_seq_lengths_query=step.query_ends,
            actual_seq_lengths_kv=ends,
            layout_query="TND",
            layout_kv="TND",
            sparse_mode=0,
        )

    def sparse(self, query: Tensor, key: Tensor, indices: Tensor, **arguments):
        """Output ``[T, heads, D]``, and maximum and sum of each softmax ``[T, heads]``."""
        output, maximum, total = custom_pypto.npu_sparse_flash_attention_pto(
            query,
            key,
            None,
            indices[:, None].contiguous(),
            self.width**-0.5,
            return_softmax_lse=True,
            **arguments,
        )
        return output, maximum.squeeze(0), total.squeeze(0)


def merge(parts) -> Tensor:
    """The attention over the union of the keys of several, ``[T, heads, D]`` float32."""
    outputs, maxima, totals = zip(*parts, strict=True)
    maximum = torch.stack(maxima).amax(0)
    weights = [
        torch.where(m.isneginf(), 0, (m - maximum).exp() * total)
        for m, total in zip(maxima, totals, strict=True)
    ]
    summed = sum(w[..., None] * output for w, output in zip(weights, outputs, strict=True))
    return summed / sum(weights)[..., None]


def _linear(quant_config, prefix: str) -> dict:
    return dict(bias=False, return_bias=False, quant_config=quant_config, prefix=prefix)


def _attention(
    positions: Tensor,
    query: Tensor,
    kv: Tensor,
    new: Tensor | None,
    index_new: Tensor | None,
    index_query: Tensor | None,
    index_weights: Tensor | None,
    output: Tensor,
    layer_name: str,
) -> None:
    context = get_forward_context()
    if not isinstance(context.attn_metadata, dict):
        output.zero_()  # vLLM's profile run, before there are caches
        return
    layer = context.no_compile_layers[layer_name]
    tokens = context.attn_metadata[layer.near.prefix].num_actual_tokens
    inputs = (positions, query, kv, new, index_new, index_query, index_weights)
    output[tokens:] = 0
    output[:tokens] = layer.attend(*(x if x is None else x[:tokens] for x in inputs))


direct_register_custom_op(
    "custom_pypto_compressed_attention", _attention, ["output"], lambda *inputs: None
)
