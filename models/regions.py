"""Decoder layers compiled for the steps of ``generate()``: one graph for all layers of a kind.

A compiled layer gets its rows as an argument (:attr:`.Step.layer`), so that nothing in the graph
depends on the number of the layer.

In its first step Dynamo finds the graph of a layer, by some hundred guards. They take a millisecond
where the weights of the layer before have left nothing of them in the CPU's caches. So a later step
runs the same graph without them, as long as :class:`Known` finds all that they can depend on.
"""

import copy
import functools
import hashlib
from contextvars import ContextVar
from itertools import chain
from operator import is_
from types import CodeType, FunctionType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import GlobalStateGuard
from torch._dynamo import OptimizedModule
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.eval_frame import skip_code
from torch.nn.modules.module import _has_any_global_hook
from transformers import CompileConfig, GenerationConfig

from . import calls
from .cache import Step
from .cache.store import PagedLayer
from .memory import is_transformed
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
    steps = Steps(regions)

    def call(*args, **kwargs):
        token = _of_call.set(steps)
        try:
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


class Known(NamedTuple):
    """The graph of a layer in the steps of one ``generate()``, and what it depends on: modules by
    all of their attributes, tensors that come with a step by their metadata."""

    graph: FunctionType
    inputs: tuple
    rows: PagedLayer
    state: GlobalStateGuard  # of torch: gradients, autocast, threads
    modules: list[nn.Module]
    types: list[type]
    attributes: list  # views of the values of dicts
    values: list

    @classmethod
    def of(
        cls, graph: FunctionType, inputs: tuple, rows: PagedLayer, layer: nn.Module, config
    ) -> "Known":
        dicts = [vars(config), vars(rows), rows.pools, rows.tables, rows.layouts]
        modules = list(layer.modules())
        for module in modules:
            dicts += vars(module), module._parameters, module._buffers, module._modules
        views = [attributes.values() for attributes in dicts]
        views.append((_END,))
        values, types = list(chain(*views)), list(map(type, modules))
        return cls(graph, inputs, rows, GlobalStateGuard(), modules, types, views, values)

    def fits(self, inputs: tuple, rows: PagedLayer) -> bool:
        same = rows is self.rows and inputs == self.inputs and self.state.check()
        if not same or torch._C._len_torch_function_stack() or is_transformed():
            return False
        same = all(map(is_, map(type, self.modules), self.types))
        return same and all(map(is_, chain(*self.attributes), self.values))


# behind the last value: one more or fewer is not the same
_END = object()


def described(x):
    """What of an input of a layer graphs depend on, for a comparison."""
    if isinstance(x, Tensor):
        place = x.shape, x.stride(), x.storage_offset(), x.device
        return type(x), x.dtype, x.requires_grad, x.is_inference(), *place
    if isinstance(x, tuple):
        return type(x), *map(described, x)
    if isinstance(x, dict):
        return *x, *map(described, x.values())
    return x


@functools.cache
def schemas() -> str:
    """Of all ops, as a digest: the C++ of graphs that torch keeps on the disk calls ops by the
    arguments that they had."""
    found = (str(x) for x in torch._C._jit_get_all_schemas() if x.name.startswith("custom_pypto"))
    return hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()


class Steps:
    """The steps of one ``generate()``, whose layers are compiled."""

    def __init__(self, regions: Regions):
        self.regions = regions
        self.known: dict[LayerCall, Known] = {}
        # the last layer's arguments by name, described: those of a step are the same objects
        self.latest: tuple[list, tuple] = [], ()

    def described(self, args: tuple, kwargs: dict) -> tuple:
        """Inputs of a layer."""
        values, (before, inputs) = [*kwargs, *kwargs.values()], self.latest
        if len(values) != len(before) or not all(map(is_, values, before)):
            inputs = described(kwargs)
            self.latest = values, inputs
        return described(args), inputs

    def run(self, call: "LayerCall", args: tuple, kwargs: dict):
        step = kwargs["attention_mask"]
        rows = step.layer_of(call.attention)
        inputs = *self.described(args, kwargs), described(rows.selection.indices)
        kwargs["attention_mask"] = step._replace(layer=rows)
        if (known := self.known.get(call)) is not None and known.fits(inputs, rows):
            return known.graph(call.layer, args, kwargs)
        _latest.set(None)
        tag = f"{torch.compiler.config.cache_key_tag}custom_pypto {schemas()}"
        with (
            torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS),
            torch.compiler.config.patch(cache_key_tag=tag),
        ):
            result = self.regions.call(call.layer, args, kwargs)
        if (graph := _latest.get()) is not None:
            self.known[call] = Known.of(graph, inputs, rows, call.layer, call.text.config)
        return result


# of the forward that this thread is in
_of_call: ContextVar[Steps | None] = ContextVar("custom_pypto.steps", default=None)
# which Dynamo last ran in this thread
_latest: ContextVar[FunctionType | None] = ContextVar("custom_pypto.graph", default=None)


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
        steps = None if torch.compiler.is_compiling() else _of_call.get()
        step = kwargs.get("attention_mask")
        compiles = steps is not None and steps.regions.text is self.text and isinstance(step, Step)
        if not compiles or calls.NAME in kwargs or any(self.hooks) or _has_any_global_hook():
            return self.layer._call_impl(*args, **kwargs)
        return steps.run(self, args, kwargs)


def call_layer(layer: nn.Module, args: tuple, kwargs: dict):
    return layer._call_impl(*args, **kwargs)


class Noted:
    """What Dynamo's code calls in place of what a backend compiled: notes the code."""

    def __init__(self, compiled, code: CodeType):
        self.compiled = compiled
        self.graph = FunctionType(code, call_layer.__globals__)

    def __call__(self, *args):
        _latest.set(self.graph)
        return self.compiled(*args)


skip_code(Noted.__call__.__code__)  # Dynamo of torch 2.10 would compile it


def note(code: CodeType, dynamo_code: CodeType) -> None:
    """Gets each function that Dynamo compiles, and the code that it made."""
    if code is not call_layer.__code__:
        return
    compiled = [name for name in dynamo_code.co_names if name.startswith("__compiled_fn")]
    # a layer with graph breaks goes on in code that Dynamo has to find
    if len(compiled) == 1 and not any("resume" in name for name in dynamo_code.co_names):
        own = call_layer.__globals__
        own[compiled[0]] = Noted(own[compiled[0]], dynamo_code)


register_bytecode_hook(note)
