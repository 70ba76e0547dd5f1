"""Attention over a window of tokens and compressed rows of the tokens before it.

One latent is key and value of all heads, rotated in its last dims, so that the output is rotated
back; a sink per head joins the softmax. Besides the window a layer attends to no compressed row, to
all of them, or to the selection of a lightning indexer.

Shapes: B batch, S new tokens, H heads, D ``head_dim``, W ``sliding_window``, N index heads, K
``index_topk``.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import custom_pypto
from custom_pypto import layer_ops
from custom_pypto.rows.index import score_weights
from custom_pypto.rows.parts import write

from . import compression
from .absorbed import constant_keys
from .attention import SKIPPED, Counting, PatchedAttention, causal_pairs
from .cache import Tokens
from .cache.store import PagedLayer, slots
from .memory import is_transformed
from .one_op import linear
from .projection import brought_in


class CompressedAttention(PatchedAttention):
    #: rotates the last dims of ``[B, S, N, D]`` by cos and sin
    rope: Callable[[Tensor, Tensor, Tensor], Tensor]
    first_norm = "kv_norm"
    counting = Counting(groups=True, positions=True)

    def read(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        indices: Tensor | None,
        tokens: Tokens,
        layer: PagedLayer,
    ) -> tuple[Tensor, Tensor | None]:
        """Writes a slice, then attends: a longer slice would overwrite its own window in the ring.
        The second result has the selected compressed rows ``[B, S, 1, K]``, or is None."""
        layout, pool = layer.layouts["kv"], layer.pools["kv"]
        table = layer.tables[layout]
        kv = self.kv_norm(linear(self.kv_proj, x)).unsqueeze(2)
        own = slots(table, layout, tokens.positions % layout.ring, tokens.valid)
        near = own, self.rope(kv, cos, sin).flatten(0, -2)
        # at once: torch.compile would copy a pool that a graph writes twice
        written, rows = zip(near, *self.complete_rows(x, layer, tokens), strict=True)
        write(pool, torch.cat(written), torch.cat(rows))
        q_latent = self.q_a_norm(linear(self.q_a_proj, x))
        if indices is None and self.selects:
            indices = self.select(x, q_latent, cos, sin, tokens, layer)

        query = self.q_b_norm(linear(self.q_b_proj, q_latent).unflatten(-1, (-1, self.head_dim)))
        query = self.rope(query, cos, sin)
        rows = tokens.lengths // layout.ratio if layout.ratio else torch.zeros_like(tokens.lengths)
        output = custom_pypto.npu_sparse_flash_attention_pto(
            query.to(pool.dtype),
            constant_keys({"kv": pool}, query, self.sinks)["kv"],
            None,
            self.sparse_indices(indices, tokens, layer).unsqueeze(2),
            self.scaling,
            actual_seq_lengths_kv=(layout.ring + rows).int(),
            block_table=table,
            sparse_mode=0,
            sinks=self.sinks.float(),
        )
        # values are rotated by their own positions: rotated back by the query's, distances remain
        output = self.rope(output, cos, -sin)
        groups = output.flatten(2).unflatten(-1, (self.config.o_groups, -1))
        output = linear(self.o_b_proj, self.o_a_proj(groups.to(x.dtype)).flatten(2))
        return output, indices

    def complete_rows(
        self, x: Tensor, layer: PagedLayer, tokens: Tokens
    ) -> list[tuple[Tensor, Tensor]]:
        """Writes the index rows that ``tokens`` complete, and returns the slots and compressed rows
        ``[., D]``, or nothing where the layer has none."""
        raise NotImplementedError

    def sparse_indices(self, indices: Tensor | None, tokens: Tokens, layer: PagedLayer) -> Tensor:
        """``[B, S, .]`` int32 rows of its sequence to which each token attends: its window, then
        compressed rows."""
        count, layout = 0, layer.layouts["kv"]
        if indices is not None:
            indices, count = indices.squeeze(2), indices.size(3)
        elif self.compressor is not None:  # every row; 0: a cache shorter than a window
            count = layer.tables[layout].size(1) * layout.block - layout.ring
        if tokens.positions.is_cpu and not is_transformed():
            sizes = self.sliding_window, layout.ring, max(1, layout.ratio), count
            both = tokens.positions, tokens.valid
            return layer_ops.window_rows(*both, indices, *sizes)
        near = window(tokens, self.sliding_window, layout.ring)
        if count == 0:
            return near
        # int64, as positions: a GE graph does not promote
        rows = torch.arange(count, device=near.device) if indices is None else indices.long()
        # a record may hold any number
        seen = (rows >= 0) & (rows < self.selectable(tokens.positions)[..., None])
        return torch.cat([near, torch.where(seen, rows + layout.ring, -1).int()], -1)

    def multiplications(self, tokens: int) -> tuple[int, int]:
        rate = self.compressor.compress_rate if self.compressor is not None else tokens + 1
        rows = tokens // rate
        selected = self.indexer.index_topk if self.indexer is not None else rows
        pairs = causal_pairs(tokens, self.sliding_window) + rate * causal_pairs(rows, selected)
        return tokens * (tokens + rows) * 2 * self.head_dim, pairs * 2 * self.head_dim

    def selectable(self, positions: Tensor) -> Tensor:
        """Compressed rows that the tokens at these positions see."""
        return (positions + 1) // self.compressor.compress_rate

    def upstream_indices(self, rows: Tensor) -> Tensor:
        """``rows`` unchanged: upstream selects rows, too, with -1 for none."""
        return rows.long()

    @torch.no_grad()  # as in transformers: a selection has no gradient
    def select(
        self,
        x: Tensor,
        q_latent: Tensor,
        cos: Tensor,
        sin: Tensor,
        tokens: Tokens,
        layer: PagedLayer,
    ) -> Tensor:
        """The ``[B, S, 1, K]`` int32 compressed rows that each token attends to."""
        indexer = self.indexer
        if (every := layer.every_row(indexer.index_topk, tokens)) is not None:
            return every
        query = linear(indexer.q_b_proj, q_latent).unflatten(-1, (-1, indexer.head_dim))
        query = self.rope(query, cos, sin)
        weights = score_weights(linear(indexer.scorer.weights_proj, x), indexer.head_dim)
        return layer.select(query, weights, indexer.index_topk, tokens)


def compressor_rows(
    module: nn.Module,
    rope,
    layer: PagedLayer,
    rows: str,
    state: str,
    tokens: Tokens,
    x: Tensor,
) -> tuple[Tensor, Tensor]:
    """The slots and rows ``[., D]`` of upstream's compressor or indexer ``module`` for these
    tokens, normed and rotated by the position of their group's first token."""

    def finish(sums: Tensor, group: Tensor) -> Tensor:
        row = module.kv_norm(sums.to(x.dtype)).unsqueeze(2)
        first = group * module.compress_rate
        cos, sin = module.rotary_emb(row, first, layer_type=module.rope_layer_type)
        return rope(row, cos, sin)

    new = torch.cat([linear(module.kv_proj, x), linear(module.gate_proj, x)], -1)
    with brought_in(module):
        bias = module.position_bias.float()
    return compression.compress(layer, rows, state, tokens, new, bias, finish, module.training)


def window(tokens: Tokens, size: int, ring: int) -> Tensor:
    """``[B, S, size]`` int32 rows in the ring of the last ``size`` tokens that each token sees."""
    seen = tokens.positions[..., None] - torch.arange(size, device=tokens.positions.device)
    exists = (seen >= 0) & tokens.valid[..., None]
    return torch.where(exists, seen % ring, SKIPPED).int()
