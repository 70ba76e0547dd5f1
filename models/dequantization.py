"""Replaces a ``kv_b_proj`` whose weight alone is quantized by a plain one, and puts it back.

Absorption multiplies by the weight itself, so it is dequantized once, not in each forward. The
quantized module is kept outside the model's modules: it is in no state dict.
"""

import logging
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from .foreign_weights import dequantized_projection
from .projection import brought_in, quantized_by

logger = logging.getLogger("custom_pypto")


class Dequantized(NamedTuple):
    """A ``kv_b_proj`` that a plain one stands in for."""

    layer: int
    library: str
    original: nn.Module
    plain: nn.Linear
    dtype: torch.dtype  # of `plain` when it was made


def dequantize(attentions: dict[int, nn.Module], dtype: torch.dtype) -> list[Dequantized]:
    """Replaces every ``kv_b_proj`` whose weight alone is quantized by a plain one in ``dtype``.

    Args:
        attentions: by the number of their layer.
    """
    replaced = []
    for layer, attention in attentions.items():
        original = attention._modules.get("kv_b_proj")
        if original is None or (library := quantized_by(original)) is None:
            continue
        plain = nn.Linear(original.in_features, original.out_features, bias=False, device="meta")
        with torch.no_grad():
            weight = dequantized_projection(original, library).to(dtype)
        plain.weight = nn.Parameter(weight, requires_grad=False)
        attention.kv_b_proj = plain.train(original.training)
        replaced.append(Dequantized(layer, library, original, plain, dtype))
    return replaced


def report(replaced: list[Dequantized]) -> None:
    """One line for the log."""
    if replaced:
        logger.warning(
            "kv_b_proj of %s, quantized by %s, is dequantized to %s (%.1f MB), because its weight "
            "is absorbed; models.use_transformers(model) puts it back",
            named(each.layer for each in replaced),
            " and ".join(sorted({each.library for each in replaced})),
            str(replaced[0].dtype).removeprefix("torch."),
            sum(each.plain.weight.nbytes for each in replaced) / 1e6,
        )


def restore(attentions: dict[int, nn.Module], replaced: list[Dequantized]) -> None:
    """Puts the quantized modules back, but for those whose plain weight has changed since."""
    kept = []
    for each in replaced:
        owner = owner_of(attentions[each.layer], each.plain)
        if owner is None:  # another module is in its place
            continue
        if changed(each):
            kept.append(each.layer)
            continue
        with brought_in(each.plain):
            now = each.plain.weight
        original = each.original.to(now.device)
        if now.dtype != each.dtype:
            original = original.to(now.dtype)
        setattr(*owner, original.train(each.plain.training))
    if kept:
        logger.warning(
            "kv_b_proj of %s stays plain: its weight is no longer the quantized one", named(kept)
        )


def owner_of(attention: nn.Module, plain: nn.Linear) -> tuple[nn.Module, str] | None:
    """The module of ``attention`` that holds ``plain``, such as an adapter, and its name there."""
    for module in attention.modules():
        for name, child in module._modules.items():
            if child is plain:
                return module, name
    return None


def changed(each: Dequantized) -> bool:
    """Whether the plain weight is another than the quantized one, as after training."""
    if type(each.plain._parameters.get("weight")) is not nn.Parameter:
        return True
    with torch.no_grad(), brought_in(each.plain):
        weight = each.plain.weight
        want = dequantized_projection(each.original, each.library).to(each.dtype)
        return not torch.equal(weight, want.to(weight.device, weight.dtype))


def named(layers: Iterable[int]) -> str:
    """``layers 0 to 3 and 7``, of ascending numbers."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    words = [f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    plural = "s" if len(words) > 1 or len(runs[0]) > 1 else ""
    return f"layer{plural} {' and '.join(words)}"
