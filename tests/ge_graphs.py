"""The GE graphs that torchair makes: how tests compile with torchair, see the graphs, check them.

torchair is imported by the functions, since only the tests on the stand-in for CANN have it.
"""

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence

import torch

from custom_pypto.graph import prototypes

# written again and not imported from ge_executor: the tests must not share its mistakes
# where a protobuf attribute holds a value of each of GE's types that the prototypes use
FIELDS = {"VT_INT": "i", "VT_FLOAT": "f", "VT_STRING": "s", "VT_BOOL": "b"}


@functools.cache
def prototypes_by_type() -> dict[str, prototypes.Prototype]:
    return {prototype.type: prototype for prototype in prototypes.prototypes()}


def compiled(function: Callable, *, dynamic: bool = False) -> Callable:
    """``function`` compiled by torchair for GE (max-autotune), as one graph."""
    import torchair

    backend = torchair.get_npu_backend(compiler_config=torchair.CompilerConfig())
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)


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
