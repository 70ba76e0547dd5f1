"""Writes Python functions that build a node of each GE operator, from the prototypes.

What they write is formatted as ruff would, so that no formatter is needed to compare it.
"""

import re
import textwrap
from collections.abc import Sequence

from .prototypes import Attribute, Prototype, PrototypeError, Tensor

HEADER = '''\
"""A node of each GE operator of the package, by functions typed after the prototypes.

Generated from the headers in this folder by ``python -m custom_pypto.graph``; do not edit. The
first call imports torchair, which needs torch_npu; importing this module needs neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchair.ge import Tensor

'''

# kind of an attribute -> its type in Python, torchair's name for it
KINDS = {
    "Int": ("int", "Int"),
    "Float": ("float", "Float"),
    "String": ("str", "Str"),
    "Bool": ("bool", "Bool"),
}
DTYPES = {"DT_BF16": "bfloat16", "DT_FLOAT": "float32", "DT_DOUBLE": "float64"}  # others: as is
TENSOR = {"required": "Tensor", "optional": "Tensor | None", "dynamic": "list[Tensor]"}


def source(prototypes: Sequence[Prototype]) -> str:
    """The text of the module ``ops.py``."""
    names = [function_name(prototype) for prototype in prototypes]
    listed = "".join(f"    {_text(name)},\n" for name in sorted(names))
    return HEADER + f"__all__ = [\n{listed}]\n" + "".join(map(_function, prototypes))


def function_name(prototype: Prototype) -> str:
    """``SparseAttentionPto`` -> ``sparse_attention_pto``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", prototype.type).lower()


def _function(prototype: Prototype) -> str:
    for output in prototype.outputs:
        if output.kind == "dynamic":
            raise PrototypeError(
                f"{prototype.header}: {prototype.type}: output {output.name} must not be dynamic, "
                "whose number of tensors torchair asks for and no argument gives"
            )
    for attribute in prototype.attributes:
        if attribute.kind not in KINDS:
            raise PrototypeError(
                f"{prototype.header}: {prototype.type}: attribute {attribute.name} must be one of "
                f"{', '.join(KINDS)} for a constructor, got {attribute.kind}"
            )
    result = "Tensor"
    if len(prototype.outputs) > 1:
        result = f"tuple[{', '.join([result] * len(prototype.outputs))}]"
    inputs = [f"{_text(tensor.name)}: {tensor.name}" for tensor in prototype.inputs]
    attributes = [
        f"{_text(a.name)}: ge.attr.{KINDS[a.kind][1]}({a.name})" for a in prototype.attributes
    ]
    return "\n".join(
        [
            "",
            "",
            f"def {function_name(prototype)}(",
            *(f"    {parameter}," for parameter in _parameters(prototype)),
            f") -> {result}:",
            *_docstring(prototype),
            "    from torchair import ge",
            "",
            "    return ge.custom_op(",
            f"        {_text(prototype.type)},",
            *_braces("inputs={", inputs, "}"),
            *(_braces("attrs={", attributes, "}") if attributes else []),
            *_braces("outputs=[", [_text(output.name) for output in prototype.outputs], "]"),
            "    )",
            "",
        ]
    )


def _parameters(prototype: Prototype) -> list[str]:
    required = [i for i, tensor in enumerate(prototype.inputs) if tensor.kind != "optional"]
    parameters = []
    for i, tensor in enumerate(prototype.inputs):
        # as in Python, no default before one that must be given
        default = " = None" if i > max(required, default=-1) else ""
        parameters.append(f"{tensor.name}: {TENSOR[tensor.kind]}{default}")
    if prototype.attributes:
        parameters += ["*", *map(_keyword, prototype.attributes)]
    return parameters


def _keyword(attribute: Attribute) -> str:
    default = attribute.default
    text = _text(default) if isinstance(default, str) else repr(default)
    given = "" if attribute.required else f" = {text}"
    return f"{attribute.name}: {KINDS[attribute.kind][0]}{given}"


def _docstring(prototype: Prototype) -> list[str]:
    lines = [
        f'"""GE operator ``{prototype.type}``, prototype {prototype.header.name}.',
        "",
        f"Meaning and shapes: :func:`custom_pypto.{prototype.op}`.",
        "",
        "Args:",
        *(_described(tensor) for tensor in prototype.inputs),
        "Returns:",
        *(_described(tensor, prototype.written) for tensor in prototype.outputs),
        '"""',
    ]
    wrapped = []
    for line in lines:
        again = "        " if line.startswith(" ") else ""
        wrapped += textwrap.wrap(line, 96, subsequent_indent=again) or [""]
    return [f"    {line}" if line else "" for line in wrapped]


def _described(tensor: Tensor, written: Sequence[str] = ()) -> str:
    names = (DTYPES.get(dtype, dtype.removeprefix("DT_").lower()) for dtype in tensor.dtypes)
    *others, last = names
    dtypes = f"{', '.join(others)} or {last}" if others else last
    place = ", the input, written in place" if tensor.name in written else ""
    absent = ", or None" if tensor.kind == "optional" else ""
    return f"    {tensor.name}: {dtypes}{absent}{place}."


def _braces(opening: str, lines: list[str], closing: str) -> list[str]:
    return [
        f"        {opening}",
        *(f"            {line}," for line in lines),
        f"        {closing},",
    ]


def _text(value: str) -> str:
    """A literal in double quotes."""
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
