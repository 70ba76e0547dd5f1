"""Modules with stored weights, in place of linear layers and inside experts of transformers.

Shapes: T tokens, E experts, k experts of a token, I intermediate size.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import custom_pypto
from custom_pypto import layer_ops
from custom_pypto.weight_formats import WEIGHT_FORMATS, rounded_formats

from ..one_op import of_groups

#: name of the implementation of experts in transformers
EXPERTS = "custom_pypto"
EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")
SCALE = "_scale"
#: formats of weights whose layers can round what they multiply to int8, too
ROUNDING = ("int8", "int4", "fp4")
#: dtypes of new weights that :func:`round_plain_weights` rounds
ROUNDABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Layout(NamedTuple):
    """Shapes and dtypes of a stored weight."""

    shape: list[int]
    dtype: torch.dtype
    scale_shape: list[int] | None  # None: no scales
    scale_dtype: torch.dtype | None


def layout(kind: str, shape: list[int]) -> Layout:
    """How a weight ``[.., N, K]`` of this ``shape`` is stored in a module.

    A code for each value has one dim more, of size 1: a loop that copies plain weights by name then
    fails, which would cast them into codes.
    """
    form = WEIGHT_FORMATS[kind]
    if form.scale_dtype is None:
        return Layout(shape, form.dtype, None, None)
    codes = form.shape(shape) if form.codes > 1 else [*shape, 1]
    return Layout(codes, form.dtype, form.scale_shape(shape), form.scale_dtype)


def matrices(weight: Tensor) -> Tensor:
    """A stored weight ``[.., N, columns]``, as :func:`custom_pypto.weight_only_linear` takes it."""
    return weight.squeeze(-1)


class StoredLinear(nn.Module):
    """A linear layer whose weight is in one of ``WEIGHT_FORMATS``."""

    #: whether what the weight is multiplied by is rounded to int8, as the op does it
    int8_x = False

    def __init__(self, linear: nn.Linear, kind: str):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.kind = kind
        self.bias = linear.bias
        store(self, "weight", kind, list(linear.weight.shape))

    def forward(self, x: Tensor) -> Tensor:
        check_no_gradient(x, self.kind)
        own = self._parameters  # nn.Module's lookups are slow
        weight, scales = matrices(own["weight"]), own["weight_scale"]
        y = custom_pypto.weight_only_linear(x, weight, scales, int8_x=self.int8_x)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.kind}"


class StoredGroupedLinear(StoredLinear):
    """The same of a layer that :func:`is_grouped`."""

    def __init__(self, linear: nn.Linear, kind: str):
        super().__init__(linear, kind)
        self.n_groups = linear.n_groups

    def forward(self, x: Tensor) -> Tensor:
        check_no_gradient(x, self.kind)
        rows = self.n_groups, -1
        weight, scales = matrices(self.weight).unflatten(0, rows), self.weight_scale
        scales = None if scales is None else scales.unflatten(0, rows)
        return of_groups(x, weight, scales, self.int8_x)


def store(module: nn.Module, name: str, kind: str, shape: list[int]) -> None:
    """Gives ``module`` parameters for a stored weight of this shape and for its scales, on the meta
    device."""
    weight, scales = on_meta(kind, shape)
    setattr(module, name, nn.Parameter(weight, requires_grad=False))
    scales = None if scales is None else nn.Parameter(scales, requires_grad=False)
    module.register_parameter(name + SCALE, scales)


def on_meta(kind: str, shape: list[int]) -> tuple[Tensor, Tensor | None]:
    """Values and scales of a stored weight of this shape."""
    stored, scales = layout(kind, shape), None
    if stored.scale_shape is not None:
        scales = torch.empty(stored.scale_shape, dtype=stored.scale_dtype, device="meta")
    return torch.empty(stored.shape, dtype=stored.dtype, device="meta"), scales


def converted_state(model: nn.Module, kinds: dict[str, str]) -> dict[str, Tensor]:
    """The values and scales, on the meta device and by name, that :func:`convert` would give."""
    state = {}
    for name, kind in kinds.items():
        module = model.get_submodule(name)
        for weight in EXPERT_WEIGHTS if is_experts(module) else ("weight",):
            values, scales = on_meta(kind, list(module._parameters[weight].shape))
            state[f"{name}.{weight}"] = values
            if scales is not None:
                state[f"{name}.{weight}{SCALE}"] = scales
    return state


def check_no_gradient(x: Tensor, kind: str) -> None:
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(
            f"patched model: the input of a layer with weights in {kind} must not require a "
            "gradient, which these weights do not pass on; use torch.no_grad(), or train a model "
            "that was loaded with weights=None"
        )


def is_grouped(module: nn.Module) -> bool:
    """Whether ``module`` is block-diagonal, as a projection of DeepSeek-V4: each of ``n_groups``
    has features and rows of its own."""
    return isinstance(module, nn.Linear) and hasattr(module, "n_groups")


def is_experts(module: nn.Module) -> bool:
    """Whether transformers computes ``module`` by a function of :data:`ALL_EXPERTS_FUNCTIONS`, and
    its weights are those of :data:`EXPERT_WEIGHTS`."""
    own = module._parameters
    found = [own.get(name) for name in EXPERT_WEIGHTS]
    return all(x is not None and matrices(x).dim() == 3 for x in found) and (
        module.is_concatenated and not module.is_transposed and not module.has_bias
    )


def stored_experts(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """transformers' computation of experts ``self``, over stored weights.

    Args:
        hidden_states: ``[T, hidden]``.
        top_k_index: ``[T, k]``; E, of an expert on another rank, adds nothing.
        top_k_weights: ``[T, k]``.
    """
    if getattr(self, "kind", None) is None:  # a layer in a dtype that is not stored
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](self, hidden_states, top_k_index, top_k_weights)
    check_no_gradient(hidden_states, self.kind)

    up, down = (
        (matrices(getattr(self, name)), getattr(self, name + SCALE)) for name in EXPERT_WEIGHTS
    )
    int8_x = getattr(self, "int8_x", False)
    product = functools.partial(custom_pypto.weight_only_linear, int8_x=int8_x)
    return layer_ops.experts(
        hidden_states, up, down, top_k_index, top_k_weights, self._apply_gate, product
    )


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, stored_experts)


def convert(model: nn.Module, kinds: dict[str, str]) -> None:
    """Gives the modules of these names their format. They are on the meta device."""
    if kinds and not stored_parameters(model):
        model.register_load_state_dict_pre_hook(round_plain_weights)
    of_experts = False
    for name, kind in kinds.items():
        module = model.get_submodule(name)
        if not is_experts(module):
            parent, _, child = name.rpartition(".")
            stored = (StoredGroupedLinear if is_grouped(module) else StoredLinear)(module, kind)
            setattr(model.get_submodule(parent), child, stored)
            continue
        of_experts, module.kind = True, kind
        for weight in EXPERT_WEIGHTS:
            shape = list(module._parameters.pop(weight).shape)
            store(module, weight, kind, shape)
    if of_experts:
        model.set_experts_implementation(EXPERTS)


def round_activations(model: nn.Module) -> None:
    """Lets layers and experts round what they multiply to int8, if their format allows it."""
    for module in model.modules():
        if getattr(module, "kind", None) in ROUNDING:
            module.int8_x = True


def drop_experts(model: nn.Module, own: dict[str, int]) -> None:
    """Takes their stored weights from modules of experts, which get them elsewhere.

    Args:
        own: by name, how many of its experts this rank has.
    """
    for name, count in own.items():
        module = model.get_submodule(name)
        module.num_experts = count  # transformers would set it with the weights
        for weight in EXPERT_WEIGHTS:
            del module._parameters[weight]
            module._parameters.pop(weight + SCALE, None)
        module._is_hf_initialized = True  # else transformers would look for them


def round_plain_weights(model: nn.Module, state: dict[str, Tensor], prefix: str, *_) -> None:
    """Hook before ``model.load_state_dict``: rounds plain weights to the formats of the model, as
    when an updated model is loaded into a quantized one.

    Raises:
        ValueError: names the weight; nothing is loaded.
    """
    rounded = {}
    for name in stored_parameters(model):
        if name.endswith(SCALE):
            continue
        kind = model.get_submodule(name.rpartition(".")[0]).kind
        plain, stored = state.get(prefix + name), model.get_parameter(name)
        form = WEIGHT_FORMATS[kind]
        if form.scale_dtype is None or plain is None or plain.dtype not in ROUNDABLE:
            continue
        if not form.rounded:
            rounding = " or ".join(map(repr, rounded_formats()))
            raise ValueError(
                f"load_state_dict: {name} must be in {kind} with its scales, got {plain.dtype}; "
                f"load the model with weights={rounding}, which round new weights, or None"
            )
        shape = list(matrices(stored).shape)
        shape[-1] *= form.codes
        if list(plain.shape) != shape:
            raise ValueError(
                f"load_state_dict: {name} must be of shape {shape}, got {list(plain.shape)}"
            )
        values = layout(kind, shape)
        weight = torch.empty(values.shape, dtype=values.dtype, device="cpu")
        scales = torch.empty(values.scale_shape, dtype=values.scale_dtype, device="cpu")
        rows = plain.shape[:-1].numel()
        layer_ops.convert_weight(
            plain.flatten(0, -2).contiguous(),
            None,
            None,
            weight.view(rows, -1),
            scales.view(rows, *scales.shape[plain.ndim - 1 :]),
        )
        rounded |= {prefix + name: weight, prefix + name + SCALE: scales}
    state |= rounded


def stored_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters with values or scales of stored weights."""
    found = set()
    for name, module in model.named_modules():
        if getattr(module, "kind", None) is not None:
            weights = ["weight"] if isinstance(module, StoredLinear) else EXPERT_WEIGHTS
            both = {weight + end for weight in weights for end in ("", SCALE)}
            found |= {f"{name}.{one}" for one in both & module._parameters.keys()}
    return found
