"""The constructors of GE nodes, generated from schemas and descriptions: they build the nodes of
the prototypes. torchair is a stand-in here, on the stand-in for CANN it is the real one.
"""

import inspect
import sys
import types

import pytest

from custom_pypto.graph import ops, prototypes

PROTOTYPES = {prototype.name: prototype for prototype in prototypes.prototypes()}


@pytest.fixture
def nodes(monkeypatch) -> list[dict]:
    """What a stand-in for torchair was asked to build."""
    made = []

    def custom_op(type, *, inputs, outputs, attrs=None):
        made.append(dict(type=type, inputs=inputs, outputs=outputs, attrs=attrs or {}))
        return tuple(outputs)

    names = ("Int", "Float", "Str", "Bool", "ListInt")
    attr = {name: lambda value, name=name: (name, value) for name in names}
    torchair = types.ModuleType("torchair")
    torchair.ge = types.SimpleNamespace(custom_op=custom_op, attr=types.SimpleNamespace(**attr))
    monkeypatch.setitem(sys.modules, "torchair", torchair)
    return made


def in_torchair(attribute: prototypes.Attribute, value) -> tuple:
    return {"String": "Str"}.get(attribute.kind, attribute.kind), value


@pytest.mark.parametrize("op", PROTOTYPES)
def test_a_constructor_builds_the_node_of_its_prototype(op, nodes):
    expected = PROTOTYPES[op]
    construct = getattr(ops, op.removeprefix("npu_"))
    tensors = {tensor.name: object() for tensor in expected.inputs}
    values = {a.name: object() for a in expected.attributes}
    outputs = [output.name for output in expected.outputs]
    assert construct(**tensors, **values) == construct(*tensors.values(), **values)
    for node in nodes:
        assert node["type"] == expected.type
        assert list(node["inputs"].items()) == list(tensors.items())
        assert list(node["attrs"].items()) == [
            (a.name, in_torchair(a, values[a.name])) for a in expected.attributes
        ]
        assert node["outputs"] == outputs
    assert list(inspect.signature(construct).parameters) == [*tensors, *values]


@pytest.mark.parametrize("op", PROTOTYPES)
def test_a_constructor_has_the_defaults_of_its_prototype(op, nodes):
    construct = getattr(ops, op.removeprefix("npu_"))
    parameters = inspect.signature(construct).parameters.values()
    given = {p.name: object() for p in parameters if p.default is p.empty}
    construct(**given)
    (node,) = nodes
    for tensor in PROTOTYPES[op].inputs:
        assert node["inputs"][tensor.name] is given.get(tensor.name)
        assert tensor.name in given or tensor.kind == "optional"
    for a in PROTOTYPES[op].attributes:
        value = given[a.name] if a.required else a.default
        assert node["attrs"][a.name] == in_torchair(a, value)
        assert a.required or a.name not in given
