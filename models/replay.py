"""Selections recorded in a rollout, and replayed in training.

Reinforcement learning compares probabilities of the same tokens under the model that generated
them and the model in training. Selection is discontinuous: with other weights, kernels or batches a
token may attend to other positions, and the probabilities differ by more than the policies.
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

#: for each layer that selects, the int32 positions ``[B, T, K]`` its T tokens attend to
Record = dict[int, Tensor]


@contextmanager
def record_indices(model: PreTrainedModel) -> Iterator[Record]:
    """Records which positions each token attends to, in every layer that selects::

        with models.record_indices(model) as record:
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
    Returns:
        A context, which gives the record: a dict of tensors by layer, empty until the context ends.
    Raises:
        TypeError: the model is not patched.
        ValueError: from a forward whose cache has tokens from before or of other sequences, or
            whose sequences have changed places, as in beam search.
    """
    recording = Recording(text_model(model), selecting("record_indices", model))
    record: Record = {}
    with entered(recording):
        yield record
    for layer, parts in recording.parts.items():
        record[layer] = torch.cat(parts, 1) if parts else torch.empty(0, 0, 0, dtype=torch.int32)


@contextmanager
def replay_indices(model: PreTrainedModel, record: Record) -> Iterator[None]:
    """Attends to the recorded positions; the indexers do not select. See :func:`record_indices`.

    On the ops, token ``t`` of the cache attends to ``record[layer][:, t]``; index keys are still
    written. On the upstream path, which training mode may take, a forward has the T tokens of the
    record, padded alike; for DeepSeek-V4 without padding, which upstream counts as tokens of
    compressed rows. Activation checkpointing repeats forwards in the backward, which must then be
    in this context, too.

    Args:
        model: a model patched by :func:`models.use_custom_pypto`.
        record: of :func:`record_indices`, on the device of ``model``.
    Raises:
        TypeError: the model is not patched.
        ValueError: ``record`` is of another model; or, from a forward, of other tokens.
    """
    check_record(record, selecting("replay_indices", model))
    with entered(Replay(text_model(model), record)):
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


def check_record(record: Record, attentions: dict[int, nn.Module]) -> None:
    layers = list(attentions)
    if sorted(record) != layers:
        raise ValueError(
            f"replay_indices: record must have layers {layers} (those that select), got "
            f"{sorted(record)}; record with the same model"
        )
    for layer, indices in record.items():
        shape = (*record[layers[0]].shape[:2], attentions[layer].selection_width)
        if indices.dtype != torch.int32 or indices.shape != shape:
            raise ValueError(
                f"replay_indices: record[{layer}] must be int32 [B, T, {shape[-1]}] (indices of a "
                f"token in this model), with B and T of record[{layers[0]}], got {indices.dtype} "
                f"{list(indices.shape)}"
            )


class Recording(Context):
    def __init__(self, text: nn.Module, layers: dict[int, nn.Module]):
        super().__init__(text)
        self.parts: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    def taken(self, attention: nn.Module, step: Step, indices: Tensor) -> None:
        parts = self.parts[attention.layer_idx]
        indices, before = step.gathered(indices), int(step.sequences.seen)
        recorded = sum(part.size(1) for part in parts)
        if before > recorded or (before and len(parts[0]) != len(indices)):
            raise ValueError(
                f"record_indices: {CACHE} must be empty, or hold the recorded tokens, "
                f"[{len(parts[0]) if parts else 0}, {recorded}]; got one with "
                f"{[len(indices), before]}"
            )
        if before and step.sequences.exchanged:
            raise ValueError(
                "record_indices: sequences must keep their places in the cache, got an exchange, "
                "as of beam search; generate without num_beams, or record a forward of its result"
            )
        if before < recorded:  # the cache was cropped, or is another one
            parts[:] = [torch.cat(parts, 1)[:, :before]] if before else []
        parts.append(indices.squeeze(2))


class Replay(Context):
    def __init__(self, text: nn.Module, record: Record):
        super().__init__(text)
        self.record = dict(record)  # the caller's may change

    def given(self, attention: nn.Module, step: Step) -> Tensor:
        recorded, first = self.record[attention.layer_idx], int(step.sequences.seen)
        batch, tokens = len(step.own.valid), step.whole.count()
        if batch != recorded.size(0) or first + tokens > recorded.size(1):
            raise ValueError(
                f"replay_indices: the forward must stay within the {list(recorded.shape[:2])} "
                f"tokens [B, T] of the record, got tokens {first} to {first + tokens} of {batch} "
                "sequences"
            )
        recorded = recorded[:, first : first + tokens]
        new = step.whole
        existing(attention, recorded, new.positions, new.valid, (~new.valid).sum(1))
        return step.part(recorded).unsqueeze(2)

    def upstream(self, attention: nn.Module, hidden_states: Tensor, mask: Tensor) -> nn.Module:
        if not attention.selects:
            return attention
        recorded = self.record[attention.layer_idx]
        return with_indexer(
            attention, Selected(columns_of(attention, recorded, hidden_states, mask))
        )


def columns_of(
    attention: nn.Module, recorded: Tensor, hidden_states: Tensor, mask: Tensor
) -> Tensor:
    """The recorded positions as the result of upstream's indexer."""
    if hidden_states.shape[:2] != recorded.shape[:2]:
        raise ValueError(
            "replay_indices: on the upstream path a forward must have the "
            f"{list(recorded.shape[:2])} tokens [B, T] of the record, got "
            f"{list(hidden_states.shape[:2])}; generate() does not feed its last token"
        )
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
