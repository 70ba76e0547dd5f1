"""The GE graphs that torchair makes: how tests compile with torchair, see the graphs, check them.

torchair is imported by the functions, since only the tests on the host simulator of CANN have it.
"""

import contextlib
import ctypes
import functools
import inspect
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._decomp import get_decompositions

from custom_pypto.graph import prototypes
from custom_pypto.schemas import overload

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from modes import MODES  # noqa: E402

# written again and not imported from ge_executor: the tests must not share its mistakes
# where a protobuf attribute holds a value of each of GE's types that the prototypes use
FIELDS = {"VT_INT": "i", "VT_FLOAT": "f", "VT_STRING": "s", "VT_BOOL": "b", "VT_LIST_INT": "list"}
# arguments whose sizes are constants of a graph, as those of a module's parameters
WEIGHTS = ("w_dq", "w_uq_qr", "w_uk", "w_dkv_kr", "gamma_cq", "gamma_ckv")
WEIGHTS += ("w_idx_qb", "w_idx_k", "w_idx_proj", "in_gamma_k", "in_beta_k")
WEIGHTS += ("wq_b", "wq_b_scale", "wk", "weights_proj", "ln_gamma_k", "ln_beta_k")


def outputs(result) -> tuple[Tensor, ...]:
    return () if result is None else result if isinstance(result, tuple) else (result,)


@functools.cache
def prototypes_by_type() -> dict[str, prototypes.Prototype]:
    return {prototype.type: prototype for prototype in prototypes.prototypes()}


def repeat_interleave(tensor, repeats, dim=None, *, output_size=None):
    """In ops that torchair converts for GE; ``batched_mm`` experts call it."""
    dim %= tensor.dim()
    before, after = tensor.shape[: dim + 1], tensor.shape[dim + 1 :]
    return tensor.unsqueeze(dim + 1).expand(*before, repeats, *after).flatten(dim, dim + 1)


def backend(mode: str = MODES[0], settings: dict | None = None):
    """The ``torch.compile`` backend of a mode; ``settings`` by the path of their attribute."""
    import torchair

    if mode == "npugraph_ex":
        torchair.get_npu_backend()  # fails if it is called for the first time after such a graph
        return mode
    config = torchair.CompilerConfig()
    config.mode = mode
    for path, value in (settings or {}).items():
        *parents, name = path.split(".")
        setattr(functools.reduce(getattr, parents, config), name, value)
    return torchair.get_npu_backend(
        compiler_config=config,
        custom_decompositions={
            torch.ops.aten.repeat_interleave.self_int: repeat_interleave,
            # DeepSeek-V4's router calls it
            **get_decompositions([torch.ops.aten.softplus]),
        },
    )


def compiled(
    function: Callable, *, mode: str = MODES[0], settings: dict | None = None, dynamic: bool = False
) -> Callable:
    """``function`` compiled by torchair, as one graph."""
    options = {"options": settings} if mode == "npugraph_ex" and settings else {}
    made = backend(mode, settings)
    return torch.compile(function, backend=made, fullgraph=True, dynamic=dynamic, **options)


@contextlib.contextmanager
def converted() -> Iterator[list]:
    """The list of the graphs converted meanwhile, each as it is after all of torchair's passes."""
    from torchair._ge_concrete_graph.fx2ge_converter import GeConcreteGraph

    graphs = []
    optimize = GeConcreteGraph.optimize_graph_without_runtime

    def recorded(self, *args, **kwargs):
        optimize(self, *args, **kwargs)
        graphs.append(self.graph._proto)

    GeConcreteGraph.optimize_graph_without_runtime = recorded
    try:
        yield graphs
    finally:
        GeConcreteGraph.optimize_graph_without_runtime = optimize


class Seen:
    """What torchair made: GE graphs and the options that GE got with each, FX graphs to capture,
    and how often one was captured."""

    def __init__(self):
        self.ge, self.options, self.fx, self.captures = [], [], [], 0

    def counts(self):
        return len(self.ge), len(self.fx), self.captures


@contextlib.contextmanager
def watched():
    from npugraph_ex._acl_concrete_graph import acl_graph, fx2acl_converter
    from torchair._acl_concrete_graph import acl_graph as older
    from torchair._acl_concrete_graph import fx2acl_converter as older_converter
    from torchair.core._backend import TorchNpuGraph

    seen, undo = Seen(), pytest.MonkeyPatch()
    for converter in (fx2acl_converter, older_converter):

        def optimized(
            self, *args, made=converter.AclConcreteGraph.optimize_graph_without_runtime, **kwargs
        ):
            made(self, *args, **kwargs)
            seen.fx.append(self.fx_graph.graph)

        undo.setattr(converter.AclConcreteGraph, "optimize_graph_without_runtime", optimized)
    for graphs in (acl_graph, older):

        def captured(self, *args, capture=graphs.AclGraph.compile_for_graph_key, **kwargs):
            seen.captures += 1
            capture(self, *args, **kwargs)

        undo.setattr(graphs.AclGraph, "compile_for_graph_key", captured)

    def loaded(self, graph, options=None, load=TorchNpuGraph.load):
        seen.options.append(options)
        load(self, graph, options)

    undo.setattr(TorchNpuGraph, "load", loaded)
    try:
        with converted() as seen.ge:
            yield seen
    finally:
        undo.undo()


# what one graph is, as :meth:`Seen.counts`
ONE_GRAPH = {
    "max-autotune": (1, 0, 0),
    "reduce-overhead": (0, 1, 1),
    "npugraph_ex": (0, 1, 1),
}


def nodes(graph) -> list:
    """The nodes of this package's operators."""
    return [node for node in graph.op if node.type in prototypes_by_type()]


def differences_from_prototype(graph) -> list[str]:
    """What is not as the prototypes say about the nodes of this package's operators.

    GE finds inputs, outputs and attributes by name and order, and torchair compares neither.
    """
    found = []
    for node in nodes(graph):
        prototype = prototypes_by_type()[node.type]
        for what, got, expected in (
            ("inputs", node.input_desc, prototype.inputs),
            ("outputs", node.output_desc, prototype.outputs),
        ):
            names = [tensor.name for tensor in got]
            if names != [tensor.name for tensor in expected]:
                found.append(f"{node.type}: {what} {names}")
        fed = [source for source in node.input if not source.endswith(":-1")]  # control edges
        if len(fed) != len(node.input_desc):
            found.append(f"{node.type}: {len(fed)} edges")
        for source, tensor in zip(fed, prototype.inputs, strict=False):
            if not source and tensor.kind == "required":
                found.append(f"{node.type}: {tensor.name} is required and not fed")
        got = {
            name: attribute.WhichOneof("value")
            for name, attribute in node.attr.items()
            if not name.startswith("_")  # torchair's own
        }
        expected = {attribute.name: FIELDS[attribute.vt] for attribute in prototype.attributes}
        for name in sorted(got.keys() | expected.keys()):
            if got.get(name) != expected.get(name):
                found.append(
                    f"{node.type}: attribute {name} is {got.get(name)}, not {expected.get(name)}"
                )
    return found


def inferred_shapes(node, inputs: Sequence[Sequence[int] | None]) -> list[list[int]]:
    """The shapes of the outputs by the rule that torchair left on the node, as GE applies it.

    GE takes a size of an input as the value of a symbol, and rejects a rule in which it is an
    expression.
    """
    shapes = json.loads(node.attr["_inference_rule"].s)["shape"]
    symbols = {}
    for rule, sizes in zip(shapes["inputs"], inputs, strict=True):
        for dimension, size in zip(rule or (), sizes or (), strict=rule is not None):
            if dimension.isdigit():
                assert int(dimension) == size
            else:
                assert re.fullmatch(r"[sv]\d+", dimension), f"GE would reject {dimension}"
                assert symbols.setdefault(dimension, size) == size
    return [
        [eval(dim, {"__builtins__": {}}, symbols) for dim in dims] for dims in shapes["outputs"]
    ]


def split(inputs: dict) -> tuple[dict, dict]:
    """Tensors, and the rest."""
    tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
    return tensors, {name: x for name, x in inputs.items() if name not in tensors}


def run(function, tensors: dict) -> dict:
    """The result, and what the tensors hold after the call, of which ``function`` gets copies."""
    given = {
        name: torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="npu").copy_(x)
        for name, x in tensors.items()
    }
    for name in WEIGHTS:
        if name in given:
            torch._dynamo.mark_static(given[name])
    results = {f"result {i}": x.cpu() for i, x in enumerate(outputs(function(given)))}
    return results | {name: x.cpu() for name, x in given.items()}


@contextlib.contextmanager
def one_graph():
    """A list that will hold the graph of what is compiled meanwhile, into one graph in all.

    A warning is an error: torchair warns where it cannot infer shapes.
    """
    with (
        converted() as graphs,
        warnings.catch_warnings(),
        # sizes that are equal by chance are not the same size
        torch.fx.experimental._config.patch(use_duck_shape=False),
    ):
        warnings.simplefilter("error", UserWarning)
        # of torch_npu, about the memory of a tensor, once; spelled in two ways
        warnings.filterwarnings("ignore", message="Cannot create tensor with inter")
        # of torch_npu 2.10, in every compilation
        warnings.filterwarnings("ignore", message="After using .*set_deterministic_level")
        yield graphs
    assert len(graphs) == 1


def check(op: str, calls: list[dict], dynamic: bool = False):
    """One GE graph computes and writes in all calls, to the bit, what eager mode does.

    Returns the graph.
    """
    constants = split(calls[0])[1]

    def call(tensors):
        return getattr(torch.ops.custom_pypto, op)(**tensors, **constants)

    torch.compiler.reset()
    function = compiled(call, dynamic=dynamic)
    with one_graph() as graphs:
        for inputs in calls:
            tensors, same = split(inputs)
            assert same == constants
            expected, got = run(call, tensors), run(function, tensors)
            for name, x in expected.items():
                torch.testing.assert_close(
                    got[name], x, rtol=0, atol=0, equal_nan=True, msg=f"{op}: {name} differs"
                )
    return graphs[0]


# ---- torchair's callbacks ------------------------------------------------------------------------
#
# torchair writes C++ for ops without a converter: an operator's prototype for GE, and a class in
# which GE calls the op. It compiles with CANN's headers only; here the prototype is declared to the
# simulator, whose executor calls the op. The class is not tested.

PROTOTYPE = re.compile(r"^REG_OP\((\w+)\)\n(.*?)\.OP_END", re.M | re.S)
PORT = re.compile(r"\.(OPTIONAL_INPUT|INPUT|OUTPUT)\((\w+), ")
KINDS = {"INPUT": ("input", "required"), "OPTIONAL_INPUT": ("input", "optional")}
KINDS["OUTPUT"] = "output", "required"


def use_callbacks(monkeypatch, *ops: str) -> None:
    """Takes the converters of the ops away, for as long as ``monkeypatch`` holds."""
    custom_op_compiler = pytest.importorskip(
        "torchair._ge_concrete_graph.custom_op_compiler",
        reason="this torchair makes no callbacks, as that of torch_npu 2.10",
    )

    def load(code, name, has_cpp_ops=True):
        for type, ports in PROTOTYPE.findall(code):
            op = next(op for op in ops if f"custom_pypto__{op}" in type)
            _declare(monkeypatch, type, overload(op), PORT.findall(ports))

    monkeypatch.setattr(custom_op_compiler, "compile_and_load", load)
    for op in ops:
        monkeypatch.delattr(overload(op), "_ge_converter")


def _declare(monkeypatch, type: str, op, ports: list[tuple[str, str]]) -> None:
    from custom_pypto.simulation.ascend_host import ge_operators

    cann = ctypes.CDLL(None)
    for port, name in ports:
        part, kind = KINDS[port]
        cann.ascend_host_declare(*(text.encode() for text in (type, part, name, kind)))
    arguments = {x.name: x for x in op._schema.arguments}

    def compute(**inputs):
        return op(**{name: _value(x, arguments[name]) for name, x in inputs.items()})

    compute.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
        for port, name in ports
        if port != "OUTPUT"
    )
    monkeypatch.setitem(ge_operators.OPERATORS, type, compute)


def _value(fed: Tensor | None, argument):
    """As the C++ reads it: numbers and strings are inputs, too."""
    kind = argument.type.kind()
    if fed is None:
        return argument.default_value
    if kind == "StringType":
        return bytes(fed.tolist()).decode()
    return fed if kind in ("TensorType", "OptionalType") else fed.item()
