"""The parts of a patched model: its patched layers, their device, name and sizes of its cache."""

import inspect
from collections.abc import Callable

import torch
from torch import nn
from transformers.masking_utils import create_masks_for_generate

from .projection import aligning_hook, has_other_forward

# the argument of forwards and of generate() for a cache: transformers renamed it to the first
CACHE_NAMES = ("cache", "past_key_values")
_PARAMETERS = inspect.signature(create_masks_for_generate).parameters
#: the name in the installed transformers, also of the field of outputs
CACHE = next(name for name in CACHE_NAMES if name in _PARAMETERS)
#: name of the list with the MTP layer in a text model that runs all of its ``layers``
MTP = "mtp"


def text_model(model):
    """The decoder of ``model``; of a multimodal model, its language model."""
    return getattr(model.base_model, "language_model", model.base_model)


def attention_of(layer: nn.Module, is_wanted: Callable[[type], bool]) -> nn.Module | None:
    """The attention of a decoder layer, by its class: the layer, or the attention, may be inside
    somebody's wrapper, such as torch's ``checkpoint_wrapper`` or ``OptimizedModule``."""
    # runs for every layer in every forward, and nn.Module's lookup is slow
    outermost = layer._modules.get("self_attn", layer)
    if is_wanted(type(outermost)):
        return outermost
    return next((x for x in outermost.modules() if is_wanted(type(x))), None)


def is_patched(cls: type) -> bool:
    """Whether this is the attention class of a patched model. By an attribute: after a reload of
    this package its classes are others."""
    return hasattr(cls, "pools")


def is_mtp(attention: nn.Module) -> bool:
    """Whether this is the attention of the layer for multi-token prediction, which is behind the
    layers of a forward: :mod:`.mtp`."""
    return getattr(attention, "is_mtp", False)


def decoder_layers(text) -> list[nn.Module]:
    """The decoder layers of a :func:`text_model`, behind them its MTP layer: among the others where
    a forward runs the first ``num_hidden_layers``, else in a list of its own."""
    return [*text.layers, *getattr(text, MTP, ())]


def checkpoints(text) -> bool:
    """Whether transformers checkpoints the layers in a forward, without a cache, and then repeats
    them in the backward."""
    return text.training and getattr(text, "gradient_checkpointing", False)


def upstream_class(attention: nn.Module) -> type:
    """The class of transformers of an attention, patched or not."""
    cls = type(attention)
    return cls.__bases__[-1] if is_patched(cls) else cls


def attentions_to_patch(text, upstream: type, paged: type) -> dict[int, nn.Module]:
    """The attentions of a :func:`text_model`, patched or not, by the number of their layer, that of
    an MTP layer included; without the layers that stay unpatched.

    Raises:
        TypeError: another attention, or one that the patch would not reach.
    """
    classes, found = (upstream, *paged.upstream_layers), {}
    for i, layer in enumerate(decoder_layers(text)):
        attention = attention_of(layer, lambda cls: issubclass(cls, classes))
        if attention is None:
            attention = layer.self_attn
        if isinstance(attention, paged.upstream_layers):
            continue
        if upstream_class(attention) is not upstream or has_other_forward(attention):
            raise TypeError(
                f"use_custom_pypto: the attention of layer {i} must be a plain "
                f"{upstream.__name__}, got {type(attention).__name__} or a wrapped forward "
                "(kernelize?), which the patch would not reach; patch before wrapping"
            )
        found[i] = attention
    return found


def patched_attentions(text) -> dict[int, nn.Module]:
    """The patched attentions of a :func:`text_model`, by the number of their layer.

    Raises:
        TypeError: the model is not patched.
    """
    attentions = {}
    for i, layer in enumerate(text.layers):  # torch.compile takes no comprehension that assigns
        attention = attention_of(layer, is_patched)
        if attention is not None and not attention.is_mtp:
            attentions[i] = attention
    if not attentions:
        raise TypeError(
            "patched model: model must be patched by models.use_custom_pypto first, "
            f"got one with a {type(text.layers[0].self_attn).__name__}"
        )
    return attentions


def mtp_attention(text) -> nn.Module | None:
    """The attention of a :func:`text_model`'s MTP layer; None: it has no such layer."""
    last = decoder_layers(text)[-1]  # may be inside somebody's wrapper
    outermost = last._modules.get("self_attn", last)
    return next((x for x in outermost.modules() if is_mtp(x)), None)


def dropout_of(attentions: dict[int, nn.Module]) -> float:
    """The largest dropout of these attentions in a forward."""
    # upstream reads it of the attention, and its mode, which may not be those of the model
    most = 0.0
    for attention in attentions.values():  # torch.compile takes no max() with a default
        if attention.training:
            most = max(most, attention.attention_dropout)
    return most


def dimensions(text, attentions: dict[int, nn.Module]) -> dict:
    """The properties that a text model, with these patched attentions, and its cache must share."""
    first, attention = next(iter(attentions.items()))
    return {
        # generate() changes it while it drafts with the first layers
        "num_hidden_layers": text.config.num_hidden_layers,
        **text._custom_pypto.sizes,
        "dtype": text.dtype,
        "device": device_of(text, {first: attention}),
        "pools": {name: pool.dtype for name, pool in attention.pools.items()},
    }


def differences(made: dict, wanted: dict) -> tuple[str, str]:
    """The properties in which the two differ, as text."""
    names = [name for name in made | wanted if made.get(name) != wanted.get(name)]
    first, second = (
        ", ".join(f"{name}={values.get(name)}" for name in names) for values in (made, wanted)
    )
    return first, second


def sizes(config, pools: dict, attentions: dict[int, nn.Module]) -> dict:
    """The type of the model and the config attributes of its pools, read once: reading a config is
    slow, and the weights already have these sizes.
    """
    differing = config.per_layer_attributes or ()
    names = [name for pool in pools.values() for name in pool.attributes]
    return {"model_type": config.model_type} | {
        name: [getattr(attention, name) for attention in attentions.values()]
        if name in differing
        else getattr(config, name)
        for name in names
    }


def device_of(text, attentions: dict[int, nn.Module]) -> torch.device:
    """The compute device of the layers with these attentions; offloaded weights are elsewhere.

    Raises:
        ValueError: several devices; the ops need cache and tables on one.
    """
    first = None
    for i, attention in attentions.items():
        norm = attention._modules[attention.first_norm]  # nn.Module's lookups are slow
        weight = norm._parameters.get("weight")
        device = (norm.weight if weight is None else weight).device
        if device.type == "meta":
            for module in (norm, attention, text.layers[i]):
                if (hook := aligning_hook(module)) and hook.offload:
                    device = torch.empty(0, device=hook.execution_device).device  # with its index
                    break
        if first is None:
            first = device
        elif device != first:
            raise ValueError(
                "patched model: all layers must compute on one device, got layer "
                f"{min(attentions)} on {first} and layer {i} on {device}; load the model with "
                f"device_map={{'': '{first}'}} or call models.use_transformers(model)"
            )
    return first
