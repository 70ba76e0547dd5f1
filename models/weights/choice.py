"""Which layers of a model get stored weights, and in which format."""

from typing import Literal, TypedDict

import torch
from torch import nn

from custom_pypto.weight_formats import WEIGHT_FORMATS, WEIGHT_UNIT, rounded_formats

from ..patched import MTP, text_model
from .modules import EXPERT_WEIGHTS, is_experts, is_grouped

#: linear layers that stay plain: absorption reads the weight of the first; the others decide which
#: tokens and experts are selected, and are small
NEVER_STORED = ("kv_b_proj", "weights_proj", "gate")
STORED = "stored"
PARTS = ("experts", "rest")
# for the types of callers: a test compares them with the table of formats
Kind = Literal["stored", "int8", "int4"]


class OfParts(TypedDict, total=False):
    """A format for experts and one for the rest; absent: None."""

    experts: Kind | None
    rest: Kind | None


Weights = Kind | OfParts | None


def check_weights(weights: Weights) -> dict[str, str | None]:
    """The option ``weights`` of :func:`models.load` for experts and for the rest.

    Raises:
        ValueError: names the argument, what was expected and what came.
    """
    names = (STORED, *rounded_formats(), None)
    both = weights if isinstance(weights, dict) else dict.fromkeys(PARTS, weights)
    if not both.keys() <= set(PARTS) or not all(kind in names for kind in both.values()):
        allowed = ", ".join(map(repr, names))
        raise ValueError(
            f"load: weights must be one of {allowed}, or a dict of these for 'experts' and "
            f"'rest', got {weights!r}"
        )
    return {part: both.get(part) for part in PARTS}


def check_stored(
    weights: dict[str, str | None],
    kinds: dict[str, str],
    device,
    tensor_parallel: bool,
    expert_parallel: bool,
) -> None:
    """Rejects what a model with stored weights cannot have.

    Args:
        weights: that were asked for.
        kinds: formats of the checkpoint's own modules.
    Raises:
        ValueError: names the argument, what was expected and what came.
    """
    wanted = {part: kind for part, kind in weights.items() if kind is not None}
    if not wanted and not kinds:
        return
    if wanted and kinds:
        raise ValueError(
            "load: weights must be None for a checkpoint that was saved with weights in "
            f"{', '.join(sorted(set(kinds.values())))}, got {wanted}; load the original one"
        )
    if device is not None and torch.device(device).type != "cpu":
        raise ValueError(
            f"load: device must be None or 'cpu' with stored weights, got {device!r}; load with "
            "weights=None"
        )
    alone = wanted.keys() <= {"experts"} and all(name.endswith(".experts") for name in kinds)
    if tensor_parallel and not (expert_parallel and alone):
        raise ValueError(
            "load: tensor_parallel must be False with stored weights, got True; pass "
            "expert_parallel=True, and both only for weights={'experts': ...}"
        )


def kinds_of(
    model,
    weights: dict[str, str | None],
    on_disk: dict[str, set[str]],
    dtypes: dict[str, torch.dtype],
) -> dict[str, str]:
    """The format of each module of ``model`` that gets one, by its name.

    Args:
        on_disk: dtypes of the parts of each parameter, by safetensors' names.
        dtypes: of the parameters in the loaded model.
    """
    kinds = {}
    published = {form.on_disk: kind for kind, form in WEIGHT_FORMATS.items() if form.on_disk}
    usual = dtypes[next(name for name in dtypes if name.endswith("embed_tokens.weight"))]
    for name, module in layers_of(model):
        if is_experts(module):
            wanted, parameters = weights["experts"], [f"{name}.{one}" for one in EXPERT_WEIGHTS]
        else:
            wanted, parameters = weights["rest"], [f"{name}.weight"]
        # upstream keeps some in float32
        if wanted is None or any(dtypes[parameter] != usual for parameter in parameters):
            continue
        if wanted == STORED:
            found = set().union(*(on_disk[parameter] for parameter in parameters))
            wanted = published.get(found.pop()) if len(found) == 1 else None
        if wanted is not None and not groups_share_blocks(module, WEIGHT_FORMATS[wanted].block):
            kinds[name] = wanted
    return kinds


def groups_share_blocks(module: nn.Module, block: int) -> bool:
    """Whether a block with one scale would have rows of two groups, whose products are apart."""
    return block > 0 and is_grouped(module) and module.out_features // module.n_groups % block != 0


def layers_of(model):
    """Names and modules of experts and of linear layers that may have stored weights."""
    text = text_model(model)
    prefix = next(name for name, module in model.named_modules() if module is text)
    layers = {"layers": text.layers} | ({MTP: text.mtp} if hasattr(text, MTP) else {})
    for name, module in nn.ModuleDict(layers).named_modules():
        linear = type(module) is nn.Linear or is_grouped(module)
        linear &= name.rpartition(".")[2] not in NEVER_STORED
        if linear and module.in_features % WEIGHT_UNIT == 0:
            yield f"{prefix}.{name}", module
        elif hasattr(module, "_apply_gate") and is_experts(module):
            if all(module._parameters[one].size(-1) % WEIGHT_UNIT == 0 for one in EXPERT_WEIGHTS):
                yield f"{prefix}.{name}", module
