"""Nodes of the GE operators, made with torchair from the prototypes."""

from typing import Any

from ..descriptions import OPS
from .prototypes import prototype

# torchair's name of an attribute's kind, where it is not GE's
ATTR = {"String": "Str"}


def node(op: str, arguments: dict[str, Any]):
    """A node of the GE operator of ``op``: its output, or a tuple of them.

    Args:
        arguments: every input and attribute, by name.
    """
    from torchair import ge  # needs torch_npu

    found = prototype(op, OPS[op])
    return ge.custom_op(
        found.type,
        inputs={tensor.name: arguments[tensor.name] for tensor in found.inputs},
        attrs={
            attribute.name: getattr(ge.attr, ATTR.get(attribute.kind, attribute.kind))(
                arguments[attribute.name]
            )
            for attribute in found.attributes
        },
        outputs=[output.name for output in found.outputs],
    )
