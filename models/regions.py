"""Decoder layers compiled for the steps of ``generate()``: one graph for all layers of a kind.

A compiled layer gets its rows as an argument (:attr:`.Step.layer`), so that nothing in the graph
depends on the number of the layer.
"""

import copy
from dataclasses import dataclass

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from transformers import CompileConfig, GenerationConfig

from .cache import Step
from .patched import patched_attentions, text_model

#: argument of a forward whose layers are compiled
NAME = "custom_pypto_regions"
# all layers of all models in a process share a function of Dynamo's. A graph is for a kind of
# layers, sizes of a cache that are fixed or symbolic, and a mode of autograd
MOST_GRAPHS = 64
# elements for which a generated kernel takes a second thread; Inductor's 512 take longer to share
FEWEST_ELEMENTS = 1 << 16


def compiles_layers(model, config: CompileConfig | None) -> bool:
    """Whether ``generate()`` with this ``compile_config`` compiles layers: on a CPU, where
    transformers compiles nothing, unless it is told to compile the whole forward."""
    on_cpu = config is not None and model.device.type == "cpu"
    return on_cpu and not config._compile_all_devices


def valid_auto_compile_criteria(
    model, model_kwargs: dict, generation_config: GenerationConfig
) -> bool:
    """Whether a decode step of ``generate()`` is compiled."""
    if compiles_layers(model, config := generation_config.compile_config):
        generation_config, config = copy.copy(generation_config), copy.copy(config)
        config._compile_all_devices = True
        generation_config.compile_config = config
    return type(model)._valid_auto_compile_criteria(model, model_kwargs, generation_config)


def get_compiled_call(model, compile_config: CompileConfig | None):
    """The call of ``model`` in a compiled decode step of ``generate()``."""
    if not compiles_layers(model, compile_config):
        return type(model).get_compiled_call(model, compile_config)
    patch = text_model(model)._custom_pypto
    if patch.regions is None or patch.regions.config != compile_config:
        patch.regions = Regions(compile_config)
    patch.regions.reach(text_model(model))

    def call(*args, **kwargs):
        with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS):
            return model(*args, **kwargs, **{NAME: patch.regions})

    return call


class Regions:
    """Compiles layers as ``config`` says.

    Where mode is ``"reduce-overhead"``, CompileConfig's default, a graph calls its kernels from
    C++: CPUs have no CUDA graphs, for which the mode stands elsewhere.
    """

    def __init__(self, config: CompileConfig):
        self.config = copy.copy(config)
        options = config.to_dict()
        if options["mode"] == "reduce-overhead" and options["backend"] == "inductor":
            own = {"cpp_wrapper": True, "cpp.min_chunk_size": FEWEST_ELEMENTS}
            options |= {"mode": None, "options": {**own, **(config.options or {})}}
        self.call = torch.compile(call_layer, **options)

    @staticmethod
    def reach(text) -> None:
        """Lets the layers of a text model look for their regions, but those that are compiled
        already."""
        for i, attention in patched_attentions(text).items():
            layer = text.layers[i]
            if layer._compiled_call_impl is None and not isinstance(layer, OptimizedModule):
                layer._compiled_call_impl = LayerCall(layer, attention)

    @staticmethod
    def leave(text) -> None:
        for layer in text.layers:
            if isinstance(layer._compiled_call_impl, LayerCall):
                layer._compiled_call_impl = None


@dataclass
class LayerCall:
    """What torch calls in place of ``nn.Module._call_impl``."""

    layer: nn.Module
    attention: nn.Module

    def __call__(self, *args, **kwargs):
        step = kwargs.get("attention_mask")
        # a recorded or replayed selection is of this layer alone
        if not isinstance(step, Step) or step.regions is None or "attend" in vars(self.attention):
            return self.layer._call_impl(*args, **kwargs)
        _, rows = step.of_call(self.attention)
        kwargs["attention_mask"] = step._replace(layer=rows, regions=None)
        return step.regions.call(self.layer, args, kwargs)


def call_layer(layer: nn.Module, args: tuple, kwargs: dict):
    return layer._call_impl(*args, **kwargs)
