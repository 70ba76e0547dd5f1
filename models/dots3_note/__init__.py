"""Dots 3 Note, its text model: GLM-5's indexer in some layers, sliding windows in others, which
have dims of their own; latents scaled after their norms, a gate per head from the hidden states."""

import torch
from torch import Tensor
from transformers.models.dots3_note.modeling_dots3_note import (
    Dots3NoteExperts,
    Dots3NoteRMSNorm,
    Dots3NoteTextAttention,
    Dots3NoteTextDecoderLayer,
    Dots3NoteTextIndexer,
    Dots3NoteTextMLP,
    Dots3NoteTextTopkRouter,
    apply_rotary_pos_emb_interleave,
)

from ..attention import Counting, Mtp
from ..cache import Tokens
from ..cache.layout import MLA_POOLS, Pool
from ..cache.store import PagedLayer
from ..latent_attention import LatentAttention
from ..one_op import MLP, Experts, Norm, Rotation, Router
from ..routing import RoutedLayer


class PagedDots3NoteAttention(LatentAttention, Dots3NoteTextAttention):
    one_op = {
        Dots3NoteTextDecoderLayer: RoutedLayer,
        Dots3NoteTextMLP: MLP,
        Dots3NoteExperts: Experts,
        Dots3NoteRMSNorm: Norm,
        Dots3NoteTextTopkRouter: Router,
    }
    pools = MLA_POOLS | {
        "index": Pool("index_head_dim", where={"layer_types": "indexed_attention"})
    }
    indexer_class = Dots3NoteTextIndexer
    rope = Rotation(apply_rotary_pos_emb_interleave, interleaved=True)
    index_rope = Rotation(apply_rotary_pos_emb_interleave, interleaved=True)
    counting = Counting(columns=True)
    mtp = Mtp(
        types={"layer_types": "sliding_attention", "mlp_layer_types": "dense"},
        embeds=True,
        names={r"\.mtp\.embed_tokens\.": ".layers.{}.embed_tokens."},
        always=True,
    )

    def rotations(self, text, x: Tensor, position_ids: Tensor):
        kind = self.config.layer_types[self.layer_idx]
        x = x.float() if kind == "indexed_attention" else x
        return text.rotary_emb(x, position_ids, kind)

    @property
    def attended(self) -> int:
        return self.sliding_window or super().attended

    def compress_key(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        latent, k_rope = super().compress_key(hidden_states)
        return latent * self.kv_lora_scale, self.k_rope_only_layernorm(k_rope)

    def compress_query(self, hidden_states: Tensor) -> Tensor:
        return super().compress_query(hidden_states) * self.q_lora_scale

    def select(
        self,
        hidden_states: Tensor,
        q_latent: Tensor,
        cos: Tensor,
        sin: Tensor,
        tokens: Tokens,
        layer: PagedLayer,
    ) -> Tensor:
        if self.sliding_window is None:
            return super().select(hidden_states, q_latent, cos, sin, tokens, layer)
        # the window of a token, newest position first; -1 before the first token
        back = torch.arange(self.sliding_window, device=tokens.positions.device)
        return (tokens.positions[..., None] - back).clamp(min=-1).int().unsqueeze(2)

    def project_query(
        self, hidden_states: Tensor, q_latent: Tensor, tokens: Tokens
    ) -> tuple[Tensor, Tensor]:
        query, _ = super().project_query(hidden_states, q_latent, tokens)
        return query, self.g_proj(hidden_states)[..., None]

    def project_output(self, output: Tensor, gate: Tensor) -> Tensor:
        return super().project_output(output * gate.sigmoid(), None)
