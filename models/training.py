"""Training on the ops: which forwards do, and what their layers attend to.

No row outlives a call of its layer, since activation checkpointing calls layers again in the
backward. The ops see the tokens of a batch laid end to end as sequences: a row of the batch is one
sequence, more if it is packed, and its padding on the left is one too. Padding on the right ends
its sequence, where no token before it sees it.

Shapes: B batch, S tokens, T = B * S.
"""

import logging
from collections.abc import Iterable
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers.masking_utils import find_packed_sequence_indices

from . import masks
from .absorbed import Part
from .cache.sequence import Sequences
from .cache.step import Step, TokenSlice
from .cache.store import PagedLayer
from .indexer_loss import IndexerLoss, LayerLoss
from .memory import has_numbers, is_transformed
from .patched import checkpoints, device_of, dropout_of
from .training_rows import REENTRANT, CallStore

logger = logging.getLogger("custom_pypto")

TRAINING = ("auto", "ops", "upstream")
# Limits on the bytes of a layer's scores. From the first on, upstream's backward needs too much
# memory. Below the second, the ops save nothing, so upstream runs.
UPSTREAM_SCORES, FEW_SCORES = 2**30, 2**20
# tokens whose indices of all keys exist at once: 64 MiB for 131072 keys
DENSE_TOKENS = 128


class TrainingStep(Step):
    """A training forward; its store is a :class:`StoreOfCalls`."""

    def of_call(self, attention) -> tuple["TrainingStep", PagedLayer]:
        store = self.store.create(attention)
        return self._replace(store=store), store.layers[0]

    def commit(self) -> None:
        """Nothing: no later forward continues, and recomputed layers start at the first token."""

    def report(self, last_hidden_state: Tensor) -> None:
        """The loss of the indexers, after every layer has added to it."""
        if (loss := self.store.loss) is not None:
            loss.report(last_hidden_state, self.store.real, self.store.learning)

    def slices(self, size: int) -> list[TokenSlice]:
        """One: rings are long enough, and latent attention has its :class:`Part` s."""
        return super().slices(self.positions.size(1))


class StoreOfCalls:
    """Creates the store of each call of a layer.

    Args:
        real: ``[B, S]`` bool, False for padding on either side.
        ends: of the sequences, which are laid end to end.
        size: tokens of a part of them.
        loss: of the indexers, or None.
        learning: layers with an indexer.
    """

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
        self.block_size = text._custom_pypto.cache["block_size"]
        autocast = torch.is_autocast_enabled(device.type)
        self.dtype = torch.get_autocast_dtype(device.type) if autocast else text.dtype
        self.device = device
        # Weak, to break a reference cycle: checkpointed layers hold this store, the store would
        # hold latents, and latents hold the autograd graph of these layers. Python's collector
        # cannot see the part in C++.
        #: layers with latents for others, kept by the graph of those
        self.shared: WeakValueDictionary = WeakValueDictionary()
        #: those of them that have no graph
        self.constant: list[PagedLayer] = []

    def take(self, own: list[range]) -> None:
        """Leaves the queries of other tokens to other ranks."""
        self.parts = parts_of(self.ends, self.size, self.device, own)

    @torch.compiler.disable(reason="each call of a layer creates its rows")
    def create(self, attention) -> CallStore:
        """The store of a call of this layer."""
        layer, loss = attention.layer_idx, None
        if self.loss is not None:
            parts, ranks = self.parts, attention.ranks
            if ranks is not None:  # each takes some
                size = min(self.size, -(-self.ends[-1] // ranks.size()))
                parts = parts_of(self.ends, size, self.device)
            loss = LayerLoss(self.loss, layer, self.real.flatten(), parts, ranks)
        store = CallStore(self, attention, loss)
        if attention.shares_latents:
            # the first call: a repeated one comes after the layers that attend to these latents
            self.shared.setdefault(layer, store.layers[0])
        return store

    @torch.compiler.disable(reason="the graph of a layer keeps the latents to which it attends")
    def hold(self, layer: PagedLayer, output: Tensor) -> None:
        """Keeps the latents of ``layer`` as long as ``output``, which comes from them."""
        layer.pools.pop("index", None)  # it may have a graph, and nobody reads it any more
        if output.grad_fn is None:
            self.constant.append(layer)
        else:
            output.grad_fn.layer = layer


def step_of(
    model,
    by_layer: dict[int, nn.Module],
    kwargs: dict,
    batch: int,
    tokens: int,
    loss: IndexerLoss | None = None,
) -> TrainingStep | None:
    """The step of a training forward with these arguments; None: it runs the upstream path.

    Args:
        by_layer: the patched attentions.
        loss: of the indexers, if they have one.
    Raises:
        ValueError: ``training="ops"`` and an argument that the ops cannot honour.
        TypeError: ``training="ops"`` and a projection or indexer with additions that they bypass.
    """
    option = model._custom_pypto.training
    if option == "upstream":
        return None
    attentions = list(by_layer.values())
    if checkpoints(model) and torch.is_grad_enabled():
        options = getattr(model._gradient_checkpointing_func, "keywords", {})
        if options.get("use_reentrant") and any(each.shares_latents for each in attentions):
            raise ValueError(f"patched model: {REENTRANT}")
    try:
        device = device_of(model, by_layer)
        attentions[0].check(by_layer)
    except (TypeError, ValueError) as error:  # of modules that the ops would bypass
        if option == "ops":
            raise
        problem = str(error)
    else:
        problem = obstacle(model, by_layer, device, kwargs, batch, tokens)
    if problem and option == "auto":
        tell_once(model, problem)
        return None
    if problem:
        raise ValueError(
            f'patched model: {problem}; call models.use_custom_pypto(model, training="auto") for '
            "the upstream path where the ops cannot run"
        )
    if model._custom_pypto.indexer_loss.kind and loss is None and torch.is_grad_enabled():
        raise ValueError(
            "patched model: the whole model must be called for indexer_loss, got a call of "
            f"{type(model).__name__} or of a forward() that bypasses hooks; call the model that "
            "models.use_custom_pypto returned"
        )
    if option == "auto" and (
        device.type != "cpu"  # no NPU has run the programs of the gradients
        or torch.compiler.is_compiling()
        or upstream_is_cheaper(attentions, batch, tokens, model.dtype.itemsize)
    ):
        return None
    return place(model, by_layer, device, batch, tokens, kwargs, loss)


def tell_once(model, problem: str) -> None:
    """Logs, once for a model, why it trains on the upstream path, which takes more memory."""
    told = model._custom_pypto.told
    if not torch.compiler.is_compiling() and problem not in told:
        told.add(problem)
        logger.warning("training on the upstream path: %s", problem)


def obstacle(
    model, by_layer: dict, device: torch.device, kwargs: dict, batch: int, tokens: int
) -> str | None:
    """Why a training forward with these arguments cannot run on the ops; None if it can."""
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    attention = next(iter(by_layer.values()))
    if not (torch.compiler.is_compiling() or has_numbers(torch.empty(0, device=device))):
        return "tensors must have numbers to train on the ops, got some on meta or fake ones"
    if is_transformed():
        return "transforms of torch.func have no rules for training on the ops, got one around"
    if dropout := dropout_of(by_layer):
        return f"attention_dropout must be 0 to train on the ops (they have none), got {dropout}"
    if kwargs.get("output_attentions", getattr(model.config, "output_attentions", False)):
        return "output_attentions must be False (the ops never form the attention matrix), got True"
    if kwargs.get("use_cache"):
        return "use_cache must be False to train on the ops (no row outlives its layer), got True"
    if attention.counts_groups and masks.is_packed(model, kwargs):
        return (
            "position_ids must not restart (upstream counts groups of tokens across sequences "
            "packed into a row), got sequences packed into a row"
        )
    if problem := masks.problem_of_training(mask, batch, tokens):
        return problem
    if attention.counts_positions:
        real = torch.ones(batch, tokens, dtype=torch.bool) if mask is None else mask.bool()
        if model._custom_pypto.training == "auto" and not real[:, 0].all():
            return (
                "attention_mask must have no padding on the left, which upstream counts as tokens"
            )
        return masks.problem_of_positions(positions, count(placed(real)), real)
    return None


@torch.compiler.disable(reason="the sequences of a batch are read from its mask and positions")
def place(
    model, by_layer: dict, device: torch.device, batch: int, tokens: int, kwargs: dict, loss
) -> TrainingStep:
    """The sequences of a batch, and the parts of them that latent attention takes at once."""
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if positions is None:
        positions = torch.arange(tokens, device=device)
    positions = positions.expand(batch, -1)
    real = torch.ones(batch, tokens, dtype=torch.bool, device=device)
    starts = torch.zeros_like(real)
    starts[:, 0] = True
    if mask is not None:
        real = mask.to(device).bool()
        starts |= real & ~nn.functional.pad(real, (1, 0))[:, :-1]
    valid = placed(real)
    within = count(valid)
    if masks.is_packed(model, kwargs):
        segment = find_packed_sequence_indices(positions)
        starts[:, 1:] |= segment.diff(dim=1) > 0
        within = within - torch.where(starts, within, 0).cummax(1).values
    ends = [*starts.flatten().nonzero().flatten().tolist()[1:], batch * tokens]
    dense = model._custom_pypto.indexer_loss.kind == "dense"
    size = DENSE_TOKENS if dense else next(iter(by_layer.values())).slice_tokens
    learning = set() if loss is None else {i for i, each in by_layer.items() if each.indexer}
    store = StoreOfCalls(model, device, real, ends, size, loss, learning)
    sequences = Sequences(batch, None, device)
    return TrainingStep(
        store, sequences, sequences.lengths, valid.sum(1).int(), valid, within, positions, None
    )


def placed(real: Tensor) -> Tensor:
    """``[B, S]`` bool, False for padding on the left."""
    return real.cumsum(1) > 0


def count(placed: Tensor) -> Tensor:
    """``[B, S]`` positions from the first real token on."""
    return placed.cumsum(1) - 1


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


def upstream_is_cheaper(
    attentions: Iterable[nn.Module], batch: int, tokens: int, itemsize: int
) -> bool:
    """Whether upstream trains with fewer operations than the ops and keeps little memory.

    A backward takes 2 times the operations of its forward upstream, 2.53 times on the ops. Upstream
    attends to all S^2 pairs of tokens, 320 multiplications per pair and head with DeepSeek-V3.2's
    dims, the ops to the selected pairs, 1088 each: equal at about 7000 tokens. Upstream keeps
    the scores of all heads and pairs for the backward.
    """
    attentions = list(attentions)
    scores = batch * max(attention.num_heads for attention in attentions) * tokens**2 * itemsize
    if scores >= UPSTREAM_SCORES or scores < FEW_SCORES:
        return scores < UPSTREAM_SCORES
    dense = sparse = 0
    for attention in attentions:
        upstream, ops = attention.multiplications(tokens)
        dense += 3 * attention.num_heads * upstream
        sparse += 3.53 * attention.num_heads * ops
    return dense < sparse
