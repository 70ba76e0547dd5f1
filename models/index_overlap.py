"""How alike the layers of a recorded run select, and which of them could share a selection.

The pattern is chosen by these selections alone. IndexCache (arXiv:2603.12201) chooses by the loss
of the language model, which takes a run for each layer and step; what a pattern costs in answers
only a run with it shows.
"""

import math

import torch
from torch import Tensor

from .patched import text_model
from .record import Record

# tokens whose selections are compared at once
TOKENS = 256


def overlaps(record: Record) -> Tensor:
    """``[L, L]`` float64: in row i and column j the share of what the j-th recorded layer selects
    that the i-th has selected, too; the mean over the tokens of which a layer leaves something out.

    Args:
        record: of :func:`models.record_indices`.
    Raises:
        ValueError: there is no such token; the run was too short.
    """
    selected = torch.stack([indices.flatten(0, 1).cpu() for indices in record.indices.values()])
    exists = selected >= 0
    # some position before the last selected one is not selected
    chooses = (exists.sum(-1) < selected.amax(-1) + 1).any(0)
    if not chooses.any():
        raise ValueError(
            "overlaps: record must have tokens that see more than they select, got "
            f"{chooses.numel()} that select all; record a longer run"
        )
    selected, exists = selected[:, chooses], exists[:, chooses]
    total = torch.zeros(len(selected), len(selected), dtype=torch.float64)
    for part, real in zip(selected.split(TOKENS, 1), exists.split(TOKENS, 1), strict=True):
        # a column for each position, and one for none
        members = torch.zeros(*part.shape[:2], int(part.max()) + 2)
        members.scatter_(2, torch.where(real, part, members.size(2) - 1).long(), 1)
        members = members[..., :-1].transpose(0, 1)  # [tokens, L, positions]
        both = members @ members.transpose(1, 2)
        total += (both / members.sum(-1).clamp(min=1)[:, None]).double().sum(0)
    return total / selected.size(1)


def propose_pattern(model, record: Record, share: float) -> str:
    """An ``index_topk_pattern`` with which about ``share`` of the indexers of ``model`` run.

    Layers that select lose their indexer one after another: each time the one whose loss costs the
    least, where a layer that shares costs what it would have selected and its source has not.

    Args:
        model: a patched model, as it was when ``record`` was made.
        record: of :func:`models.record_indices`.
        share: of the layers in ``record``, more than 0 and at most 1; rounded up to whole layers.
    Raises:
        ValueError: ``share`` is out of range, or ``record`` is too short or of other layers.
    """
    if not 0 < share <= 1:
        raise ValueError(f"propose_pattern: share must be more than 0 and at most 1, got {share}")
    sources = text_model(model)._custom_pypto.sharing.sources
    layers, missing = list(record.indices), 1 - overlaps(record)
    if set(sources) & set(layers):
        raise ValueError(
            f"propose_pattern: record must be of the model as it is patched, where layers "
            f"{sorted(sources)} share a selection, got one of layers {layers}"
        )
    # layers that share with a layer lose what it loses
    weights = [1 + list(sources.values()).count(layer) for layer in layers]

    def cost(full: list[int]) -> float:
        last, total = 0, 0.0
        for j, weight in enumerate(weights):
            last = j if j in full else last
            total += weight * float(missing[last, j])
        return total

    full = list(range(len(layers)))
    while len(full) > math.ceil(share * len(layers)):
        full = min(([i for i in full if i != out] for out in full[1:]), key=cost)
    selecting = {layers[i] for i in full}
    return "".join("F" if i in selecting else "S" for i in sorted({*layers, *sources}))
