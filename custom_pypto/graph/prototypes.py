"""The ops as GE operators: inputs, outputs and attributes, from the schemas and descriptions."""

import dataclasses

from ..descriptions import HALF, OPS, Description, ge_type
from ..schemas import overload

# of a schema, and GE's names: of the kind of attribute, and of the type of its value
KINDS = {
    "int": ("Int", "VT_INT"),
    "float": ("Float", "VT_FLOAT"),
    "str": ("String", "VT_STRING"),
    "bool": ("Bool", "VT_BOOL"),
}


class PrototypeError(RuntimeError):
    """An op is no GE operator, or its description does not fit its schema."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """An input or an output."""

    name: str
    kind: str  # required or optional
    dtypes: tuple[str, ...]  # as torch names them


@dataclasses.dataclass(frozen=True)
class Attribute:
    name: str
    type: str  # in Python
    kind: str  # Int, Float, String or Bool
    vt: str  # VT_INT, ...
    required: bool
    default: object  # None if required


@dataclasses.dataclass(frozen=True)
class Prototype:
    op: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]  # what the op returns, then the inputs that it writes in place
    attributes: tuple[Attribute, ...]
    written: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def type(self) -> str:
        return ge_type(self.op)

    @property
    def constructor(self) -> str:
        """The function of :mod:`custom_pypto.graph.ops` that makes a node of it."""
        return self.op.removeprefix("npu_")


def prototypes() -> list[Prototype]:
    """Of all ops.

    Raises:
        PrototypeError: as :func:`prototype`.
    """
    return [prototype(op, description) for op, description in OPS.items()]


def prototype(op: str, description: Description) -> Prototype:
    """Of one op.

    Raises:
        PrototypeError: the message names the op, the argument and the remedy.
    """
    schema = overload(op)._schema
    described = {*description.dtypes, *description.absent}
    if unknown := described - {argument.name for argument in schema.arguments}:
        raise PrototypeError(f"{op}: the description names {min(unknown)}, the schema does not")
    if len(description.outputs) != len(schema.returns):
        raise PrototypeError(
            f"{op}: the description must name the {len(schema.returns)} outputs of the schema, got "
            f"{', '.join(description.outputs) or 'none'}"
        )
    inputs, attributes, written = [], [], []
    for argument in schema.arguments:
        optional = argument.type.kind() == "OptionalType"
        type = str(argument.type.getElementType() if optional else argument.type)
        if type != "Tensor":
            attributes.append(_attribute(op, argument, type, optional, description))
            continue
        dtypes = description.dtypes.get(argument.name, HALF)
        tensor = Tensor(argument.name, "optional" if optional else "required", dtypes)
        inputs.append(tensor)
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(tensor)
    outputs = [Tensor(name, "required", dtypes) for name, dtypes in description.outputs.items()]
    return Prototype(
        op,
        tuple(inputs),
        (*outputs, *written),
        tuple(attributes),
        tuple(tensor.name for tensor in written),
        description.notes,
    )


def _attribute(op: str, argument, type: str, optional: bool, description: Description) -> Attribute:
    name, default = argument.name, argument.default_value
    if type not in KINDS:
        raise PrototypeError(
            f"{op}: {name} must be Tensor or one of {', '.join(KINDS)} for GE, got {argument.type}"
        )
    if optional != (name in description.absent):
        raise PrototypeError(
            f"{op}: the description must say in absent what stands for None of {name}, which GE "
            "cannot hold"
            if optional
            else f"{op}: the description says what stands for None of {name}, which is never None"
        )
    if optional and default is None:
        default = description.absent[name]
    return Attribute(name, type, *KINDS[type], not argument.has_default_value(), default)
