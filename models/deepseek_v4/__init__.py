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
            return super().forward(
                hidden_states, position_embeddings, position_ids, attention_mask, **kwargs
            )
        cos, sin = position_embeddings[self.rope_layer_type]
        outputs = []
        for part in windows.parts(attention_mask, SLICE):
            x, cos_part, sin_part = (y[:, part.columns] for y in (hidden_states, cos, sin))
            outputs.append(self.attend(x, cos_part, sin_part, part))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)), None

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor, part: Part) -> Tensor:
        """The layer's output ``[B, S, hidden]`` for the tokens of ``part``."""
        layer = part.cache.layers[self.layer_idx]
        space = layer.spaces["kv"]
        kv = self.kv_norm(self.kv_proj(x)).unsqueeze(2)
        slots = part.cache.slots(space, part.positions % space.ring, part.valid)
        write(layer.kv, slots, apply_rotary_pos_emb(kv, cos, sin, unsqueeze_dim=2))
        q_latent = self.q_a_norm(self.q_a_proj(x))
        selected = self.select(x, q_latent, cos, sin, layer, part)

        query = self.q_b_norm(self.q_b_proj(q_latent).unflatten(-1, (-1, self.head_dim)))
        query = apply_rotary_pos_emb(query, cos, sin, unsqueeze_dim=2)
        rows = part.lengths // space.ratio if space.ratio else 0 * part.lengths
        output = custom_pypto.npu_sparse_flash_attention_pto(
            query.to(layer.kv.dtype),
            layer.kv,
            None,
            torch.cat([window(part, self.sliding_window, space.ring), *selected], -1).unsqueeze(2),
            self.scaling,
            actual_seq_lengths_kv=(space.ring + rows).int(),
            block_table=part.cache.tables[space],
            sparse_mode=0,
            sinks=self.sinks.float(),
        )
        # the values are rotated by their own positions: back by the query's, only distances stay
        output = apply_rotary_pos_emb(output, cos, -sin, unsqueeze_dim=2)
        groups = output.flatten(2).unflatten(-1, (self.config.o_groups, -1))
        return self.o_b_proj(self.o_a_proj(groups.to(x.dtype)).flatten(2))

    def select(
        self, x: Tensor, q_latent: Tensor, cos: Tensor, sin: Tensor, layer: PagedLayer, part: Part
    ) -> list[Tensor]:
        """Rows behind the window that each token attends to: nothing, or ``[B, S, .]`` int32."""
        if self.compressor is None:
            return []
        space = layer.spaces["kv"]
        if self.layer_type == HEAVY:
            compress(self.compressor, layer, "kv", "state", part, x)
            count = part.cache.tables[space].size(1) * space.block - space.ring
            rows = torch.arange(count, device=x.device)
            seen = rows < ((part.positions + 1) // space.ratio)[..., None]
        else:
            compress(self.compressor, layer, "kv", "overlap_state", part, x)
            compress(self.compressor.indexer, layer, "index", "index_state", part, x)
            rows = self.select_rows(x, q_latent, cos, sin, layer, part).squeeze(2)
            seen = rows >= 0
        return [torch.where(seen, rows + space.ring, -1).int()]

    @torch.no_grad()  # as in transformers: a selection has no gradient
    def select_rows(
        self, x: Tensor, q_latent: Tensor, cos: Tensor, sin: Tensor, layer: PagedLayer, part: Part
    ) -> Tensor:
        """``[B, S, 1, index_topk]`` int32 rows of the index keys with the best scores."""
        indexer, space = self.compressor.indexer, layer.spaces["index"]
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
