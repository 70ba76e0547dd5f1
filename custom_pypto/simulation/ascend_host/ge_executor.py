"""Runs the GE graphs that torchair converts, node by node, with torch on NPU tensors.

It replaces the interface between torchair and GE, ``torchair.core._backend.TorchNpuGraph``, and
runs the graph after all of torchair's passes.

To run one more type of GE operator, give it a line in ``OPERATORS``. Operators of this package need
none: they call ``torch.ops.custom_pypto`` with the inputs and attributes of the node only.
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
from .libraries import AscendHostError


def _ints(values: Tensor) -> list[int]:
    return values.flatten().tolist()  # GE takes a scalar for one value


def _gather(x, indices, axis, is_preprocessed, negative_index_support, batch_dims=0):
    axis = axis.item() % x.dim()
    rows = x.index_select(axis, indices.flatten().long())
    return rows.reshape(x.shape[:axis] + indices.shape + x.shape[axis + 1 :])


def _gather_rows(
    x, indices, validate_indices, is_preprocessed, negative_index_support, batch_dims=0
):
    return x[indices.long()]


def _index(x, indices, indices_mask):
    given = iter(indices)
    return x[tuple(next(given).long() if mask else slice(None) for mask in indices_mask)]


def _layer_norm(x, normalized_shape, gamma, beta, epsilon):
    y, *statistics = torch.native_layer_norm(x, _ints(normalized_shape), gamma, beta, epsilon)
    return y, *(statistic.float() for statistic in statistics)


def _linear(x1, x2, bias, transpose_x1, transpose_x2):
    y = _matmul(x1, x2, transpose_x1, transpose_x2)
    return y if bias is None else y + bias


def _matmul(x1, x2, adj_x1, adj_x2):
    return torch.matmul(x1.mT if adj_x1 else x1, x2.mT if adj_x2 else x2)


def _reduce_mean(x, axes, keep_dims, noop_with_empty_axes):
    if noop_with_empty_axes and axes.numel() == 0:
        return x
    return x.mean(_ints(axes), keep_dims)  # torch, too, reduces all axes if none are given


def _scatter_nd_update(var, indices, updates, use_locking):
    torch.ops.npu.npu_scatter_nd_update_(var, indices, updates)
    return ()


def _slice(
    x,
    begin,
    end,
    axes,
    strides,
    begin_mask=0,
    end_mask=0,
    ellipsis_mask=0,
    new_axis_mask=0,
    shrink_axis_mask=0,
):
    parts = [slice(None)] * x.dim()
    for axis, *part in zip(*(_ints(t) for t in (axes, begin, end, strides)), strict=True):
        parts[axis] = slice(*part)
    return x[tuple(parts)]


def _split(x, size_splits, split_dim, num_split):
    sizes, dim = _ints(size_splits), split_dim.item()
    rest = x.size(dim) - sum(size for size in sizes if size != -1)  # -1: what is left
    return x.split([rest if size == -1 else size for size in sizes], dim)


def _topk(x, k, dim, largest, sorted, sort_policy):
    values, indices = x.topk(k.item(), dim, largest, sorted)
    return values, indices.int()


# What each type computes, as GE documents it. The parameters are the inputs and attributes of GE's
# prototype by their names (a dynamic input is a list; else_ is GE's else); a default is the only
# supported value of that attribute. A function returns the outputs, except those that are also
# inputs: it writes these in place.
OPERATORS: dict[str, Callable] = {
    "Add": lambda x1, x2: x1 + x2,
    "BatchMatMul": _matmul,
    "BroadcastTo": lambda x, shape: x.expand(_ints(shape)),
    "Cast": lambda x, dst_type: x.to(_dtype(dst_type)),
    "ClipByValueV2": lambda x, clip_value_min, clip_value_max: x.clamp(
        clip_value_min, clip_value_max
    ),
    "ConcatV2": lambda x, concat_dim, N: torch.cat(x, concat_dim.item()),
    "Cos": lambda x: x.cos(),
    "Cumsum": lambda x, axis, exclusive=False, reverse=False: x.cumsum(axis.item(), dtype=x.dtype),
    "Exp": lambda x, base=-1.0, scale=1.0, shift=0.0: x.exp(),
    "Fill": lambda dims, value: value.reshape(()).expand(_ints(dims)),
    "FloorDiv": lambda x1, x2: x1 // x2,
    "FloorMod": lambda x1, x2: x1 % x2,
    "Gather": _gather_rows,
    "GatherElements": lambda x, index, dim: x.gather(dim, index.long()),
    "GatherV2": _gather,
    "Greater": lambda x1, x2: x1 > x2,
    "GreaterEqual": lambda x1, x2: x1 >= x2,
    "Identity": lambda x: x,
    "IndexByTensor": _index,
    "LayerNormV4": _layer_norm,
    "Less": lambda x1, x2: x1 < x2,
    "LessEqual": lambda x1, x2: x1 <= x2,
    "Log1p": lambda x: x.log1p(),
    "LogicalAnd": lambda x1, x2: x1 & x2,
    "LogicalNot": lambda x: ~x,
    "MaskedFill": lambda x, mask, value: x.masked_fill(mask, value.reshape(())),
    "MatMul": _linear,
    "Maximum": lambda x1, x2: x1.maximum(x2),
    "Mul": lambda x1, x2: x1 * x2,
    "Muls": lambda x, value: x * value,
    "Neg": lambda x: -x,
    "Pack": lambda x, axis, N: torch.stack(x, axis),
    "Pow": lambda x1, x2: x1.pow(x2),
    "Range": lambda start, limit, delta: torch.arange(
        start.item(), limit.item(), delta.item(), dtype=start.dtype, device=start.device
    ),
    "RealDiv": lambda x1, x2: x1 / x2,
    "ReduceMean": _reduce_mean,
    "ReduceSum": lambda x, axes, keep_dims: x.sum(_ints(axes), keep_dims, dtype=x.dtype),
    "Reshape": lambda x, shape, axis=0, num_axes=-1: x.reshape(_ints(shape)),
    "Rsqrt": lambda x: x.rsqrt(),
    "ScatterElements": lambda data, indices, updates, axis, reduction="none": data.scatter(
        axis, indices.long(), updates
    ),
    "ScatterNdUpdate": _scatter_nd_update,
    "SelectV2": lambda condition, then, else_: then.where(condition, else_),
    "Shape": lambda x, dtype: torch.tensor(x.shape, dtype=_dtype(dtype), device=x.device),
    "Sigmoid": lambda x: x.sigmoid(),
    "Sin": lambda x: x.sin(),
    "SoftmaxV2": lambda x, axes, half_to_float=False: x.softmax(*axes),
    "SplitV": _split,
    "Sqrt": lambda x: x.sqrt(),
    "Squeeze": lambda x, axis: x.squeeze(axis),
    "StridedSliceV2": _slice,
    "Sub": lambda x1, x2: x1 - x2,
    "Swish": lambda x, scale=1.0: torch.nn.functional.silu(x),
    "Sxpy": lambda x1, x2, alpha: x1 - alpha * x2,
    "TensorMove": lambda x: x.clone(),
    "TopKV2": _topk,
    "Transpose": lambda x, perm: x.permute(_ints(perm)),
    "Unpack": lambda x, num, axis: x.unbind(axis),
    "Unsqueeze": lambda x, axes: functools.reduce(Tensor.unsqueeze, axes, x),
    "ZerosLike": lambda x: torch.zeros_like(x),
}

# GE's name of an attribute's kind -> its field on a node
FIELDS = {"VT_INT": "i", "VT_FLOAT": "f", "VT_BOOL": "b", "VT_STRING": "s"}
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
            data = node.type == "Data"
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
    """Makes torchair run its graphs here; ``cann`` is the stand-in's library."""
    import torchair.core._backend

    for type, prototype in _prototypes().items():
        for part, name, kind in (
            *(("input", tensor.name, tensor.kind) for tensor in prototype.inputs),
            *(("output", tensor.name, tensor.kind) for tensor in prototype.outputs),
            *(("attribute", attribute.name, attribute.vt) for attribute in prototype.attributes),
        ):
            cann.ascend_host_declare(*(text.encode() for text in (type, part, name, kind)))
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
        elif self.type in OPERATORS:
            self.compute = self._theirs(OPERATORS[self.type])
        elif self.type not in ("Data", "NetOutput"):
            raise self.error(
                f"is of a type that is not run here; add it to OPERATORS in {__file__}"
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
        op = overload(prototype.op, prototype.overload)
        required = [tensor.name for tensor in prototype.inputs if tensor.kind == "required"]
        attributes = dict(self.attributes)
        for name, value in OPS[prototype.op].absent.items():
            if attributes[name] == value:
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


def _dtype(number: int) -> torch.dtype:
    """The dtype of GE's number."""
    from torchair.ge._ge_graph import ge_type_to_torch_type

    return ge_type_to_torch_type(number)


def _value(attribute):
    field = attribute.WhichOneof("value")
    value = getattr(attribute, field)
    if field == "list":
        return next((list(v) for f in "ifbs" if len(v := getattr(value, f))), [])
    return value.decode() if field == "s" else value


def _constant(tensor) -> Tensor:
    from torchair.ge._ge_graph import _ge_proto_dtype_to_ge_dtype

    shape = torch.Size(tensor.desc.shape.dim)
    dtype = _dtype(_ge_proto_dtype_to_ge_dtype(tensor.desc.dtype))
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
