"""The modules whose ``forward`` a patched layer never calls, such as ``kv_b_proj`` and the indexer.

Absorption reads the weight of ``kv_b_proj``, and the ops replace the indexer's forward. Additions
to either module, such as adapters or hooks, must be part of the weight, or are rejected before
anything runs.
"""

from contextlib import AbstractContextManager, nullcontext
from types import MethodType

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import type_before_parametrizations
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

from .foreign_weights import exclusion, quantizer_of, quantizes_weight_alone

# modules of transformers' wrappers for ranks' heads and widths, and for their experts
WRAPPERS = {
    type(ALL_PARALLEL_STYLES[style]).__module__ for style in ("rowwise", "ep_dispatch_experts")
}
# by name, since peft need not be installed
LORA = ("peft.tuners.lora.layer", "Linear")


def check_absorbed(layer: int, projection: nn.Module) -> None:
    """Rejects a ``kv_b_proj`` with additions that absorption would bypass.

    Raises:
        TypeError: names the layer, the addition and the remedy.
    """
    if found := obstacle(projection):
        raise TypeError(
            f"use_custom_pypto: kv_b_proj of layer {layer} must be a plain torch.nn.Linear (its "
            f"weight is absorbed, its forward never called), got {found}; {remedy(projection)}, or "
            "call models.use_transformers(model)"
        )


def check_adapters_of_ranks(layer: int, attention: nn.Module) -> None:
    """Rejects adapters on modules that ranks share by heads: each would add its rank's part alone.

    Raises:
        TypeError: names the layer, the module and the remedy.
    """
    for name, module in attention._modules.items():
        base = None if module is None else module._modules.get("base_layer")
        if base is None:
            continue
        if is_sharded(base) or isinstance(base._parameters.get("weight"), DTensor):
            raise TypeError(
                f"use_custom_pypto: the {name} of layer {layer} must have no adapter while ranks "
                f"share its heads (tensor_parallel), got {described(module)}; leave it out of the "
                "adapter's target_modules, or load with expert_parallel=True alone"
            )


def check_replaced(layer: int, name: str, module: nn.Module, cls: type) -> None:
    """Rejects a module with additions to the forward that an op replaces.

    Raises:
        TypeError: names the layer, the addition and the remedy.
    """
    if type(module) is not cls or wrapped(module):
        raise TypeError(
            f"use_custom_pypto: the {name} of layer {layer} must be a plain {cls.__name__} (an op "
            f"replaces its forward), got {described(module)}; restore it, or call "
            "models.use_transformers(model)"
        )


def weight_of(projection: nn.Module) -> Tensor:
    """The effective weight of a ``kv_b_proj`` that :func:`check_absorbed` accepts, ``[H * (nope +
    v), L]``, including its adapters, for the heads of this rank."""
    if not is_lora(projection):
        with brought_in(projection):
            weight = projection.weight  # outlives accelerate's offloading of the parameter
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


def ranks_of(projection: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that share the heads of a ``kv_b_proj``; None: this one has all."""
    if is_lora(projection):
        return ranks_of(projection.base_layer)
    weight = projection.weight
    if not isinstance(weight, DTensor):
        return None
    mesh = weight.device_mesh
    return mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")


def quantized_by(projection: nn.Module) -> str | None:
    """The library that has quantized the weight of ``projection``, if a plain weight gives the same
    outputs; None for all others."""
    library = quantizer_of(projection)
    if library is None or not quantizes_weight_alone(projection, library):
        return None
    if wrapped(projection) or projection._parameters["bias"] is not None:
        return None
    return None if projection.weight.device.type == "meta" else library  # offloaded


def remedy(projection: nn.Module) -> str:
    """What a user does about an :func:`obstacle`."""
    library = quantizer_of(projection)
    if library is None:
        return "dequantize it, merge its adapter (merge_and_unload), remove its hook"
    if quantized_by(projection):  # after the patch, which would have replaced it
        return "call models.use_custom_pypto(model) again, which dequantizes it"
    return exclusion(library)


def obstacle(projection: nn.Module) -> str | None:
    """Why ``projection`` does more than multiply by its weight, or None."""
    if type(projection) is not nn.Linear:
        if is_lora(projection):
            return lora_obstacle(projection)
        if type_before_parametrizations(projection) is not nn.Linear:
            return described(projection)
    if wrapped(projection):
        return described(projection)
    if projection._parameters["bias"] is not None:
        return "one with a bias"
    weight = projection._parameters.get("weight")  # missing if parametrized
    if type(weight) is not nn.Parameter and is_traceable_wrapper_subclass(weight):
        if isinstance(weight, DTensor):
            return None
        found = f"one with a {type(weight).__name__}"
        if quantizer_of(projection) == "torchao" and not quantized_by(projection):
            found += " that does not quantize the weight alone"
        return found
    return None


def lora_obstacle(projection: nn.Module) -> str | None:
    if wrapped(projection):
        return described(projection)
    if projection.disable_adapters or projection.merged:
        return obstacle(projection.base_layer)
    for adapter in active_adapters(projection):
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
    """Whether a hook or a replaced ``forward`` makes ``module`` do more than its class."""
    state = module.__dict__  # runs for every layer in every forward, and attributes are slower
    if state["_forward_hooks"] or state["_forward_pre_hooks"]:
        return True
    if state["_backward_hooks"] or state["_backward_pre_hooks"]:
        return True
    return "forward" in state and has_other_forward(module)


def hooks_of(module: nn.Module) -> str | None:
    """The kind of hooks that a call of ``module`` would run; None without."""
    if module._forward_hooks or module._forward_pre_hooks:
        return "forward"
    return "backward" if module._backward_hooks or module._backward_pre_hooks else None


def has_other_forward(module: nn.Module) -> bool:
    """Whether ``forward`` is replaced, other than by accelerate's loading of weights or by
    transformers' sharding."""
    forward = module.__dict__.get("forward")
    if forward is None:
        return False
    if hook := aligning_hook(module):
        outer, inner = getattr(forward, "func", forward), module._old_forward
        accelerates = outer.__module__ == type(hook).__module__
        return not accelerates or getattr(inner, "__func__", None) is not type(module).forward
    return not is_of_ranks(forward)


def is_of_ranks(forward) -> bool:
    """Whether this ``forward`` is transformers' wrapper for a module with sharded weights."""
    return forward.__module__ in WRAPPERS


def is_sharded(module: nn.Module) -> bool:
    return "forward" in vars(module) and is_of_ranks(module.forward)


def aligning_hook(module: nn.Module):
    """accelerate's hook on ``module``, if it only moves inputs and weights to the device."""
    if "_hf_hook" not in module.__dict__:
        return None
    from accelerate.hooks import AlignDevicesHook  # may be missing if nothing is hooked

    return module._hf_hook if type(module._hf_hook) is AlignDevicesHook else None


def brought_in(module: nn.Module) -> AbstractContextManager:
    """Inside, the parameters of ``module`` are on its compute device."""
    if aligning_hook(module) is None:
        return nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(module)


def described(module: nn.Module) -> str:
    name = type(module).__name__
    if type(module) is not nn.Linear:
        name += f" of {type(module).__module__}"  # most substitutes are called Linear, too
    if found := hooks_of(module):
        return f"{name} with a {found} hook"
    return f"{name} with a replaced forward" if has_other_forward(module) else name


def change_class(module: nn.Module, cls: type) -> None:
    """Sets the class of ``module``, and the ``forward`` under accelerate's hook or under
    transformers' wrapper for sharded parameters."""
    sharded = is_sharded(module)
    if sharded:
        del module.forward
    module.__class__ = cls
    if sharded:
        from transformers.distributed.tensor_parallel import LocalParamsParallel  # since 5.23

        LocalParamsParallel().install_forward(module, None)
    if "_old_forward" in module.__dict__:
        module._old_forward = MethodType(cls.forward, module)
