"""GLM-5.3-Flash (text): an indexer over pools of ``index_kpool`` tokens, which selects whole pools
and always the incomplete last one; no rotation; linear attention in the other layers, which stays
upstream's."""

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.glm5_next.modeling_glm5_next import (
    Glm5NextTextAttention,
    Glm5NextTextIndexer,
    Glm5NextTextLinearAttention,
)

from ..attention import SKIPPED, PagedAttention
from ..cache import Step
from ..pools import MLA_POOLS, Pool, Space
from ..projection import brought_in
from ..windows import Part, compress, state_space

FULL = ("indexer_types", "full")


def pools_of_tokens(config, layer: int) -> Space:
    return Space(0, config.index_kpool)


def state(config, layer: int) -> Space:
    return state_space(config.index_kpool)


class PagedGlm5NextAttention(PagedAttention, Glm5NextTextAttention):
    # upstream accepts no RoPE dims: their pool is empty
    pools = MLA_POOLS | {
        "index": Pool("index_head_dim", where=FULL, space=pools_of_tokens, sizes=("index_kpool",)),
        "index_state": Pool("index_head_dim", where=FULL, vectors=2, space=state),
    }
    indexer_class = Glm5NextTextIndexer
    upstream_layers = (Glm5NextTextLinearAttention,)
    returns_indices = True

    def forward(self, hidden_states, attention_mask, position_embeddings=None, **kwargs):
        return super().forward(hidden_states, (None, None), attention_mask, **kwargs)

    def dense(self, hidden_states, rotation, attention_mask, **kwargs):
        return Glm5NextTextAttention.forward(self, hidden_states, attention_mask, **kwargs)

    @property
    def selection_width(self) -> int:
        tail = self.indexer.index_kpool_always_select_tail
        return super().selection_width + (self.config.index_kpool - 1 if tail else 0)

    def selectable(self, positions: Tensor) -> Tensor:
        if self.indexer.index_kpool_always_select_tail:
            return positions + 1
        return positions + 1 - (positions + 1) % self.config.index_kpool

    def padding(self, mask: Tensor) -> Tensor:
        return (~mask).sum(-1)

    def upstream_indices(self, columns: Tensor) -> Tensor:
        return columns

    @torch.no_grad()
    def write_index_keys(self, hidden_states: Tensor, rotation: tuple, step: Step) -> None:
        indexer = self.indexer
        key = indexer.k_norm(indexer.wk(hidden_states))
        with brought_in(indexer):
            gate = functional.linear(hidden_states, indexer.index_kpool_compress_gate)
            bias = indexer.index_kpool_compress_ape.float()
        compress(
            step.cache.layers[self.layer_idx],
            "index",
            "index_state",
            Part(step, 0, step.positions.size(1)),
            torch.cat([key, gate], -1),
            bias,
            lambda sums, windows: sums.to(key.dtype).unsqueeze(2),
        )

    def select(
        self,
        hidden_states: Tensor,
        q_latent: Tensor,
        cos: None,
        sin: None,
        step: Step,
        lengths: Tensor,
    ) -> Tensor:
        pools = super().select(hidden_states, q_latent, cos, sin, step, lengths).squeeze(2)
        size, tokens = self.config.index_kpool, hidden_states.size(1)
        within = torch.arange(size, device=pools.device)
        chosen = torch.where(pools >= 0, pools * size, SKIPPED - size)[..., None] + within
        parts = [chosen.flatten(-2).clamp(min=SKIPPED)]
        if self.indexer.index_kpool_always_select_tail:
            seen = lengths[:, None] - tokens + 1 + torch.arange(tokens, device=pools.device)
            tail = (seen - seen % size)[..., None] + within[:-1]
            parts.append(torch.where(tail < seen[..., None], tail, -1))
        return torch.cat(parts, -1).int().unsqueeze(2)

    def rotate_index(self, x: Tensor, cos: None, sin: None) -> Tensor:
        return x
