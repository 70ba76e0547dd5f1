"""GLM-5: the indexer rotates interleaved pairs, and layers of type "shared" use an earlier layer's
indices (arXiv:2603.12201)."""

from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as stock

from ..attention import PagedAttention, Step


class PagedGlmMoeDsaAttention(PagedAttention, stock.GlmMoeDsaAttention):
    index_rope = staticmethod(stock.apply_rotary_pos_emb_interleave)

    def forward(
        self,
        hidden_states,
        position_embeddings,
        attention_mask,
        *args,
        prev_topk_indices=None,
        **kwargs,
    ):
        if not isinstance(attention_mask, Step):
            return super().forward(
                hidden_states,
                position_embeddings,
                attention_mask,
                *args,
                prev_topk_indices=prev_topk_indices,
                **kwargs,
            )
        output, indices = self.attend(
            hidden_states, position_embeddings, attention_mask, prev_topk_indices
        )
        return output, None, indices
