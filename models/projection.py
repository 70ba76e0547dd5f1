"""What stands for ``kv_b_proj`` and the indexer, whose ``forward`` a swapped layer does not call.

Absorption reads the weight of ``kv_b_proj``, and the ops take the place of the indexer's forward.
Whatever was put on either of them must be in what is read, or be refused before anything runs.
"""

from contextlib import AbstractContextManager, nullcontext
from types import MethodType

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import type_before_parametrizations
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.distributed.tensor_parallel import TensorParallelLayer

# by name, since peft need not be installed
LORA = ("peft.tuners.lora.layer", "Linear")


def check_layer(layer: int, attention: nn.Module, indexer_class: type) -> None:
    """Refuses a layer on which something would be passed over.

    Args:
        indexer_class: the stock class of the indexer, the only one that the op computes.
    Raises:
        TypeError: with the layer, what is there, and the remedy.
    """
    parts = attention._modules  # in every forward, and nn.Module is slow to find them
    projection, indexer = parts["kv_b_proj"], parts.get("indexer")
    if found := obstacle(projection):
        raise TypeError(
            f"use_custom_pypto: kv_b_proj of layer {layer} must be a torch.nn.Linear, got {found}: "
            "its weight is absorbed, its forward never called; dequantise it, merge its adapter "
            "(merge_and_unload), remove its hook, or call models.use_transformers(model)"
        )
    if indexer is not None and (type(indexer) is not indexer_class or wrapped(indexer)):
        raise TypeError(
            f"use_custom_pypto: the indexer of layer {layer} must be a plain "
            f"{indexer_class.__name__}, got {described(indexer)}: an op takes the place "
            "of its forward; remove that, or call models.use_transformers(model)"
        )


def weight_of(projection: nn.Module) -> Tensor:
    """What a ``kv_b_proj`` that :func:`check_layer` has let pass multiplies by, ``[H * (nope + v),
    L]``, with its adapters, of the heads of this rank."""
    if not is_lora(projection):
        with brought_in(projection):
            weight = projection.weight  # stays after accelerate has taken the parameter back
        return weight.to_local() if isinstance(weight, DTensor) else weight
    if projection.disable_adapters and projection.merged:
        projection.unmerge()  # as peft does in the forward
    weight = weight_of(projection.base_layer)
    if projection.disable_adapters or projection.merged:
        return weight
    dtype = weight.dtype
    for adapter in active_adapters(projection):
        with brought_in(projection.lora_A[adapter]), brought_in(projection.lora_B[adapter]):
            weight = weight + projection.get_delta_weight(adapter)
    return weight.to(dtype)


def obstacle(projection: nn.Module) -> str | None:
    """Why the weight alone is not all that ``projection`` does, or None."""
    if type(projection) is not nn.Linear:
        if is_lora(projection):
            return lora_obstacle(projection)
        if type_before_parametrizations(projection) is not nn.Linear:
            return described(projection)
    if wrapped(projection):
        return described(projection)
    if projection._parameters["bias"] is not None:
        return "one with a bias"
    weight = projection._parameters.get("weight")  # not there where it is parametrized
    if type(weight) is not nn.Parameter and is_traceable_wrapper_subclass(weight):
        return None if isinstance(weight, DTensor) else f"one with a {type(weight).__name__}"
    return None


def lora_obstacle(projection: nn.Module) -> str | None:
    if wrapped(projection):
        return described(projection)
    if projection.disable_adapters or projection.merged:
        return obstacle(projection.base_layer)
    adapters = active_adapters(projection)
    if adapters and isinstance(projection.base_layer._parameters.get("weight"), DTensor):
        return "a LoRA that ranks share"
    for adapter in adapters:
        if adapter in projection.lora_variant:
            return f"a LoRA of {type(projection.lora_variant[adapter]).__name__}"
        if projection.training and type(projection.lora_dropout[adapter]) is not nn.Identity:
            return "a LoRA with dropout in training mode"
        for factor in (projection.lora_A[adapter], projection.lora_B[adapter]):
            if found := obstacle(factor):
                return f"a LoRA of {found}"
    return obstacle(projection.base_layer)


def is_lora(module: nn.Module) -> bool:
    cls = type(module)
    return cls is not nn.Linear and (cls.__module__, cls.__qualname__) == LORA


def active_adapters(projection: nn.Module) -> list[str]:
    return [name for name in projection.active_adapters if name in projection.lora_A]


def wrapped(module: nn.Module) -> bool:
    """Whether a call of ``module`` does more than its class, for a hook or another ``forward``."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or has_other_forward(module)


def has_other_forward(module: nn.Module) -> bool:
    """Whether ``forward`` is replaced, by more than accelerate's, which only brings the weights, or
    transformers' for a weight that ranks share."""
    forward = module.__dict__.get("forward")
    if forward is None:
        return False
    if hook := aligning_hook(module):
        outer, inner = getattr(forward, "func", forward), module._old_forward
        accelerates = outer.__module__ == type(hook).__module__
        return not accelerates or getattr(inner, "__func__", None) is not type(module).forward
    return forward.__module__ != TensorParallelLayer.__module__


def aligning_hook(module: nn.Module):
    """accelerate's hook on ``module``, if it is one that only brings inputs and weights in."""
    if "_hf_hook" not in module.__dict__:
        return None
    from accelerate.hooks import AlignDevicesHook  # need not be installed where nobody hooks

    return module._hf_hook if type(module._hf_hook) is AlignDevicesHook else None


def brought_in(module: nn.Module) -> AbstractContextManager:
    """The parameters of ``module`` are where it computes."""
    if aligning_hook(module) is None:
        return nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(module)


def described(module: nn.Module) -> str:
    name = type(module).__name__
    if type(module) is not nn.Linear:
        name += f" of {type(module).__module__}"  # most of them are called Linear
    if module._forward_hooks or module._forward_pre_hooks:
        return f"{name} with a forward hook"
    return f"{name} with another forward" if has_other_forward(module) else name


def change_class(module: nn.Module, cls: type) -> None:
    """Gives ``module`` the class ``cls``, and accelerate its ``forward``."""
    module.__class__ = cls
    if "_old_forward" in module.__dict__:
        module._old_forward = MethodType(cls.forward, module)


def device_of(layers) -> torch.device:
    """Where these decoder layers compute, which is not where offloaded weights are.

    Raises:
        ValueError: on several devices; the ops want cache and tables on one.
    """
    first = None
    for i, layer in enumerate(layers):
        device = layer.self_attn.kv_a_layernorm.weight.device
        if device.type == "meta":
            for module in (layer.self_attn.kv_a_layernorm, layer.self_attn, layer):
                if (hook := aligning_hook(module)) and hook.offload:
                    device = torch.empty(0, device=hook.execution_device).device  # with its index
                    break
        if first is None:
            first = device
        elif device != first:
            raise ValueError(
                f"PagedCache: all layers must compute on one device, got layer 0 on {first} and "
                f"layer {i} on {device}; load the model with device_map={{'': '{first}'}} or call "
                "models.use_transformers(model)"
            )
    return first
