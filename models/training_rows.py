"""Rows that live as long as a call of their layer, in training: plain tensors, in the order of the
tokens, through which gradients flow.

Shapes: B batch, S tokens, T = B * S, H heads, N index heads, D ``index_head_dim``.
"""

import torch
from torch import Tensor

import custom_pypto
from custom_pypto.rows import IndexRows
from custom_pypto.rows.expanded import Heads

from .absorbed import AbsorbedAttention
from .cache.store import PagedLayer, Store
from .indexer_loss import IndexInputs, LayerLoss
from .tensor_parallel import ReadByHeads

REENTRANT = (
    "gradient checkpointing must have use_reentrant=False where layers attend to the latents of an "
    "earlier one, got True, which would drop the gradient of these latents"
)


class CallLayer(PagedLayer):
    """Latents and RoPE keys ``[T, 1, .]``, and index keys ``[T, 1, D]`` unless they have a pool."""

    #: whether later layers attend to the latents
    shared = False
    #: whether the latents were written with gradients enabled
    has_graph = False


class CallStore(Store):
    """What one call of a layer attends to, in place of the store of a cache.

    Args:
        calls: the :class:`.StoreOfCalls` of the forward.
        loss: of the layer's indexer, or None.
    """

    layer_class = CallLayer

    def __init__(self, calls, attention, loss: LayerLoss | None):
        (batch, tokens), number = calls.real.shape, attention.layer_idx
        plain = {"latent", "rope"} if attention.counts_groups else {"latent", "rope", "index"}
        rows = {
            name: None if name in plain else pool.row(calls.config, number, calls.dtype)
            for name, pool in attention.pools.items()
        }
        rows = {
            name: row and row._replace(layout=row.layout.for_whole(tokens))
            for name, row in rows.items()
        }
        index = IndexRows(calls.dtype, calls.config.index_head_dim, calls.device)
        super().__init__([rows], None, index, batch, tokens, calls.block_size, calls.device)
        (layer,) = self.layers
        layer.shared = attention.shares_latents
        layer.source = calls.shared.get(attention.source)
        self.calls, self.ranks, self.loss = calls, attention.ranks, loss
        self.learns = loss is not None

    def write_latents(
        self, layer: CallLayer, slots: None, latent: Tensor, rope: Tensor | None
    ) -> None:
        if self.ranks is not None:  # transformers' plan adds up the gradients of RoPE keys
            latent = ReadByHeads.apply(latent, self.ranks)
        layer.pools["latent"] = self.laid_end_to_end(latent.unsqueeze(2))
        layer.pools["rope"] = self.laid_end_to_end(rope)
        layer.has_graph = torch.is_grad_enabled()

    def write_keys(self, layer: CallLayer, slots: None, key: Tensor) -> None:
        layer.pools["index"] = self.laid_end_to_end(key)

    def select_rows(
        self, layer: CallLayer, query: Tensor, weights: Tensor, count: int, lengths: Tensor
    ) -> Tensor:
        if "index" in layer.layouts:
            return super().select_rows(layer, query, weights, count, lengths)
        shape, index = query.shape[:2], layer.pools["index"]
        inputs = IndexInputs(self.laid_end_to_end(query), index, weights.flatten(0, 1))
        if self.loss is not None:
            self.loss.inputs = inputs
        if self.calls.dense:
            return torch.empty(*shape, 1, 0, dtype=torch.int32, device=query.device)
        query, key, weights = (x.detach() for x in inputs)
        selected = [
            custom_pypto.npu_lightning_indexer_pto(
                query[part.queries],
                key[part.keys],
                weights[part.queries],
                actual_seq_lengths_query=part.query_ends,
                actual_seq_lengths_key=part.key_ends,
                layout_query="TND",
                layout_key="TND",
                sparse_count=count,
            )
            for part in self.calls.parts
        ]
        return torch.cat(selected).unflatten(0, shape)

    def attend(self, layer: CallLayer, heads: Heads, indices: Tensor, lengths: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not layer.has_graph:
            raise ValueError(f"patched model: {REENTRANT}")
        shape, indices = indices.shape[:2], indices.flatten(0, 1)
        latent, rope = layer.pools["latent"], layer.pools["rope"]
        heads = heads._replace(
            q_nope=self.laid_end_to_end(heads.q_nope),
            q_rope=self.laid_end_to_end(heads.q_rope),
            weight=heads.weight.to(self.calls.dtype),
        )
        output, *statistics = AbsorbedAttention.apply(
            heads.q_nope,
            heads.q_rope,
            heads.weight,
            latent,
            rope,
            heads.sinks,
            indices,
            heads.scaling,
            self.calls.parts,
        )
        if layer.shared:
            self.calls.hold(layer, output)
        if self.loss is not None:
            output = self.loss.attach(output, heads, latent, rope, indices, statistics)
        return output.unflatten(0, shape)

    def laid_end_to_end(self, x: Tensor | None) -> Tensor | None:
        """``[T, ..]`` of ``[B, S, ..]``."""
        return None if x is None else x.flatten(0, 1).to(self.calls.dtype)
