"""torchair's callbacks on the host simulator: read, where torchair compiles them against CANN.

torchair writes C++ for ops without a converter: an operator's prototype for GE, and a class in
which GE calls the op. It compiles with CANN's headers only; here the prototype is declared to the
simulator, whose executor calls the op. The class is not tested.
"""

import ctypes
import inspect
import re

import pytest
from torch import Tensor

from custom_pypto.schemas import overload

PROTOTYPE = re.compile(r"^REG_OP\((\w+)\)\n(.*?)\.OP_END", re.M | re.S)
PORT = re.compile(r"\.(OPTIONAL_INPUT|INPUT|OUTPUT)\((\w+), ")
KINDS = {"INPUT": ("input", "required"), "OPTIONAL_INPUT": ("input", "optional")}
KINDS["OUTPUT"] = "output", "required"


def use(monkeypatch, *ops: str) -> None:
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
