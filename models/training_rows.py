"""Rows that live as long as a call of their layer, in training: plain tensors, in the order of the
tokens, through which gradients flow.

Shapes: B batch, S tokens, T = B * S, H heads, N index heads, D ``index_head_dim``.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import custom_pypto

from .absorbed import AbsorbedAttention, Heads, Part
from .cache.layout import Row
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
        rows: of the layer, by pool.
        number: of the layer.
        earlier: layers that share their latents, by number.
        dtype: of the plain tensors.
        parts: of the tokens.
        loss: of the layer's indexer, or None.
        dense: tokens attend to all keys: the selection has no columns.
        ranks: that share the heads, or None.
        shared: later layers attend to the latents.
        hold: :meth:`.StoreOfCalls.hold`.
        options: of :class:`Store`.
    """

    layer_class = CallLayer

    def __init__(
        self,
        rows: dict[str, Row | None],
        *,
        number: int,
        earlier: dict[int, CallLayer],
        dtype: torch.dtype,
        parts: list[Part],
        loss: LayerLoss | None,
        dense: bool,
        ranks: dist.ProcessGroup | None,
        shared: bool,
        hold: Callable[[PagedLayer, Tensor], None],
        **options,
    ):
        super().__init__([rows], **options)
        (layer,) = self.layers
        layer.shared = shared
        self.layers = {**earlier, number: layer}
        self.dtype, self.parts, self.loss, self.dense = dtype, parts, loss, dense
        self.ranks, self.hold, self.learns = ranks, hold, loss is not None

    def write_latents(
        self, layer: CallLayer, slots: None, latent: Tensor, rope: Tensor | None
    ) -> None:
        if self.ranks is not None:  # transformers' plan adds up the gradients of RoPE keys
            latent = ReadByHeads.apply(latent, self.ranks)
        layer.latent = self.laid_end_to_end(latent.unsqueeze(2))
        layer.rope = self.laid_end_to_end(rope)
        layer.has_graph = torch.is_grad_enabled()

    def write_keys(self, layer: CallLayer, slots: None, key: Tensor) -> None:
        layer.index = self.laid_end_to_end(key)

    def select_rows(
        self, layer: CallLayer, query: Tensor, weights: Tensor, count: int, lengths: Tensor
    ) -> Tensor:
        if "index" in layer.layouts:
            return super().select_rows(layer, query, weights, count, lengths)
        shape = query.shape[:2]
        inputs = IndexInputs(self.laid_end_to_end(query), layer.index, weights.flatten(0, 1))
        if self.loss is not None:
            self.loss.inputs = inputs
        if self.dense:
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
            for part in self.parts
        ]
        return torch.cat(selected).unflatten(0, shape)

    def attend(self, layer: CallLayer, heads: Heads, indices: Tensor, lengths: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not layer.has_graph:
            raise ValueError(f"patched model: {REENTRANT}")
        shape, indices = indices.shape[:2], indices.flatten(0, 1)
        heads = heads._replace(
            q_nope=self.laid_end_to_end(heads.q_nope),
            q_rope=self.laid_end_to_end(heads.q_rope),
            weight=heads.weight.to(self.dtype),
        )
        output, *statistics = AbsorbedAttention.apply(
            heads.q_nope,
            heads.q_rope,
            heads.weight,
            layer.latent,
            layer.rope,
            heads.sinks,
            indices,
            heads.scaling,
            self.parts,
        )
        if layer.shared:
            self.hold(layer, output)
        if self.loss is not None:
            output = self.loss.attach(output, heads, layer.latent, layer.rope, indices, statistics)
        return output.unflatten(0, shape)

    def laid_end_to_end(self, x: Tensor | None) -> Tensor | None:
        """``[T, ..]`` of ``[B, S, ..]``."""
        return None if x is None else x.flatten(0, 1).to(self.dtype)
