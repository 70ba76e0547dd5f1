"""The parts of a patched model: its patched layers, their device, the sizes of its cache."""

import torch
from torch import nn

from .projection import aligning_hook


def text_model(model):
    """The decoder of ``model``; of a multimodal model, its language model."""
    return getattr(model.base_model, "language_model", model.base_model)


def patched_layers(text) -> dict[int, nn.Module]:
    """The layers of a patched :func:`text_model` with patched attention, by their number.

    Raises:
        TypeError: the model is not patched.
    """
    # runs for every layer in every forward, and nn.Module's lookup is slow
    found = {
        i: layer
        for i, layer in enumerate(text.layers)
        if hasattr(type(layer._modules["self_attn"]), "pools")
    }
    if not found:
        raise TypeError(
            "PagedCache: model must be patched by models.use_custom_pypto first, "
            f"got one with a {type(text.layers[0].self_attn).__name__}"
        )
    return found


def pools_of(layers: dict[int, nn.Module]) -> dict:
    """The pools that the architecture of these patched layers declares."""
    return next(iter(layers.values())).self_attn.pools


def dimensions(text, layers: dict[int, nn.Module]) -> dict:
    """The properties that a text model, with these patched layers, and its cache must share."""
    return {
        # generate() changes it while it drafts with the first layers
        "num_hidden_layers": text.config.num_hidden_layers,
        **text.custom_pypto_sizes,
        "dtype": text.dtype,
        "device": device_of(dict([next(iter(layers.items()))])),
        "pools": {name: pool.dtype for name, pool in pools_of(layers).items()},
    }


def sizes(config, layers: dict[int, nn.Module]) -> dict:
    """The config attributes of the pools, read once: reading a config is slow, and the weights
    already have these sizes.
    """
    pools, differing = pools_of(layers), config.per_layer_attributes or ()
    names = [name for pool in pools.values() for name in pool.attributes]
    return {
        name: [getattr(layer.self_attn, name) for layer in layers.values()]
        if name in differing
        else getattr(config, name)
        for name in names
    }


def device_of(layers: dict[int, nn.Module]) -> torch.device:
    """The compute device of these decoder layers; offloaded weights are elsewhere.

    Raises:
        ValueError: several devices; the ops need cache and tables on one.
    """
    first = None
    for i, layer in layers.items():
        norm = layer.self_attn.get_submodule(layer.self_attn.first_norm)
        device = norm.weight.device
        if device.type == "meta":
            for module in (norm, layer.self_attn, layer):
                if (hook := aligning_hook(module)) and hook.offload:
                    device = torch.empty(0, device=hook.execution_device).device  # with its index
                    break
        if first is None:
            first = device
        elif device != first:
            raise ValueError(
                "PagedCache: all layers must compute on one device, got layer "
                f"{min(layers)} on {first} and layer {i} on {device}; load the model with "
                f"device_map={{'': '{first}'}} or call models.use_transformers(model)"
            )
    return first
