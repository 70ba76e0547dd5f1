"""DeepSeek-V3.2: every layer has an indexer, which rotates half-split pairs (arXiv:2512.02556)."""

from transformers.models.deepseek_v32 import modeling_deepseek_v32 as stock

from ..attention import PagedAttention, Step


class PagedDeepseekV32Attention(PagedAttention, stock.DeepseekV32Attention):
    # DeepSeek's first release rotated interleaved pairs here, as MLA does; that was a bug
    index_rope = staticmethod(stock.apply_rotary_pos_emb)

    def forward(self, hidden_states, position_embeddings, attention_mask, *args, **kwargs):
        if not isinstance(attention_mask, Step):
            return super().forward(
                hidden_states, position_embeddings, attention_mask, *args, **kwargs
            )
        output, _ = self.attend(hidden_states, position_embeddings, attention_mask)
        return output, None
