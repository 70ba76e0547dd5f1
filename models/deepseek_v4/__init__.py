"""DeepSeek-V4: attention over a window of tokens and compressed rows of the tokens before it
(technical report, section 2.3).

Layers of three types: a sliding window alone; with every row of 128 tokens; with the rows of 4
tokens that a lightning indexer selects. One latent is key and value of all heads, rotated in its
last dims, so that the output is rotated back; a sink per head joins the softmax.

Shapes: B batch, S new tokens, H heads, D ``head_dim``, W ``sliding_window``, N index heads.
"""

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4Attention,
    DeepseekV4CSACompressor,
    DeepseekV4HCACompressor,
    DeepseekV4Indexer,
    DeepseekV4IndexerScorer,
    apply_rotary_pos_emb,
)

import custom_pypto

from .. import windows
from ..attention import SKIPPED
from ..cache import Step, write
from ..pools import PagedLayer, Pool, Space
from ..projection import brought_in, check_replaced
from ..windows import Part

SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
# New tokens that a layer reads at once, so that the ring of each sequence stays short
SLICE = 256


def window_and_rows(config, layer: int) -> Space:
    """The window of every layer, in front of the compressed rows."""
    rate = config.compress_rates.get(config.layer_types[layer], 0)
    return Space(config.sliding_window - 1 + SLICE, rate, spare=SLICE)


def index_rows(config, layer: int) -> Space:
    return Space(0, config.compress_rates[SPARSE])


def state(config, layer: int) -> Space:
    kind = config.layer_types[layer]
    return windows.state_space(config.compress_rates[kind], overlaps=kind == SPARSE)


OF_SPARSE, OF_HEAVY = ("layer_types", SPARSE), ("layer_types", HEAVY)
SIZES = ("sliding_window", "compress_rates")


class PagedDeepseekV4Attention(DeepseekV4Attention):
    """Upstream's attention, with its parameters, on the ops and a paged cache."""

    pools = {
        "kv": Pool("head_dim", space=window_and_rows, sizes=SIZES),
        "index": Pool("index_head_dim", where=OF_SPARSE, space=index_rows),
        "overlap_state": Pool("head_dim", where=OF_SPARSE, vectors=4, space=state),
        "index_state": Pool("index_head_dim", where=OF_SPARSE, vectors=4, space=state),
        "state": Pool("head_dim", where=OF_HEAVY, vectors=2, space=state),
    }
    upstream_layers = ()
    first_norm = "kv_norm"

    @classmethod
    def check(cls, attention: DeepseekV4Attention, layer: int) -> None:
        """As :meth:`PagedAttention.check`."""
        compressor = attention.compressor
        if attention.layer_type == HEAVY:
            check_replaced(layer, "compressor", compressor, DeepseekV4HCACompressor)
        elif attention.layer_type == SPARSE:
            check_replaced(layer, "compressor", compressor, DeepseekV4CSACompressor)
            check_replaced(layer, "indexer", compressor.indexer, DeepseekV4Indexer)
            scorer = compressor.indexer.scorer
            check_replaced(layer, "indexer's scorer", scorer, DeepseekV4IndexerScorer)

    def forward(self, hidden_states, position_embeddings, position_ids, attention_mask, **kwargs):
        if not isinstance(attention_mask, Step):
            return self.dense(
                hidden_states,
                position_embeddings,
                attention_mask,
                position_ids=position_ids,
                **kwargs,
            )
        return self.attend(hidden_states, position_embeddings, attention_mask)[0], None

    def dense(self, hidden_states, position_embeddings, attention_mask, **kwargs):
        """As :meth:`PagedAttention.dense`."""
        return super().forward(
            hidden_states, position_embeddings, attention_mask=attention_mask, **kwargs
        )

    def attend(
        self,
        hidden_states: Tensor,
        position_embeddings: dict[str, tuple[Tensor, Tensor]],
        step: Step,
        indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The layer's output ``[B, S, hidden]``, and the compressed rows ``[B, S, 1, index_topk]``
        it attended to if it has an indexer.

        Args:
            indices: those rows; None: the indexer selects.
        """
        inputs = hidden_states, *position_embeddings[self.rope_layer_type], indices
        results = []
        for part in windows.parts(step, SLICE):
            of_part = (None if x is None else x[:, part.columns] for x in inputs)
            results.append(self.read(*of_part, part))
        if len(results) == 1:
            return results[0]
        outputs, rows = zip(*results, strict=True)
        return torch.cat(outputs, 1), None if self.indexer is None else torch.cat(rows, 1)

    def read(
        self, x: Tensor, cos: Tensor, sin: Tensor, indices: Tensor | None, part: Part
    ) -> tuple[Tensor, Tensor | None]:
        """The results of :meth:`attend` for the tokens of ``part``."""
        layer = part.cache.layers[self.layer_idx]
        space = layer.spaces["kv"]
        kv = self.kv_norm(self.kv_proj(x)).unsqueeze(2)
        slots = part.cache.slots(space, part.positions % space.ring, part.valid)
        write(layer.kv, slots, apply_rotary_pos_emb(kv, cos, sin, unsqueeze_dim=2))
        self.write_rows(x, layer, part)
        q_latent = self.q_a_norm(self.q_a_proj(x))
        if indices is None and self.indexer is not None:
            indices = self.select(x, q_latent, cos, sin, layer, part)

        query = self.q_b_norm(self.q_b_proj(q_latent).unflatten(-1, (-1, self.head_dim)))
        query = apply_rotary_pos_emb(query, cos, sin, unsqueeze_dim=2)
        rows = part.lengths // space.ratio if space.ratio else 0 * part.lengths
        output = custom_pypto.npu_sparse_flash_attention_pto(
            query.to(layer.kv.dtype),
            layer.kv,
            None,
            self.sparse_indices(indices, part).unsqueeze(2),
            self.scaling,
            actual_seq_lengths_kv=(space.ring + rows).int(),
            block_table=part.cache.tables[space],
            sparse_mode=0,
            sinks=self.sinks.float(),
        )
        # the values are rotated by their own positions: back by the query's, only distances stay
        output = apply_rotary_pos_emb(output, cos, -sin, unsqueeze_dim=2)
        groups = output.flatten(2).unflatten(-1, (self.config.o_groups, -1))
        return self.o_b_proj(self.o_a_proj(groups.to(x.dtype)).flatten(2)), indices

    def write_rows(self, x: Tensor, layer: PagedLayer, part: Part) -> None:
        """Writes the compressed rows, and those of the indexer, that ``part`` completes."""
        if self.layer_type == HEAVY:
            compress(self.compressor, layer, "kv", "state", part, x)
        elif self.layer_type == SPARSE:
            compress(self.compressor, layer, "kv", "overlap_state", part, x)
            compress(self.indexer, layer, "index", "index_state", part, x)

    def sparse_indices(self, indices: Tensor | None, part: Part) -> Tensor:
        """``[B, S, .]`` int32: where each token's window, and the compressed rows that it attends
        to, are in the rows of a sequence."""
        space = part.cache.layers[self.layer_idx].spaces["kv"]
        near = window(part, self.sliding_window, space.ring)
        if self.compressor is None:
            return near
        if self.layer_type == HEAVY:
            count = part.cache.tables[space].size(1) * space.block - space.ring
            if count == 0:  # a cache shorter than a window
                return near
            rows = torch.arange(count, device=near.device)
        else:
            rows = indices.squeeze(2).long()  # as positions: a GE graph does not promote
        # a record may hold any number
        seen = (rows >= 0) & (rows < self.selectable(part.positions)[..., None])
        return torch.cat([near, torch.where(seen, rows + space.ring, -1).int()], -1)

    @property
    def indexer(self) -> DeepseekV4Indexer | None:
        return self.compressor.indexer if self.layer_type == SPARSE else None

    @property
    def selection_width(self) -> int:
        """As :meth:`PagedAttention.selection_width`."""
        return self.indexer.index_topk

    def selectable(self, positions: Tensor) -> Tensor:
        """Compressed rows that the tokens at these positions see."""
        return (positions + 1) // self.compressor.compress_rate

    def padding(self, mask: Tensor) -> Tensor:
        """As :meth:`PagedAttention.padding`, always 0.

        Raises:
            ValueError: left padding, which upstream counts in its windows.
        """
        visible = mask if mask.dtype == torch.bool else mask == 0
        padded = (~visible[:, 0, 0, 0]).nonzero().flatten().tolist()
        if padded:
            raise ValueError(
                "replay_indices: attention_mask must have no padding on the upstream path of "
                "DeepSeek-V4, which counts padding as tokens of its windows, got some in sequences "
                f"{padded}; replay sequence b alone, without its n tokens of padding: "
                "record[layer][b : b + 1, n:]"
            )
        return torch.zeros(len(mask), dtype=torch.int64, device=mask.device)

    def upstream_indices(self, rows: Tensor) -> Tensor:
        """As :meth:`PagedAttention.upstream_indices`, for rows; -1 is none."""
        return rows.long()

    @torch.no_grad()  # as in transformers: a selection has no gradient
    def select(
        self, x: Tensor, q_latent: Tensor, cos: Tensor, sin: Tensor, layer: PagedLayer, part: Part
    ) -> Tensor:
        """``[B, S, 1, index_topk]`` int32 rows of the index keys with the best scores."""
        indexer, space = self.indexer, layer.spaces["index"]
        query = indexer.q_b_proj(q_latent).unflatten(-1, (-1, indexer.head_dim))
        scorer = indexer.scorer
        scale = scorer.weights_scaling * scorer.softmax_scale  # positive: may leave the ReLU
        return custom_pypto.npu_lightning_indexer_pto(
            apply_rotary_pos_emb(query, cos, sin, unsqueeze_dim=2).to(layer.index.dtype),
            layer.index,
            scorer.weights_proj(x).float() * scale,
            actual_seq_lengths_key=part.lengths.int(),
            block_table=part.cache.tables[space],
            sparse_count=indexer.index_topk,
            sparse_mode=3,
            cmp_ratio=space.ratio,
        )


def compress(
    module: nn.Module, layer: PagedLayer, rows: str, state: str, part: Part, x: Tensor
) -> None:
    """Writes the rows of upstream's compressor or indexer ``module`` for the tokens of ``part``,
    normed and rotated by the position of their window's first token."""

    def finish(sums: Tensor, window: Tensor) -> Tensor:
        row = module.kv_norm(sums.to(x.dtype)).unsqueeze(2)
        first = window * module.compress_rate
        cos, sin = module.rotary_emb(row, first, layer_type=module.rope_layer_type)
        return apply_rotary_pos_emb(row, cos, sin, unsqueeze_dim=2)

    new = torch.cat([module.kv_proj(x), module.gate_proj(x)], -1)
    with brought_in(module):
        bias = module.position_bias.float()
    windows.compress(layer, rows, state, part, new, bias, finish)


def window(part: Part, size: int, ring: int) -> Tensor:
    """``[B, S, size]`` int32 rows in the ring of the last ``size`` tokens that each token sees."""
    tokens = part.positions[..., None] - torch.arange(size, device=part.positions.device)
    seen = (tokens >= 0) & part.valid[..., None]
    return torch.where(seen, tokens % ring, SKIPPED).int()
