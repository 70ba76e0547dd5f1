"""torchair's converters of the ops, made from their schemas: the NPU's checks, then one GE node."""

from typing import Any

import torch
import torchair
from torch.fx.experimental import symbolic_shapes
from torchair.ge import Tensor

from .. import npu
from ..descriptions import OPS
from ..graph.prototypes import node
from ..schemas import bound, overload

# the number of a symbol in this call; an older torch has it by the second name
HINTS = ("optimization_hint", "hint_int")
hint = next(getattr(symbolic_shapes, name) for name in HINTS if hasattr(symbolic_shapes, name))


def register(op: str) -> None:
    """Registers the converter of an op with torchair, which calls it by the names of the schema."""
    description, schema = OPS[op], overload(op)._schema
    returned = len(schema.returns)

    def convert(*args, **kwargs):
        arguments = {n: of_host(value) for n, value in bound(op, args, kwargs).items()}
        check(op, arguments)
        tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
        infer_shapes_anew(tensors[0])
        for name, value in description.absent.items():
            if arguments[name] is None:
                arguments[name] = value
        outputs = node(op, arguments)
        # the node also outputs the inputs that it writes, as torchair requires; the op does not
        if returned == 0:
            return None
        if not isinstance(outputs, tuple):
            return outputs
        return outputs[0] if returned == 1 else outputs[:returned]

    convert.__name__ = convert.__qualname__ = f"convert_{op}"
    convert.__doc__ = f"NB: func: {str(schema).removeprefix('custom_pypto::')}"
    torchair.register_fx_node_ge_converter(overload(op))(convert)


def of_host(value):
    """A list of integers as constants, also if some are symbols: a call with others is compiled
    anew, as GE's attributes hold no symbols.
    """
    listed = value.meta if isinstance(value, Tensor) else value
    return [int(n) for n in listed] if isinstance(listed, list | tuple) else value


def check(op: str, arguments: dict[str, Any]) -> None:
    """Rejects a call that an NPU does not support, with the messages of eager mode.

    The check of :mod:`custom_pypto.npu` runs twice: with the sizes of the call being compiled, and
    with symbols for dynamic sizes. Each condition on a symbol becomes a guard, so that a later call
    that violates it is recompiled, and rejected. Sizes stay dynamic unless a rule allows a single
    value.

    Caches must be contiguous as in eager mode, although GE's tensors have no strides: torchair
    would copy a strided cache in every call, and a written one back. Other tensors may be strided.
    ``CUSTOM_PYPTO_READY_ON_HOST`` applies to eager launches only.
    """
    npu.check(op, {name: _in_this_call(value) for name, value in arguments.items()})
    symbolic = {n: x.meta if isinstance(x, Tensor) else x for n, x in arguments.items()}
    npu.check(op, symbolic)


def _in_this_call(argument):
    """A tensor with the numbers of this call as sizes and strides, for readable messages."""
    if not isinstance(argument, Tensor):
        return argument
    meta = argument.meta
    size, stride = ([hint(n) for n in ns] for ns in (meta.size(), meta.stride()))
    return torch.empty_strided(size, stride, dtype=meta.dtype, device="meta")


def infer_shapes_anew(tensor: Tensor) -> None:
    """Disables the cache of torchair's shape inference for the rest of this compilation.

    To derive a node's shape rule, torchair calls the Meta function on new symbols, in the fake mode
    of the graph. The symbols of all nodes have the same names, so the mode's cache would return the
    symbols of another node; torchair then reports "infer and generate sym shape failed" and has no
    rule.
    """
    tensor.meta.fake_mode.cache_enabled = False
