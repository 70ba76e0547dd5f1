"""Rows that live as long as a call of their layer, in training: plain tensors, in the order of the
tokens, through which gradients flow.

Shapes: B batch, S tokens, T = B * S, H heads, N index heads, D ``index_head_dim``.
"""

from collections import defaultdict
from weakref import WeakValueDictionary

import torch
from torch import Tensor

import custom_pypto
from custom_pypto.rows import IndexRows
from custom_pypto.rows.expanded import Heads

from .absorbed import AbsorbedAttention, Part
from .cache import Step, Tokens
from .cache.layout import Row
from .cache.store import PagedLayer, Selection, allocated, in_place_of_all, tables_of
from .indexer_loss import IndexerLoss, IndexInputs, LayerLoss

REENTRANT = (
    "gradient checkpointing must have use_reentrant=False where layers attend to the latents of an "
    "earlier one, got True, which would drop the gradient of these latents"
)


class TrainingRows:
    """What the layers of a training forward attend to, as :class:`.cache.step.Rows` has it: rows of
    their own in each call.

    Args:
        real: ``[B, S]`` bool, False for padding on either side.
        ends: of the sequences, which are laid end to end.
        size: tokens of a part of them.
        loss: of the indexers, or None.
        learning: layers with an indexer.
    """

    #: mtp.loss.MtpLoss of the forward, if it has one
    mtp_loss = None

    def __init__(
        self,
        text,
        device: torch.device,
        real: Tensor,
        ends: list[int],
        size: int,
        loss: IndexerLoss | None,
        learning: set[int],
    ):
        self.config, self.real, self.loss, self.learning = text.config, real, loss, learning
        self.ends, self.size, self.parts = ends, size, parts_of(ends, size, device)
        self.dense = text._custom_pypto.indexer_loss.kind == "dense"
        #: whether few tokens are scored, too: all are attended to, or padding attends to padding
        self.scores_all = self.dense or not bool(real.all())
        self.sources = text._custom_pypto.sharing.sources
        self.block_size = text._custom_pypto.cache["block_size"]
        autocast = torch.is_autocast_enabled(device.type)
        self.dtype = torch.get_autocast_dtype(device.type) if autocast else text.dtype
        self.device = device
        # Weak, to break a reference cycle: checkpointed layers hold this object, it would hold
        # latents, and latents hold the autograd graph of these layers. Python's collector cannot
        # see the part in C++.
        #: layers with latents for others, kept by the graph of those
        self.shared: WeakValueDictionary[int, CallLayer] = WeakValueDictionary()
        #: those of them that have no graph
        self.constant: list[CallLayer] = []
        #: by the layer that selects, as checkpointed layers run again after later ones
        self.selections: defaultdict[int, Selection] = defaultdict(Selection)

    def take(self, own: list[range]) -> None:
        """Leaves the queries of other tokens to other ranks."""
        self.parts = parts_of(self.ends, self.size, self.device, own)

    @torch.compiler.disable(reason="each call of a layer creates its rows")
    def layer_of(self, attention) -> "CallLayer":
        """The rows of a call of this layer."""
        number, loss = attention.layer_idx, None
        if self.loss is not None and not attention.is_mtp:
            parts, ranks = self.parts, attention.ranks
            if ranks is not None:  # each takes some
                size = min(self.size, -(-self.ends[-1] // ranks.size()))
                parts = parts_of(self.ends, size, self.device)
            loss = LayerLoss(self.loss, number, self.real.flatten(), parts, ranks)
        layer = CallLayer(self, attention, loss)
        if attention.shares_latents:
            # the first call: a repeated one comes after the layers that attend to these latents
            self.shared.setdefault(number, layer)
        return layer

    def finish(self, step: Step, states: Tensor) -> None:
        """The loss of the indexers, after every layer has added to it. Nothing counts as cached: no
        later forward continues, and layers that run again start at the first token."""
        if self.loss is not None:
            self.loss.report(states, self.real, self.learning)

    @torch.compiler.disable(reason="the graph of a layer keeps the latents to which it attends")
    def hold(self, layer: "CallLayer", output: Tensor) -> None:
        """Keeps the latents of ``layer`` as long as ``output``, which comes from them."""
        layer.pools.pop("index", None)  # it may have a graph, and nobody reads it any more
        if output.grad_fn is None:
            self.constant.append(layer)
        else:
            output.grad_fn.layer = layer


class CallLayer(PagedLayer):
    """What one call of a layer attends to: latents and RoPE keys ``[T, 1, .]``, and index keys
    ``[T, 1, D]`` unless they have a pool.

    Args:
        rows: of the forward.
        loss: of the layer's indexer, or None.
    """

    #: latent attention has its parts, and rings are long enough
    in_slices = False
    #: whether the latents were written with gradients enabled
    has_graph = False

    def __init__(self, rows: TrainingRows, attention, loss: LayerLoss | None):
        (batch, tokens), number = rows.real.shape, attention.layer_idx
        config = attention.config if attention.is_mtp else rows.config  # that has its entries
        plain = {"latent", "rope"} if attention.counting.groups else {"latent", "rope", "index"}
        own: dict[str, Row | None] = {
            name: row._replace(layout=row.layout.for_whole(tokens))
            for name, row in attention.rows(config, rows.dtype).items()
            if row is not None and name not in plain
        }
        pools, layouts = allocated(own, batch, tokens, rows.block_size, rows.device)
        tables = tables_of(layouts.values(), batch, tokens, rows.device)
        index = IndexRows(rows.dtype, rows.config.index_head_dim, rows.device)
        selection = rows.selections[rows.sources.get(number, number)]
        super().__init__(pools, layouts, tables, None, index, selection)
        #: whether later layers attend to the latents
        self.shared = attention.shares_latents
        self.source = rows.shared.get(attention.source)
        self.rows, self.ranks, self.loss = rows, attention.ranks, loss
        self.learns = loss is not None

    def write_latents(self, slots: Tensor | None, latent: Tensor, rope: Tensor | None) -> None:
        self.pools["latent"] = self.laid_end_to_end(latent.unsqueeze(2))
        if rope is not None:
            self.pools["rope"] = self.laid_end_to_end(rope)
        self.has_graph = torch.is_grad_enabled()

    def write_keys(self, slots: Tensor | None, key: Tensor) -> None:
        self.pools["index"] = self.laid_end_to_end(key)

    def every_row(self, count: int, tokens: Tokens) -> Tensor | None:
        return None if self.rows.scores_all else super().every_row(count, tokens)

    def select(self, query: Tensor, weights: Tensor, count: int, tokens: Tokens) -> Tensor:
        if "index" in self.layouts:
            return super().select(query, weights, count, tokens)
        shape, index = query.shape[:2], self.pools["index"]
        inputs = IndexInputs(self.laid_end_to_end(query), index, weights.flatten(0, 1))
        if self.loss is not None:
            self.loss.inputs = inputs
        if self.rows.dense:
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
            for part in self.rows.parts
        ]
        return in_place_of_all(torch.cat(selected).unflatten(0, shape), tokens, self.ratio)

    def attend(self, heads: Heads, indices: Tensor, lengths: Tensor) -> Tensor:
        attended = self.source or self
        if torch.is_grad_enabled() and not attended.has_graph:
            raise ValueError(f"patched model: {REENTRANT}")
        shape, indices = indices.shape[:2], indices.flatten(0, 1)
        latent, rope = attended.pools["latent"], attended.pools.get("rope")
        heads = heads._replace(
            q_nope=self.laid_end_to_end(heads.q_nope),
            q_rope=None if heads.q_rope is None else self.laid_end_to_end(heads.q_rope),
            weight=heads.weight.to(self.rows.dtype),
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
            self.rows.parts,
        )
        if attended.shared:
            self.rows.hold(attended, output)
        if self.loss is not None:
            output = self.loss.attach(output, heads, latent, rope, indices, statistics)
        return output.unflatten(0, shape)

    def laid_end_to_end(self, x: Tensor) -> Tensor:
        """``[T, ..]`` of ``[B, S, ..]``."""
        return x.flatten(0, 1).to(self.rows.dtype)


def parts_of(
    ends: list[int], size: int, device: torch.device, own: list[range] | None = None
) -> list[Part]:
    """Parts of at most ``size`` tokens of the sequences with these ends.

    Args:
        own: the tokens whose queries this rank has, one behind the other; None: all.
    """
    parts, starts, query = [], [0, *ends[:-1]], 0
    for tokens in own or [range(ends[-1])]:
        for first in tokens[::size]:
            last = min(first + size, tokens.stop)
            inside = [i for i, end in enumerate(ends) if end > first and starts[i] < last]
            keys = slice(starts[inside[0]], last)
            upto = [min(ends[i], last) for i in inside]
            upto = torch.tensor(upto, dtype=torch.int32, device=device)
            queries = slice(query, query + last - first)
            parts.append(Part(queries, keys, upto - first, upto - keys.start))
            query = queries.stop
    return parts
