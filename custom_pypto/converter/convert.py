"""torchair's converters of the ops, made from their schemas: refusals, then one constructor."""

from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import optimization_hint
from torchair._ge_concrete_graph.fx2ge_converter import register_fx_node_ge_converter
from torchair.ge import Tensor

from .. import npu
from ..descriptions import OPS
from ..graph import ops
from ..schemas import bound, overload


def register(op: str) -> None:
    """Registers the converter of an op with torchair, which calls it with the schema's names."""
    description = OPS[op]
    returned = len(description.outputs)

    def convert(*args, **kwargs):
        arguments = bound(op, args, kwargs)
        refuse(op, arguments)
        tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
        infer_shapes_anew(tensors[0])
        for name, value in description.absent.items():
            if arguments[name] is None:
                arguments[name] = value
        outputs = getattr(ops, op.removeprefix("npu_"))(**arguments)
        if not isinstance(outputs, tuple):
            return outputs
        # written inputs are outputs of the node, by which torchair knows that it writes them, and
        # not of the op
        return outputs[0] if returned == 1 else outputs[:returned]

    schema = overload(op)._schema
    convert.__name__ = convert.__qualname__ = f"convert_{op}"
    convert.__doc__ = f"NB: func: {str(schema).removeprefix('custom_pypto::')}"
    register_fx_node_ge_converter(overload(op))(convert)


def refuse(op: str, arguments: dict[str, Any]) -> None:
    """Refuses what an NPU cannot take, by the rules and in the words of eager mode.

    The check of :mod:`custom_pypto.npu` is asked about the call that is being compiled, and again
    with symbols for the sizes that are dynamic: what it finds true of them becomes a guard, so that
    a call that breaks a rule is compiled anew, and refused. No size becomes a constant but one that
    a rule allows one value only.

    Caches must be contiguous as in eager mode, though GE's tensors have no strides: torchair would
    copy a strided cache at every call, and a written one back. Nothing else has to be. Only what
    ``CUSTOM_PYPTO_READY_ON_HOST`` demands does not apply: it is about eager launches.
    """
    npu.check(op, {name: _in_this_call(value) for name, value in arguments.items()})
    symbolic = {n: x.meta if isinstance(x, Tensor) else x for n, x in arguments.items()}
    npu.check(op, symbolic)


def _in_this_call(argument):
    """A tensor's sizes, strides and dtype as numbers, which messages can name."""
    if not isinstance(argument, Tensor):
        return argument
    meta = argument.meta
    size, stride = ([optimization_hint(n) for n in ns] for ns in (meta.size(), meta.stride()))
    return torch.empty_strided(size, stride, dtype=meta.dtype, device="meta")


def infer_shapes_anew(tensor: Tensor) -> None:
    """Lets torchair infer the shapes of this node without what it remembers of the nodes before.

    To write a node's shape rule, torchair calls the Meta function on sizes that are new symbols, in
    the fake mode of the graph. The symbols of every node have the same names, and the mode's cache
    would give this node results that hold those of another, which ends in "infer and generate sym
    shape failed" and no rule. The mode lives as long as this compilation.
    """
    tensor.meta.fake_mode.cache_enabled = False
