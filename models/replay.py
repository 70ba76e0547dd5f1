"""Selections and routed experts recorded in a rollout, and replayed in training.

Reinforcement learning compares probabilities of the same tokens under the model that generated
them and the model in training. Both choices are discontinuous: with other weights, kernels or
batches a token may attend to other positions and pass through other experts, and the probabilities
differ by more than the policies.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .cache import Step
from .calls import Context, entered
from .index_sharing import Selected, with_indexer
from .patch import patch_of
from .patched import CACHE, patched_attentions, text_model
from .record import Record, check_tensors, made_for
from .routing import routed_layers, router_of


@contextmanager
def record_indices(model: PreTrainedModel, *, experts: bool = False) -> Iterator[Record]:
    """Records which positions each token attends to, in every layer that selects, and on request
    which routed experts it passes through::

        with models.record_indices(model, experts=True) as record:
            ids = model.generate(prompt, max_new_tokens=100)
        with models.replay_indices(model, record):
            model.train()(ids[:, :-1], labels=ids[:, :-1]).loss.backward()

    A record has the tokens that the cache of the last forward holds, padding included, as int32
    ``[B, T, K]``: prompt and new tokens, but the last, which ``generate()`` does not feed. Cropped
    tokens leave it; a forward on an empty cache starts it anew. Positions count from the first real
    token of a sequence; negative numbers are none. The record is complete when the context ends.
    It has no forward on the upstream path.

    K is ``index_topk``. For DeepSeek-V4 the positions are compressed rows of 4 tokens each; the
    first 3 tokens have none. For GLM-5.3-Flash K is ``index_topk + index_kpool - 1``, with the
    incomplete last group. Layers that share a selection attend to that of the last recorded layer
    before them.

    Args:
        model: a model patched by :func:`models.use_custom_pypto`.
        experts: also records the experts of each token, of all layers that route, those that
            choose by a table of token ids (DeepSeek-V4) included; of padding, too.
    Returns:
        A context, which gives the record, empty until the context ends.
    Raises:
        TypeError: the model is not patched, or a layer that routes is another one's.
        ValueError: from a forward whose cache has tokens from before or of other sequences, or
            whose sequences have changed places, as in beam search.
    """
    layers, text = selecting("record_indices", model), text_model(model)
    routed = routed_layers("record_indices", text) if experts else {}
    recording, record = Recording(text, layers, routed), Record(made_for=made_for(text))
    with entered(recording):
        yield record
    record.indices |= recording.tensors("indices")
    record.experts |= recording.tensors("experts")


@contextmanager
def replay_indices(
    model: PreTrainedModel, record: Record, *, experts: bool | None = None
) -> Iterator[None]:
    """Attends to the recorded positions and passes through the recorded experts; the indexers do
    not select. See :func:`record_indices`.

    On the ops, token ``t`` of the cache repeats column ``t`` of the record; index keys are still
    written. On the upstream path, which training mode may take, a forward has the T tokens of the
    record, padded alike; for DeepSeek-V4 without padding, which upstream counts as tokens of
    compressed rows. Activation checkpointing repeats forwards in the backward, which must then be
    in this context, too.

    Experts are weighed by the router's scores, whose gradients flow as without a replay. Where a
    router chooses the same experts in the same order, its weights keep their bits. Its balance bias
    (``e_score_correction_bias``) neither counts nor changes.

    Args:
        model: a model patched by :func:`models.use_custom_pypto`.
        record: of :func:`record_indices`, on any device.
        experts: False: only positions. True: the record must have experts. None: if it has.
    Raises:
        TypeError: the model is not patched, or ``record`` is none.
        ValueError: ``record`` is of another model, or has an expert that the model lacks; or, from
            a forward, of other tokens.
    """
    layers, text = selecting("replay_indices", model), text_model(model)
    if not isinstance(record, Record):
        raise TypeError(
            f"replay_indices: record must be a models.Record, got a {type(record).__name__}; of "
            "tensors by layer models.Record(tensors) makes one"
        )
    if experts is False or (experts is None and not record.experts):
        record, routed = Record(record.indices, {}, record.made_for), {}
    else:
        routed = routed_layers("replay_indices", text)
        if routed and not record.experts:
            raise ValueError(
                "replay_indices: record must have experts for experts=True, got one without; "
                "record with record_indices(model, experts=True)"
            )
    with entered(Replay(text, checked(record, text, layers, routed), routed)):
        yield


def selecting(caller: str, model) -> dict[int, nn.Module]:
    """The attention modules that select by an indexer of their own, by layer."""
    if patch_of(model) is None:
        raise TypeError(
            f"{caller}: model must be patched by models.use_custom_pypto first, "
            f"got a {type(model).__name__}"
        )
    found = patched_attentions(text_model(model)).items()
    return {i: attention for i, attention in found if attention.selects}


def checked(
    record: Record, text, layers: dict[int, nn.Module], routed: dict[nn.Module, int]
) -> Record:
    """What of ``record`` a replay repeats, which the caller may change meanwhile.

    Raises:
        ValueError: it is of another model.
    """
    for name, own in made_for(text).items():
        if (other := record.made_for.get(name, own)) != own:
            raise ValueError(
                f"replay_indices: record must be of a model with {name}={own}, got one of a model "
                f"with {name}={other}; record with the same model"
            )
    kept = Record(dict(record.indices), dict(record.experts))
    shape = next((x.shape[:2] for x in kept.tensors().values()), torch.Size())
    widths = {i: attention.selection_width for i, attention in layers.items()}
    check_tensors("indices", kept.indices, widths, shape)
    routers = {i: router_of(layer).inside for layer, i in routed.items()}
    check_tensors("experts", kept.experts, {i: x.top_k for i, x in routers.items()}, shape)
    for layer, experts in kept.experts.items():
        count = routers[layer].num_experts
        if ((experts < 0) | (experts >= count)).any():
            raise ValueError(
                f"replay_indices: record.experts[{layer}] must have numbers from 0 to {count - 1}, "
                f"got {int(experts.min())} to {int(experts.max())}"
            )
    return kept


class Recording(Context):
    def __init__(self, text: nn.Module, layers: dict[int, nn.Module], routed: dict[nn.Module, int]):
        super().__init__(text, routed)
        self.parts: dict[str, dict[int, list[Tensor]]] = {
            "indices": {layer: [] for layer in layers},
            "experts": {layer: [] for layer in routed.values()},
        }

    def tensors(self, kind: str) -> dict[int, Tensor]:
        empty = torch.empty(0, 0, 0, dtype=torch.int32)
        return {i: torch.cat(parts, 1) if parts else empty for i, parts in self.parts[kind].items()}

    def taken(self, attention: nn.Module, step: Step, indices: Tensor) -> None:
        self.add(self.parts["indices"][attention.layer_idx], step, indices.squeeze(2))

    def taken_experts(self, layer: int, step: Step | None, experts: Tensor) -> None:
        if step is not None:
            self.add(self.parts["experts"][layer], step, experts.int())

    def add(self, parts: list[Tensor], step: Step, chosen: Tensor) -> None:
        chosen, before = step.gathered(chosen), int(step.sequences.seen)
        recorded = sum(part.size(1) for part in parts)
        if before > recorded or (before and len(parts[0]) != len(chosen)):
            raise ValueError(
                f"record_indices: {CACHE} must be empty, or hold the recorded tokens, "
                f"[{len(parts[0]) if parts else 0}, {recorded}]; got one with "
                f"{[len(chosen), before]}"
            )
        if before and step.sequences.exchanged:
            raise ValueError(
                "record_indices: sequences must keep their places in the cache, got an exchange, "
                "as of beam search; generate without num_beams, or record a forward of its result"
            )
        if before < recorded:  # the cache was cropped, or is another one
            parts[:] = [torch.cat(parts, 1)[:, :before]] if before else []
        parts.append(chosen)


class Replay(Context):
    def __init__(self, text: nn.Module, record: Record, routed: dict[nn.Module, int]):
        super().__init__(text, routed)
        self.record = record
        self.shape = next((x.shape[:2] for x in record.tensors().values()), None)

    def begins(self, step: Step | None, batch: int, tokens: int) -> None:
        if self.shape is None:
            return
        if step is None:
            if (batch, tokens) != self.shape:
                raise ValueError(
                    "replay_indices: on the upstream path a forward must have the "
                    f"{list(self.shape)} tokens [B, T] of the record, got {[batch, tokens]}; "
                    "generate() does not feed its last token"
                )
            return
        first = int(step.sequences.seen)
        if batch != self.shape[0] or first + tokens > self.shape[1]:
            raise ValueError(
                f"replay_indices: the forward must stay within the {list(self.shape)} "
                f"tokens [B, T] of the record, got tokens {first} to {first + tokens} of {batch} "
                "sequences"
            )
        if first and step.sequences.exchanged:
            raise ValueError(
                "replay_indices: sequences must keep their places in the cache, got an exchange, "
                "as of beam search; generate without num_beams"
            )

    def of_step(self, recorded: Tensor, step: Step) -> Tensor:
        """That of the new tokens of all ranks, on their device."""
        first = int(step.sequences.seen)
        columns = recorded[:, first : first + step.whole.count()]
        return columns.to(step.whole.valid.device)

    def given(self, attention: nn.Module, step: Step) -> Tensor:
        recorded, new = self.of_step(self.record.indices[attention.layer_idx], step), step.whole
        existing(attention, recorded, new.positions, new.valid, (~new.valid).sum(1))
        return step.part(recorded).unsqueeze(2)

    def given_experts(self, layer: int, step: Step | None) -> Tensor:
        recorded = self.record.experts[layer]
        return recorded if step is None else step.part(self.of_step(recorded, step))

    def upstream(self, attention: nn.Module, hidden_states: Tensor, mask: Tensor) -> nn.Module:
        if not attention.selects:
            return attention
        recorded = self.record.indices[attention.layer_idx].to(hidden_states.device)
        return with_indexer(attention, Selected(columns_of(attention, recorded, mask)))


def columns_of(attention: nn.Module, recorded: Tensor, mask: Tensor) -> Tensor:
    """The recorded positions as the result of upstream's indexer."""
    padding = attention.padding(mask)
    positions = torch.arange(recorded.size(1), device=recorded.device) - padding[:, None]
    exists = existing(attention, recorded, positions, positions >= 0, padding)
    columns = torch.where(exists, recorded + padding[:, None, None], -1).int()
    return attention.upstream_indices(columns)


def existing(
    attention: nn.Module, recorded: Tensor, positions: Tensor, real: Tensor, padding: Tensor
) -> Tensor:
    """Which of the recorded numbers ``[B, T, K]`` are positions that a token may attend to: a
    record may hold any number.

    Args:
        positions: of the tokens; real: which are no padding; padding: how many are, ``[B]``.
    Raises:
        ValueError: other tokens were padding when the record was made, and it counts from others.
    """
    selectable = attention.selectable(positions)
    selects, exists = real & (selectable > 0), recorded >= 0
    some = exists.any(-1)
    exists &= recorded < selectable[..., None]
    if not (torch.equal(some, selects) and torch.equal(exists.any(-1), selects)):
        raise ValueError(
            "replay_indices: attention_mask must have the padding of the recorded forwards, where "
            f"{(recorded < 0).all(-1).sum(1).tolist()} tokens select nothing, got "
            f"{padding.tolist()} tokens of padding on the left"
        )
    return exists
