"""DeepSeek sparse attention as the ops compute it: absorbed MLA over a paged cache.

Shapes: B batch, S new tokens, H heads, L ``kv_lora_rank``, R ``qk_rope_head_dim``, N index heads,
D ``index_head_dim``.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers.models.deepseek_v32.modeling_deepseek_v32 import apply_rotary_pos_emb_interleave

import custom_pypto

from .cache import PagedCache, write


class Step(NamedTuple):
    """What one forward pass knows of the cache; takes the place of the attention mask."""

    cache: PagedCache
    slots: Tensor  # where each new token is stored, as PagedCache.append gives it


class PagedAttention:
    """Mixed into a stock attention class, whose parameters it uses as they are.

    The cached latent is both key and value of every head (arXiv:2405.04434, section 2.1): with
    ``kv_b_proj.weight`` as ``W_UK`` and ``W_UV``, ``q . (W_UK c) = (W_UK^T q) . c`` and
    ``sum_j p_j W_UV c_j = W_UV sum_j p_j c_j``. Stock transformers expands the whole cache instead.
    """

    #: the indexer's rotation: half-split pairs in DeepSeek-V3.2, interleaved ones in GLM-5
    index_rope = None
    #: whether the layer hands its indices on to the next one
    returns_indices = False

    def forward(self, hidden_states, position_embeddings, attention_mask, *args, **kwargs):
        if not isinstance(attention_mask, Step):
            return super().forward(
                hidden_states, position_embeddings, attention_mask, *args, **kwargs
            )
        output, indices = self.attend(
            hidden_states, position_embeddings, attention_mask, kwargs.get("prev_topk_indices")
        )
        return (output, None, indices) if self.returns_indices else (output, None)

    def attend(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        step: Step,
        indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The layer's output ``[B, S, hidden]`` and the positions it attended to.

        Args:
            indices: an earlier layer's, for a layer without an indexer.
        """
        batch, tokens, _ = hidden_states.shape
        layer = step.cache.layers[self.layer_idx]
        cos, sin = position_embeddings

        q_latent = self.q_a_layernorm(self.q_a_proj(hidden_states))
        query = self.q_b_proj(q_latent).view(batch, tokens, -1, self.qk_head_dim)
        q_nope, q_rope = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(hidden_states).split(
            [self.kv_lora_rank, self.qk_rope_head_dim], -1
        )
        q_rope, k_rope = apply_rotary_pos_emb_interleave(
            q_rope, k_rope.unsqueeze(2), cos, sin, unsqueeze_dim=2
        )
        write(layer.latent, step.slots, self.kv_a_layernorm(latent))
        write(layer.rope, step.slots, k_rope)

        if self.indexer is not None:
            indices = self.select(hidden_states, q_latent, position_embeddings, step)
        elif indices is None:
            raise ValueError(
                f"config.indexer_types: layer {self.layer_idx} is 'shared', but no layer before it "
                "is 'full'"
            )
        w_uk, w_uv = self.kv_b_proj.weight.view(
            query.size(2), self.qk_nope_head_dim + self.v_head_dim, self.kv_lora_rank
        ).split([self.qk_nope_head_dim, self.v_head_dim], 1)
        output = custom_pypto.npu_sparse_flash_attention_pto(
            torch.einsum("bshd,hdl->bshl", q_nope, w_uk).contiguous(),
            layer.latent,
            None,
            indices,
            self.scaling,
            query_rope=q_rope,
            key_rope=layer.rope,
            actual_seq_lengths_kv=step.cache.lengths,
            block_table=step.cache.block_table,
            sparse_mode=3,
        )
        # einsum would copy w_uv, a view of every other half, at each step
        output = (w_uv @ output.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).flatten(2)
        return self.o_proj(output), indices

    @torch.no_grad()  # as in transformers: no gradient passes a selection
    def select(
        self,
        hidden_states: Tensor,
        q_latent: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        step: Step,
    ) -> Tensor:
        """Stores the new index keys and selects ``[B, S, 1, index_topk]`` int32 positions."""
        indexer, layer = self.indexer, step.cache.layers[self.layer_idx]
        cos, sin = position_embeddings
        rotated = [indexer.qk_rope_head_dim, indexer.head_dim - indexer.qk_rope_head_dim]

        query = indexer.wq_b(q_latent).unflatten(-1, (indexer.n_heads, indexer.head_dim))
        key = indexer.k_norm(indexer.wk(hidden_states)).unsqueeze(2)
        q_rope, q_pass = query.split(rotated, -1)
        k_rope, k_pass = key.split(rotated, -1)
        q_rope, k_rope = self.index_rope(q_rope, k_rope, cos, sin, unsqueeze_dim=2)
        write(layer.index, step.slots, torch.cat([k_rope, k_pass], -1))

        projection = indexer.weights_proj
        weights = projection(hidden_states.to(projection.weight.dtype)).float()
        return custom_pypto.npu_lightning_indexer_pto(
            torch.cat([q_rope, q_pass], -1),
            layer.index,
            # both scales are positive, so they may move out of the ReLU into the weights
            weights * (indexer.n_heads**-0.5 * indexer.softmax_scale),
            actual_seq_lengths_key=step.cache.lengths,
            block_table=step.cache.block_table,
            sparse_count=indexer.index_topk,
            sparse_mode=3,
        )
