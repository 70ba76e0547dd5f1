"""Routed experts that contexts follow or replace.

The MoE of transformers calls its router with hidden states alone. So the decoder layer, which gets
the contexts, runs with a router in place of its own that asks them, and takes what it needs from
the other: its logits, with their gradients.

Shapes: B batch, S new tokens, T = B * S, E experts, k experts of a token.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from . import calls
from .one_op import Mixin
from .patched import is_mtp


class LayerRouter(NamedTuple):
    """The router of a decoder layer."""

    name: str  # in the layer
    #: what the MoE calls: transformers' router, or somebody's wrapper around it
    called: nn.Module
    inside: nn.Module


class RoutedLayer(Mixin):
    """For decoder layers: contexts see the experts of its tokens, or choose them."""

    is_routed_layer = True

    def forward(self, *args, **kwargs):
        around = kwargs.get(calls.NAME)
        if around is None or not any(context.routed for context in around.contexts):
            return super().forward(*args, **kwargs)
        return self.forward_among(around, args, kwargs)

    @torch.compiler.disable(reason="a graph knows no contexts of Python's threads")
    def forward_among(self, around: calls.Around, args: tuple, kwargs: dict):
        layer = self
        if (router := router_of(self)) is not None:
            layer = calls.with_other(self, router.name, AskingRouter(self, router, around))
        return super(RoutedLayer, layer).forward(*args, **kwargs)

    @staticmethod
    def scores(router: nn.Module, logits: Tensor) -> Tensor:
        """What the experts' weights are made of."""
        return logits.sigmoid()


class SoftmaxLayer(RoutedLayer):
    """The same of Mistral Large 4."""

    @staticmethod
    def scores(router: nn.Module, logits: Tensor) -> Tensor:
        return logits.softmax(-1)


class AskingRouter(nn.Module):
    """Stands in for the ``router`` of a ``layer``: experts may be given, and are handed on."""

    def __init__(self, layer: RoutedLayer, router: LayerRouter, around: calls.Around):
        super().__init__()
        # in a tuple: not as parts of this module
        self.asked = layer, router, around

    def forward(self, hidden_states: Tensor, *others: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        layer, router, (contexts, step) = self.asked
        logits, weights, experts = router.called(hidden_states, *others)
        shape, given = hidden_states.shape[:2], None
        contexts = [context for context in contexts if layer in context.routed]
        for context in contexts:
            asked = context.given_experts(context.routed[layer], step)
            given = given if asked is None else asked
        if given is not None:
            given = given.to(experts.device, experts.dtype).flatten(0, 1)
            # the op that routes a few tokens rounds otherwise than torch
            same = (given == experts).all(-1, keepdim=True)
            scores = layer.scores(router.inside, logits)
            weights = torch.where(same, weights, weights_of(router.inside, scores, given))
            experts = given
        for context in contexts:
            context.taken_experts(context.routed[layer], step, experts.unflatten(0, shape))
        return logits, weights, experts


def weights_of(router: nn.Module, scores: Tensor, experts: Tensor) -> Tensor:
    """The weights ``[T, k]`` of these experts, as transformers makes them of ``[T, E]`` scores."""
    weights = scores.gather(1, experts)
    if getattr(router, "norm_topk_prob", True):  # others always divide
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * router.routed_scaling_factor


def router_of(layer: nn.Module) -> LayerRouter | None:
    """The router of a decoder layer; None: it has no routed experts."""
    for name, called in layer.named_modules():
        if name.rpartition(".")[2] == "gate":
            for inside in called.modules():
                if "routed_scaling_factor" in vars(inside):
                    return LayerRouter(name, called, inside)
    return None


def routed_layers(caller: str, text) -> dict[nn.Module, int]:
    """The decoder layers of a patched :func:`text_model` that have routed experts, with their
    numbers.

    Raises:
        TypeError: a layer that :func:`models.use_custom_pypto` did not reach.
        ValueError: the model is batch-invariant.
    """
    if text._custom_pypto.batch_invariant:
        raise ValueError(
            f"{caller}: experts must be False for a batch-invariant model, whose routers choose "
            "alike in rollouts and in training, got True; omit it, or patch the model without "
            "batch_invariant"
        )
    found = {}
    for i, outermost in enumerate(text.layers):
        # not by an attribute: torch's checkpoint_wrapper has those of the layer inside
        layer = next((x for x in outermost.modules() if "self_attn" in x._modules), outermost)
        if router_of(layer) is None or is_mtp(layer.self_attn):
            continue
        hooked = "forward" in vars(layer) and "_old_forward" not in vars(layer)
        if not hasattr(type(layer), "is_routed_layer") or hooked:
            raise TypeError(
                f"{caller}: layer {i} must be one that models.use_custom_pypto patched, to have "
                f"its routed experts, got {type(layer).__module__}.{type(layer).__qualname__} or a "
                "replaced forward; patch before wrapping, or pass experts=False"
            )
        found[layer] = i
    return found
