"""GLM-5.3-Flash (text): an indexer over groups of ``index_kpool`` tokens, which selects whole
groups and always the incomplete last one; no rotation; upstream's linear attention in the other
layers."""

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.glm5_next.modeling_glm5_next import (
    Glm5NextTextAttention,
    Glm5NextTextDecoderLayer,
    Glm5NextTextExperts,
    Glm5NextTextHyperConnection,
    Glm5NextTextIndexer,
    Glm5NextTextLinearAttention,
    Glm5NextTextMLP,
    Glm5NextTextRMSNorm,
    Glm5NextTextTopkRouter,
    Glm5NextTextUnweightedRMSNorm,
)

from custom_pypto.rows.parts import write

from ..attention import SKIPPED, Counting, Mtp
from ..cache import Step, Tokens
from ..cache.layout import MLA_POOLS, Pool, RowLayout
from ..cache.store import PagedLayer
from ..compression import compress, state_layout
from ..latent_attention import LatentAttention
from ..linear_attention import StepwiseLinear
from ..one_op import BoundedMLP, Experts, HyperConnection, Norm, Router, UnweightedNorm
from ..projection import brought_in
from ..routing import RoutedLayer

FULL = {"indexer_types": "full"}


def groups_of_tokens(config, layer: int) -> RowLayout:
    return RowLayout(0, config.index_kpool)


def state(config, layer: int) -> RowLayout:
    return state_layout(config.index_kpool)


class OwnMLP(BoundedMLP):
    bound = property(lambda self: self.swiglu_limit)


class PagedGlm5NextAttention(LatentAttention, Glm5NextTextAttention):
    one_op = {
        Glm5NextTextDecoderLayer: RoutedLayer,
        Glm5NextTextLinearAttention: StepwiseLinear,
        Glm5NextTextMLP: OwnMLP,
        Glm5NextTextExperts: Experts,
        Glm5NextTextHyperConnection: HyperConnection,
        Glm5NextTextRMSNorm: Norm,
        Glm5NextTextUnweightedRMSNorm: UnweightedNorm,
        Glm5NextTextTopkRouter: Router,
    }
    # upstream rejects RoPE dims: the rope pool is None
    pools = MLA_POOLS | {
        "index": Pool(
            "index_head_dim", where=FULL, layout=groups_of_tokens, sizes=("index_kpool",)
        ),
        "index_state": Pool("index_head_dim", where=FULL, vectors=2, layout=state),
    }
    indexer_class = Glm5NextTextIndexer
    upstream_layers = (Glm5NextTextLinearAttention,)
    returns_indices = True
    counting = Counting(groups=True, columns=True)
    mtp = Mtp(
        types={
            "layer_types": "indexed_attention",
            "mlp_layer_types": "sparse",
            "indexer_types": "full",
        },
        plain=True,
    )

    def forward(self, hidden_states, attention_mask, position_embeddings=None, **kwargs):
        return super().forward(hidden_states, (None, None), attention_mask, **kwargs)

    def dense(self, hidden_states, position_embeddings, attention_mask, **kwargs):
        return Glm5NextTextAttention.forward(self, hidden_states, attention_mask, **kwargs)

    def rotations(self, text, x: Tensor, position_ids: Tensor) -> None:
        """There are none."""

    @property
    def selection_width(self) -> int:
        tail = self.indexer.index_kpool_always_select_tail
        return super().selection_width + (self.config.index_kpool - 1 if tail else 0)

    @property
    def selected_rows(self) -> int:
        # torch.compile takes no property of super()
        return self.indexer.index_topk // self.config.index_kpool

    def selectable(self, positions: Tensor) -> Tensor:
        if self.indexer.index_kpool_always_select_tail:
            return positions + 1
        return positions + 1 - (positions + 1) % self.config.index_kpool

    def padding(self, mask: Tensor) -> Tensor:
        return (~mask).sum(-1)

    def upstream_indices(self, columns: Tensor) -> Tensor:
        return columns

    @torch.no_grad()
    def write_index_keys(
        self, hidden_states: Tensor, cos: None, sin: None, step: Step, layer: PagedLayer
    ) -> None:
        indexer = self.indexer
        key = indexer.k_norm(indexer.wk(hidden_states))
        with brought_in(indexer):
            gate = functional.linear(hidden_states, indexer.index_kpool_compress_gate)
            bias = indexer.index_kpool_compress_ape.float()
        rows = compress(
            layer,
            "index",
            "index_state",
            step.own,
            torch.cat([key, gate], -1),
            bias,
            lambda sums, groups: sums.to(key.dtype),
            self.training,
        )
        write(layer.pools["index"], *rows)

    def select(
        self,
        hidden_states: Tensor,
        q_latent: Tensor,
        cos: None,
        sin: None,
        tokens: Tokens,
        layer: PagedLayer,
    ) -> Tensor:
        groups = super().select(hidden_states, q_latent, cos, sin, tokens, layer).squeeze(2)
        size, count = self.config.index_kpool, hidden_states.size(1)
        within = torch.arange(size, device=groups.device)
        chosen = torch.where(groups >= 0, groups * size, SKIPPED - size)[..., None] + within
        parts = [chosen.flatten(-2).clamp(min=SKIPPED)]
        if self.indexer.index_kpool_always_select_tail:
            seen = tokens.lengths[:, None] - count + 1 + torch.arange(count, device=within.device)
            tail = (seen - seen % size)[..., None] + within[:-1]
            parts.append(torch.where(tail < seen[..., None], tail, -1))
        return torch.cat(parts, -1).int().unsqueeze(2)

    def rotate_index(self, x: Tensor, cos: None, sin: None) -> Tensor:
        return x
