"""Decoder layers compiled for the steps of ``generate()``: one graph for all layers of a kind.

A compiled layer gets its rows as an argument (:attr:`.Step.layer`), so that nothing in the graph
depends on the number of the layer.
"""

import copy
from contextvars import ContextVar

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch.nn.modules.module import _has_any_global_hook
from transformers import CompileConfig, GenerationConfig

from . import calls
from .cache import Step
from .patched import patched_attentions, text_model

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
    text = text_model(model)
    regions = text._custom_pypto.regions
    if regions is None or regions.config != compile_config:
        text._custom_pypto.regions = regions = Regions(text, compile_config)
    regions.reach()

    def call(*args, **kwargs):
        token = _of_call.set(regions)
        try:
            with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS):
                return model(*args, **kwargs)
        finally:
            _of_call.reset(token)

    return call


class Regions:
    """Compiles the layers of a text model as ``config`` says.

    Where mode is ``"reduce-overhead"``, CompileConfig's default, a graph calls its kernels from
    C++: CPUs have no CUDA graphs, for which the mode stands elsewhere.
    """

    def __init__(self, text: nn.Module, config: CompileConfig):
        self.text, self.config = text, copy.copy(config)
        options = config.to_dict()
        if options["mode"] == "reduce-overhead" and options["backend"] == "inductor":
            own = {"cpp_wrapper": True, "cpp.min_chunk_size": FEWEST_ELEMENTS}
            # values in 16 bits round as in eager layers
            own["emulate_precision_casts"] = text._custom_pypto.batch_invariant
            options |= {"mode": None, "options": {**own, **(config.options or {})}}
        self.call = torch.compile(call_layer, **options)

    def reach(self) -> None:
        """Lets the layers look for their regions, but those that are compiled already."""
        for i, attention in patched_attentions(self.text).items():
            layer = self.text.layers[i]
            own = isinstance(found := layer._compiled_call_impl, LayerCall)
            if own or (found is None and not isinstance(layer, OptimizedModule)):
                layer._compiled_call_impl = LayerCall(self.text, layer, attention)

    @staticmethod
    def leave(text) -> None:
        for layer in text.layers:
            if isinstance(layer._compiled_call_impl, LayerCall):
                layer._compiled_call_impl = None


# of the forward that this thread is in
_of_call: ContextVar[Regions | None] = ContextVar("custom_pypto.regions", default=None)


class LayerCall:
    """What torch calls in place of ``nn.Module._call_impl``.

    A graph has no hooks: torch guards on none, and so a layer would run those of the layer from
    which the graph was made. And a recorded or replayed selection is of one layer alone. Such
    layers run as they are.
    """

    def __init__(self, text: nn.Module, layer: nn.Module, attention: nn.Module):
        self.text, self.layer, self.attention = text, layer, attention
        kinds = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
        #: of every module, and filled by every later hook
        self.hooks = [vars(module)[kind] for module in layer.modules() for kind in kinds]

    def __call__(self, *args, **kwargs):
        regions = None if torch.compiler.is_compiling() else _of_call.get()
        step = kwargs.get("attention_mask")
        compiles = regions is not None and regions.text is self.text and isinstance(step, Step)
        if not compiles or calls.NAME in kwargs or any(self.hooks) or _has_any_global_hook():
            return self.layer._call_impl(*args, **kwargs)
        kwargs["attention_mask"] = step._replace(layer=step.layer_of(self.attention))
        return regions.call(self.layer, args, kwargs)


def call_layer(layer: nn.Module, args: tuple, kwargs: dict):
    return layer._call_impl(*args, **kwargs)
