"""vLLM's outer layer of multi-head latent attention, with the sparse-attention ops inside.

The projections, norms and weights are vLLM's own, so that loading, tensor parallelism, LoRA and
quantized weights stay its own, too.
"""

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.utils.torch_utils import direct_register_custom_op

from custom_pypto.rows.index import score_weights
from custom_pypto.rows.parts import side_by_side

from ..checks import check
from .backend import SparseAttention, SparseAttentionBackend, without_padding
from .caches import IndexCache


def _index(query: Tensor, key: Tensor, weights: Tensor, q: Tensor, layer_name: str) -> None:
    context = get_forward_context()
    if isinstance(context.attn_metadata, dict):  # else vLLM's profile run, before there are caches
        layer = context.no_compile_layers[layer_name]
        metadata = context.attn_metadata[layer_name]
        tokens, indices = metadata.num_actual_tokens, layer.topk_indices_buffer
        pools = side_by_side(layer.kv_cache, layer.parts)
        layer.format.write(pools, *without_padding(metadata.slot_mapping, key[:tokens]))
        count = indices.shape[1]
        indices[:tokens] = metadata.select(
            count,
            lambda: layer.format.select(
                pools,
                query[:tokens],
                weights[:tokens],
                count,
                lengths=metadata.seq_lens,
                **metadata.paged,
            ),
        )
        if layer.recorder is not None:
            layer.recorder.add(layer_name, metadata, indices[:tokens])


# An op, because torch.compile must not look into a step's metadata. It fills a buffer that
# attention reads; the compiler knows nothing of it. To keep attention behind it, q, the query of
# the attention, is declared as mutated. Declaring the buffer itself gives wrong text: the compiler
# would fill a copy and copy it back after the last layer.
direct_register_custom_op("custom_pypto_index", _index, ["q"], lambda *inputs: None)


class ServedLatentAttention:
    """Mixed into layers of vLLM: attention over what their indexer selects.

    Formula: arXiv:2512.02556, section 2.1. Positions and hidden states of the new tokens of all
    sequences come packed, ``[tokens]`` and ``[tokens, hidden]``; caches and lengths come from the
    step's metadata.
    """

    index_rope_last = False  # the dims of the indexer that are rotated

    def own_index_cache(self) -> None:
        if self.indexer is not None:
            self.indexer.k_cache = IndexCache(self.indexer, self.mla_attn.kv_cache_dtype)

    def attend(self, positions, hidden_states, scaling=None):
        """``[tokens, heads * v_head_dim]``, before the output projection."""
        q_c, kv_c, k_pe = self.fused_qkv_a_proj(hidden_states)[0].split(
            [self.q_lora_rank, self.kv_lora_rank, self.qk_rope_head_dim], dim=-1
        )
        q_c, kv_c = self.q_a_layernorm(q_c), self.kv_a_layernorm(kv_c)
        q = self.q_b_proj(q_c)[0].unflatten(-1, (self.num_heads, -1))
        q_nope, q_pe = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        q_pe, k_pe = _rotate(self.rotary_emb, positions, q_pe, k_pe)
        q = torch.cat([q_nope, q_pe], dim=-1)
        if scaling is not None:
            q = q * scaling

        if self.indexer is not None and not self.skip_topk:
            self.select(positions, hidden_states, q_c, q)
        return self.mla_attn(
            q,
            kv_c,
            k_pe,
            output_shape=(len(hidden_states), self.num_heads * self.v_head_dim),
        )

    def select(self, positions, hidden_states, q_c, attention_query):
        """The scores of the indexer: sum over heads of weight * relu(q . k), top-k by the op."""
        indexer = self.indexer
        q = indexer.wq_b(q_c)[0].unflatten(-1, (indexer.n_head, indexer.head_dim))
        k, weights = indexer.wk_weights_proj(hidden_states)[0].split(
            [indexer.head_dim, indexer.n_head], dim=-1
        )
        k = indexer.k_norm(k).to(q.dtype)
        dims = [indexer.rope_dim, indexer.head_dim - indexer.rope_dim]
        if self.index_rope_last:
            (q_nope, q_pe), (k_nope, k_pe) = q.split(dims[::-1], -1), k.split(dims[::-1], -1)
        else:
            (q_pe, q_nope), (k_pe, k_nope) = q.split(dims, -1), k.split(dims, -1)
        q_pe, k_pe = _rotate(self.indexer_rope_emb, positions, q_pe, k_pe)
        # equal products in whatever order the dims have
        torch.ops.vllm.custom_pypto_index(
            torch.cat([q_pe, q_nope], dim=-1),
            torch.cat([k_pe.squeeze(1), k_nope], dim=-1),
            score_weights(weights, indexer.head_dim),
            attention_query,
            indexer.k_cache.prefix,
        )


class SparseAttentionLayer(ServedLatentAttention, MultiHeadLatentAttentionWrapper):
    """The layer of DeepSeek-V3.2 and GLM-5; layers without an indexer's indices are vLLM's own."""

    # churn: the constructor of vllm/model_executor/layers/mla.py; an argument that is not listed
    # here is an error
    def __init__(
        self,
        hidden_size,
        num_heads,
        scale,
        qk_nope_head_dim,
        qk_rope_head_dim,
        v_head_dim,
        q_lora_rank,
        kv_lora_rank,
        mla_modules,
        cache_config=None,
        quant_config=None,
        prefix="",
        skip_topk=False,
        non_causal_multi_token_decode=False,
        allow_short_prefill_indexer_scoring_skip=False,  # speed alone, on CUDA alone
        fuse_qkv_rmsnorm=False,  # speed alone
    ):
        same = dict(
            qk_nope_head_dim=qk_nope_head_dim,
            qk_rope_head_dim=qk_rope_head_dim,
            v_head_dim=v_head_dim,
            q_lora_rank=q_lora_rank,
            kv_lora_rank=kv_lora_rank,
            cache_config=cache_config,
            quant_config=quant_config,
        )
        modules = mla_modules
        if not modules.is_sparse:
            super().__init__(
                hidden_size,
                num_heads,
                scale,
                mla_modules=modules,
                prefix=prefix,
                non_causal_multi_token_decode=non_causal_multi_token_decode,
                fuse_qkv_rmsnorm=fuse_qkv_rmsnorm,
                **same,
            )
            return
        check(get_current_vllm_config(), modules, non_causal_multi_token_decode)
        nn.Module.__init__(self)  # the parent's would ask for a sparse backend, which CPUs lack
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        self.q_lora_rank, self.kv_lora_rank = q_lora_rank, kv_lora_rank
        self.is_sparse, self.num_heads, self.v_head_dim = True, num_heads, v_head_dim
        self.prefix = prefix
        self._take(modules)
        # churn: speculative decoding reads and sets both (deepseek_mtp.py, llm_base_proposer.py)
        self.skip_topk, self.topk_indices_buffer = skip_topk, modules.topk_indices_buffer
        self.mla_attn = SparseAttention(
            num_heads=num_heads,
            scale=scale,
            kv_b_proj=modules.kv_b_proj,
            prefix=f"{prefix}.attn",
            attn_backend=SparseAttentionBackend,  # unasked, vLLM's platform has none for CPUs
            use_sparse=True,
            indexer=modules.indexer,
            topk_indices_buffer=modules.topk_indices_buffer,
            **same,
        )
        self.own_index_cache()

    def _take(self, modules) -> None:
        self.fused_qkv_a_proj, self.q_a_layernorm = modules.fused_qkv_a_proj, modules.q_a_layernorm
        self.q_b_proj, self.kv_a_layernorm = modules.q_b_proj, modules.kv_a_layernorm
        self.kv_b_proj, self.o_proj = modules.kv_b_proj, modules.o_proj
        self.rotary_emb, self.indexer_rope_emb = modules.rotary_emb, modules.indexer_rotary_emb
        self.indexer = modules.indexer

    def forward(self, positions, hidden_states, llama_4_scaling=None):
        if not self.is_sparse:
            return super().forward(positions, hidden_states, llama_4_scaling)
        return self.o_proj(self.attend(positions, hidden_states, llama_4_scaling))[0]


def _rotate(rope, positions, q_pe, k_pe):
    """RoPE of ``q_pe [tokens, heads, dim]`` and ``k_pe [tokens, dim]``; the key gets a head."""
    # Not rope(...): vLLM 0.32's CPU kernel takes a query of three dimensions for tokens * heads
    # rows and rotates the wrong ones. Until test_plugin.py's test of the kernel fails.
    q, k = rope.forward_native(positions, q_pe, k_pe[:, None])
    return q.view(q_pe.shape), k.view(len(k_pe), 1, -1)
