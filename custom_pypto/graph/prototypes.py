"""The ops as GE operators: inputs, outputs and attributes, from the schemas and descriptions; and
nodes of them, which torchair makes."""

import dataclasses
import re
from typing import Any

from ..descriptions import OPS, Description, ge_type
from ..schemas import overload

# type of an attribute, as CANN's lists of operators name it -> GE's kind
KINDS = {"int": "Int", "float": "Float", "str": "String", "bool": "Bool", "listInt": "ListInt"}


# torchair's names of kinds, where they differ from GE's
ATTR = {"String": "Str"}


class PrototypeError(RuntimeError):
    """An op cannot be a GE operator, or its description does not match its schema."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """An input or an output."""

    name: str
    kind: str  # required or optional
    dtypes: tuple[str, ...]  # as torch names them


@dataclasses.dataclass(frozen=True)
class Attribute:
    name: str
    type: str
    required: bool
    default: object  # None if required

    @property
    def kind(self) -> str:
        return KINDS[self.type]

    @property
    def vt(self) -> str:
        """GE's name of the type of its value: VT_INT, ..."""
        return f"VT_{'_'.join(re.findall('[A-Z][a-z]+', self.kind)).upper()}"


@dataclasses.dataclass(frozen=True)
class Prototype:
    op: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]  # the returned tensors, then the inputs written in place
    attributes: tuple[Attribute, ...]
    notes: tuple[str, ...]

    @property
    def type(self) -> str:
        return ge_type(self.op)


def prototypes() -> list[Prototype]:
    """The prototypes of all ops.

    Raises:
        PrototypeError: as :func:`prototype`.
    """
    return [prototype(overload(op)._schema, description) for op, description in OPS.items()]


def prototype(schema, description: Description) -> Prototype:
    """The prototype of the op with that schema.

    Raises:
        PrototypeError: the message names the op, the argument and the remedy.
    """
    op = schema.name.removeprefix("custom_pypto::")
    described = {*description.dtypes, *description.absent}
    if unknown := described - {argument.name for argument in schema.arguments}:
        raise PrototypeError(f"{op}: the description names {min(unknown)}, which the schema lacks")
    returned = len(schema.returns)
    if len(description.outputs) != returned:
        raise PrototypeError(
            f"{op}: the description must name the {returned} outputs of the schema, got "
            f"{', '.join(description.outputs) or 'none'}"
        )
    inputs, attributes = [], []
    outputs = [Tensor(name, "required", dtypes) for name, dtypes in description.outputs.items()]
    for argument in schema.arguments:
        optional = argument.type.kind() == "OptionalType"
        type = str(argument.type.getElementType() if optional else argument.type)
        if type != "Tensor":
            attributes.append(_attribute(op, argument, type, optional, description))
            continue
        dtypes = description.dtypes_of(argument.name)
        inputs.append(Tensor(argument.name, "optional" if optional else "required", dtypes))
        if argument.alias_info is not None and argument.alias_info.is_write:
            outputs.append(inputs[-1])
    tensors = tuple(inputs), tuple(outputs)
    return Prototype(op, *tensors, tuple(attributes), description.notes)


def _attribute(op: str, argument, type: str, optional: bool, description: Description) -> Attribute:
    name, default = argument.name, argument.default_value
    type = {"List[int]": "listInt"}.get(type, type)
    if type not in KINDS:
        raise PrototypeError(
            f"{op}: {name} must be Tensor or one of int, float, str, bool, int[] for GE, got "
            f"{argument.type}"
        )
    if optional != (name in description.absent):
        raise PrototypeError(
            f"{op}: the description must map {name} in absent to the value that stands for None, "
            "which GE cannot hold"
            if optional
            else f"{op}: the description maps {name} in absent, but {name} is never None"
        )
    if optional and default is None:
        default = description.absent[name]
    return Attribute(name, type, not argument.has_default_value(), default)


def node(op: str, arguments: dict[str, Any]):
    """Adds a node of the GE operator of ``op``; returns its output, or a tuple of them.

    Args:
        arguments: every input and attribute, by name.
    """
    from torchair import ge  # needs torch_npu

    found = prototype(overload(op)._schema, OPS[op])
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
