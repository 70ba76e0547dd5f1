"""Selections recorded in a rollout, and replayed in training.

Reinforcement learning compares probabilities of the same tokens under the model that generated
them and the model in training. Selection is discontinuous: with other weights, kernels or batches a
token may attend to other positions, and the probabilities differ by more than the policies.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .cache import Step
from .patch import patch_of
from .patched import CACHE, patched_attentions, text_model

#: for each layer with an indexer, the int32 positions ``[B, T, K]`` its T tokens attend to
Record = dict[int, Tensor]


@contextmanager
def record_indices(model: PreTrainedModel) -> Iterator[Record]:
    """Records which positions each token attends to, in every layer with an indexer::

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
    incomplete last group.

    Args:
        model: a model patched by :func:`models.use_custom_pypto`.
    Raises:
        TypeError: the model is not patched.
        ValueError: from a forward whose cache has tokens from before or of other sequences, or
            whose sequences have changed places, as in beam search.
    """
    record: dict[int, list[Tensor]] = {}
    with ExitStack() as stack:
        for layer, attention in with_indexer("record_indices", model).items():
            record[layer] = []
            attend = partial(recording, attention.attend, record[layer])
            stack.enter_context(replaced(attention, "attend", attend))
        yield record
    for layer, parts in record.items():
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
    attentions = with_indexer("replay_indices", model)
    check_record(record, attentions)
    with ExitStack() as stack:
        for layer, attention in attentions.items():
            attend = partial(replaying, attention.attend, record[layer])
            dense = partial(replaying_upstream, attention, attention.dense, record[layer])
            stack.enter_context(replaced(attention, "attend", attend))
            stack.enter_context(replaced(attention, "dense", dense))
        yield


def with_indexer(caller: str, model) -> dict[int, nn.Module]:
    """The attention modules with an indexer, by layer."""
    if patch_of(model) is None:
        raise TypeError(
            f"{caller}: model must be patched by models.use_custom_pypto first, "
            f"got a {type(model).__name__}"
        )
    found = patched_attentions(text_model(model)).items()
    return {i: attention for i, attention in found if attention.indexer is not None}


def check_record(record: Record, attentions: dict[int, nn.Module]) -> None:
    layers = list(attentions)
    if sorted(record) != layers:
        raise ValueError(
            f"replay_indices: record must have layers {layers} (those with an indexer), got "
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


@contextmanager
def replaced(module: nn.Module, name: str, method) -> Iterator[None]:
    """Gives this module another method; contexts may be nested."""
    outer = vars(module).get(name)
    setattr(module, name, method)
    try:
        yield
    finally:
        if outer is None:
            delattr(module, name)
        else:
            setattr(module, name, outer)


def recording(attend, parts: list[Tensor], hidden_states, position_embeddings, step: Step, *args):
    """``attend``; appends its positions to ``parts``."""
    output, own = attend(hidden_states, position_embeddings, step, *args)
    indices, before = step.whole(own), int(step.sequences.seen)
    recorded = sum(part.size(1) for part in parts)
    if before > recorded or (before and len(parts[0]) != len(indices)):
        raise ValueError(
            f"record_indices: {CACHE} must be empty, or hold the recorded tokens, "
            f"[{len(parts[0]) if parts else 0}, {recorded}]; got one with {[len(indices), before]}"
        )
    if before and step.sequences.exchanged:
        raise ValueError(
            "record_indices: sequences must keep their places in the cache, got an exchange, as of "
            "beam search; generate without num_beams, or record a forward of its result"
        )
    if before < recorded:  # the cache was cropped, or is another one
        parts[:] = [torch.cat(parts, 1)[:, :before]] if before else []
    parts.append(indices.squeeze(2))
    return output, own


def replaying(attend, recorded: Tensor, hidden_states, position_embeddings, step: Step, *args):
    """``attend`` to the recorded positions of the new tokens."""
    batch, tokens = len(hidden_states), step.count()
    first = int(step.sequences.seen)
    if batch != recorded.size(0) or first + tokens > recorded.size(1):
        raise ValueError(
            f"replay_indices: the forward must stay within the {list(recorded.shape[:2])} tokens "
            f"[B, T] of the record, got tokens {first} to {first + tokens} of {batch} sequences"
        )
    indices = step.own(recorded[:, first : first + tokens]).unsqueeze(2)
    return attend(hidden_states, position_embeddings, step, indices)


def replaying_upstream(
    attention, dense, recorded: Tensor, hidden_states, position_embeddings, mask: Tensor, **kwargs
):
    """The upstream forward of ``attention`` with the recorded positions as its indexer's result."""
    if hidden_states.shape[:2] != recorded.shape[:2]:
        raise ValueError(
            "replay_indices: on the upstream path a forward must have the "
            f"{list(recorded.shape[:2])} tokens [B, T] of the record, got "
            f"{list(hidden_states.shape[:2])}; generate() does not feed its last token"
        )
    padding = attention.padding(mask)
    positions = torch.arange(recorded.size(1), device=recorded.device) - padding[:, None]
    selectable = attention.selectable(positions)
    # a record may hold any number: none may become a column that does not exist
    exists = (recorded >= 0) & (recorded < selectable[..., None])
    if not torch.equal(exists.any(-1), selectable > 0):
        raise ValueError(
            "replay_indices: attention_mask must have the padding of the recorded forwards, where "
            f"{(recorded < 0).all(-1).sum(1).tolist()} tokens select nothing, got "
            f"{padding.tolist()} tokens of padding on the left"
        )
    columns = torch.where(exists, recorded + padding[:, None, None], -1).int()
    columns = attention.upstream_indices(columns)
    with replaced(attention.indexer, "forward", lambda *args, **kwargs: columns):
        return dense(hidden_states, position_embeddings, mask, **kwargs)
