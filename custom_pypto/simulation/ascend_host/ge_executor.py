"""Runs the GE graphs that torchair converts, node by node, with torch on NPU tensors.

It replaces the interface between torchair and GE, ``torchair.core._backend.TorchNpuGraph``, and
runs the graph after all of torchair's passes.
Operators of this package call ``torch.ops.custom_pypto`` with the inputs and attributes of the node
only, others are in ``ge_operators``.
"""

import ctypes
import functools
import inspect
import keyword
import math
import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...descriptions import OPS
from ...graph import prototypes
from ...schemas import overload
from . import ge_operators
from .libraries import AscendHostError

# GE's name of an attribute's kind -> its field on a node
FIELDS = {"VT_INT": "i", "VT_FLOAT": "f", "VT_BOOL": "b", "VT_STRING": "s", "VT_LIST_INT": "list"}
DATA = ("Data", "RefData")  # inputs of a graph; the second kind may be written in place
DEVICE = 1  # torchair's number for an input on the NPU; 0 is the host


class Graph:
    """A converted graph, with the methods that torchair calls."""

    def __init__(self, name: str = ""):
        self.name = name

    def load(self, graph, options=None) -> None:
        self.definition = graph  # its op are the nodes

    def compile(self) -> None:
        self._nodes = [Node(definition) for definition in self.definition.op]

    def auto_tune(self, example_inputs=(), stream=None) -> None:
        pass

    def run(
        self, inputs: Sequence[Tensor], assigned_outputs: Sequence[Tensor | None] = (), stream=None
    ) -> list[Tensor]:
        """The outputs, written into the given tensors where there are any."""
        placements = self.definition.attr["_input_placements"].list.i
        for i, (tensor, place) in enumerate(zip(inputs, placements, strict=True)):
            if (tensor.device.type == "npu") is not (place == DEVICE):
                where = "the NPU" if place == DEVICE else "the host"
                raise AscendHostError(
                    f"ge_executor: input {i} of graph {self.name} must be on {where}, as torchair "
                    f"converted it, got {tensor.device}"
                )
        values: dict[str, Tensor | None] = {"": None}  # the empty name: an absent input
        for node in self._nodes:
            if late := [source for source in node.sources if source not in values]:
                raise node.error(f"stands before its input {late[0]} in the graph")
            fed = [values[source] for source in node.sources if not source.endswith(":-1")]
            if node.type == "NetOutput":
                break
            # values from the host are few and small, and GE copies them too
            data = node.type in DATA
            results = [inputs[node.attributes["index"]].npu()] if data else node.run(fed)
            values |= {f"{node.name}:{i}": result for i, result in enumerate(results)}
            values[f"{node.name}:-1"] = None  # where control edges begin
        targets = assigned_outputs or [None] * len(fed)
        # no output shares memory with an input, unless it is that input, written in place
        outputs = [
            value if value is to else value.clone() for value, to in zip(fed, targets, strict=True)
        ]
        return [
            value if to is None else to.copy_(value)
            for value, to in zip(outputs, targets, strict=True)
        ]


def install(cann: ctypes.CDLL) -> None:
    """Makes torchair run its graphs here; ``cann`` is the simulator's library."""
    import torchair.core._backend

    for type, prototype in _prototypes().items():
        for part, name, kind in (
            *(("input", tensor.name, tensor.kind) for tensor in prototype.inputs),
            *(("output", tensor.name, tensor.kind) for tensor in prototype.outputs),
            *(("attribute", attribute.name, attribute.vt) for attribute in prototype.attributes),
        ):
            cann.ascend_host_declare(*(text.encode() for text in (type, part, name, kind)))
    for type, (inputs, outputs, attributes) in ge_operators.PROTOTYPES.items():
        parts = [
            ("input", x.rstrip("?"), "optional" if x.endswith("?") else "required")
            for x in inputs.split()
        ]
        parts += [("output", name, "required") for name in outputs.split()]
        for attribute in attributes.split():
            name, _, kind = attribute.partition(":")
            parts.append(("attribute", name, f"VT_{kind}"))
        for part in parts:
            cann.ascend_host_declare(*(text.encode() for text in (type, *part)))
    torchair.core._backend.TorchNpuGraph = Graph


class Node:
    """A node; the constructor validates its type, and its names against the function that runs
    it."""

    def __init__(self, definition):
        self.name, self.type = definition.name, definition.type
        self.sources = list(definition.input)
        self.inputs = [tensor.name for tensor in definition.input_desc]
        self.outputs = list(definition.output_desc)
        self.attributes = {
            name: _value(attribute)
            for name, attribute in definition.attr.items()
            if not name.startswith("_")  # torchair's own
        }
        if self.type in _prototypes():
            self._require_names(definition.attr, _prototypes()[self.type])
            self.compute = self._ours(_prototypes()[self.type])
        elif self.type == "Const":
            constant = _constant(definition.attr["value"].t)
            self.compute = lambda: constant
        elif self.type in ge_operators.OPERATORS:
            self.compute = self._theirs(ge_operators.OPERATORS[self.type])
        elif self.type not in (*DATA, "NetOutput"):
            raise self.error(
                f"is of a type that is not run here; add it to OPERATORS in {ge_operators.__file__}"
            )

    def error(self, problem: str) -> AscendHostError:
        return AscendHostError(f"ge_executor: {self.type} node {self.name} {problem}")

    def run(self, fed: Sequence[Tensor | None]) -> list[Tensor]:
        """The outputs for these inputs."""
        inputs = dict(zip(self.inputs, fed, strict=True))
        # torch would promote; GE does not
        alike = {t.dtype for name, t in inputs.items() if re.fullmatch(r"x\d+|then|else", name)}
        if len(alike) > 1:
            raise self.error(f"must be fed inputs of one dtype, got {sorted(map(str, alike))}")
        found = self.compute(**inputs)
        new = iter(found if isinstance(found, tuple | list) else [found])
        results = []
        for output in self.outputs:
            # GE's tensors have no strides
            value = inputs[output.name] if output.name in inputs else next(new).contiguous()
            if not _fits(value, output.attr["_meta"].s.decode()):
                raise self.error(
                    f"computed {output.name} as {value.dtype} {list(value.shape)}, torchair "
                    f"expects {output.attr['_meta'].s.decode()}"
                )
            results.append(value)
        return results

    def _require_names(self, attributes, prototype: prototypes.Prototype) -> None:
        """Validates that the node has exactly the names of the prototype, in order."""
        kinds = {name: attributes[name].WhichOneof("value") for name in self.attributes}
        for what, got, expected in (
            ("inputs", self.inputs, [tensor.name for tensor in prototype.inputs]),
            ("outputs", [o.name for o in self.outputs], [o.name for o in prototype.outputs]),
            ("attributes", kinds, {a.name: FIELDS[a.vt] for a in prototype.attributes}),
        ):
            if got != expected:
                raise self.error(f"must have the {what} of its prototype, {expected}, got {got}")

    def _ours(self, prototype: prototypes.Prototype) -> Callable:
        op = overload(prototype.op)
        required = [tensor.name for tensor in prototype.inputs if tensor.kind == "required"]
        attributes = dict(self.attributes)
        for name, value in OPS[prototype.op].absent.items():
            if attributes[name] == (list(value) if isinstance(value, tuple) else value):
                attributes[name] = None

        def compute(**inputs):
            if missing := [name for name in required if inputs[name] is None]:
                raise self.error(f"must be fed its required input {missing[0]}")
            return op(**inputs, **attributes)

        return compute

    def _theirs(self, function: Callable) -> Callable:
        signature = inspect.signature(function)

        def arguments(inputs: dict) -> dict:
            found = {}
            for name, value in inputs.items():
                if name in signature.parameters:
                    found[name] = value
                elif keyword.iskeyword(name):
                    found[name + "_"] = value
                else:  # one of a dynamic input: x0, x1, ...
                    found.setdefault(name.rstrip("0123456789"), []).append(value)
            return found | self.attributes

        try:
            signature.bind(**arguments(dict.fromkeys(self.inputs)))
        except TypeError as mismatch:
            raise self.error(f"does not fit its function in OPERATORS: {mismatch}") from None
        for name, value in self.attributes.items():
            only = signature.parameters[name].default
            if only not in (inspect.Parameter.empty, value):
                raise self.error(f"must have {name}={only} to be run here, got {value}")
        return lambda **inputs: function(**arguments(inputs))


@functools.cache
def _prototypes() -> dict[str, prototypes.Prototype]:
    return {prototype.type: prototype for prototype in prototypes.prototypes()}


def _value(attribute):
    field = attribute.WhichOneof("value")
    value = getattr(attribute, field)
    if field == "list":
        return next((list(v) for f in "ifbs" if len(v := getattr(value, f))), [])
    return value.decode() if field == "s" else value


def _constant(tensor) -> Tensor:
    """On the NPU; a string as its bytes, since torch has no tensors of strings."""
    from torchair.ge import DataType
    from torchair.ge._ge_graph import _ge_proto_dtype_to_ge_dtype

    shape = torch.Size(tensor.desc.shape.dim)
    number = _ge_proto_dtype_to_ge_dtype(tensor.desc.dtype)
    if number == DataType.DT_STRING:
        return torch.tensor(list(tensor.data), dtype=torch.uint8).npu()
    dtype = ge_operators.dtype_of(number)
    if shape.numel() == 0:
        return torch.empty(shape, dtype=dtype, device="npu")
    data = torch.frombuffer(bytearray(tensor.data), dtype=dtype, count=shape.numel())
    return data.reshape(shape).npu()


def _fits(value: Tensor, meta: str) -> bool:
    """Whether a value has the dtype and shape that torchair noted from Meta; unknown sizes match
    all.

    Its note of a node before a view has the shape after the view, so elements are counted.
    """
    noted = re.fullmatch(r"Tensor\(dtype=(.*), shape=torch.Size\(\[(.*)\]\)", meta)
    if noted is None:
        return True
    sizes = noted[2].split(", ") if noted[2] else []
    known = all(size.isdigit() for size in sizes)
    return str(value.dtype) == noted[1] and (
        not known or math.prod(map(int, sizes)) == value.numel()
    )
