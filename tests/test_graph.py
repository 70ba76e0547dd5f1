"""The GE prototypes, their reader, and the constructors that are generated from them."""

import inspect
import itertools
import json
import sys
import types

import pytest
import torch
from cases import attention_inputs, fused_inputs, indexer_inputs, on_meta

import custom_pypto
from custom_pypto import npu
from custom_pypto.graph import __main__ as command
from custom_pypto.graph import constructors, ops, prototypes

pytestmark = [
    pytest.mark.ge,
    pytest.mark.skipif(
        prototypes.compiler() is None, reason="no C++ compiler to read the prototypes: g++ or $CXX"
    ),
]

OPS = custom_pypto.__all__
# how a prototype says what an attribute's type cannot: the schema's None
ABSENT = {("npu_sparse_attention_pto", "softmax_scale"): 0.0}
KINDS = {"int": "Int", "float": "Float", "str": "String", "bool": "Bool"}
GE_DTYPES = {
    torch.bfloat16: "DT_BF16",
    torch.float16: "DT_FLOAT16",
    torch.float32: "DT_FLOAT",
    torch.float64: "DT_DOUBLE",
    torch.int32: "DT_INT32",
    torch.int64: "DT_INT64",
}


@pytest.fixture(scope="module")
def read() -> dict[str, prototypes.Prototype]:
    found = prototypes.read()
    by_op = {prototype.op: prototype for prototype in found}
    assert len(by_op) == len(found), "two operators in one header"
    return by_op


def schema(op: str) -> torch._C.FunctionSchema:
    return getattr(torch.ops.custom_pypto, op).default._schema


def differences(prototype: prototypes.Prototype) -> list[str]:
    """Where a prototype is not what the schema of its op says."""
    arguments, returns = schema(prototype.op).arguments, schema(prototype.op).returns
    inputs, attributes, written = [], [], []
    for a in arguments:
        optional = str(a.type).startswith("Optional[")
        kind = str(a.type).removeprefix("Optional[").removesuffix("]")
        if kind == "Tensor":
            inputs.append((a.name, "optional" if optional else "required"))
            if a.alias_info is not None and a.alias_info.is_write:
                written.append(a.name)
        else:
            default = ABSENT[prototype.op, a.name] if optional else a.default_value
            attributes.append((a.name, KINDS[kind], not a.has_default_value(), default))
    outputs = [output.name for output in prototype.outputs]
    found = []
    for what, expected, got in (
        ("inputs", inputs, [(t.name, t.kind) for t in prototype.inputs]),
        (
            "attributes",
            attributes,
            [(a.name, a.kind, a.required, a.default) for a in prototype.attributes],
        ),
        ("outputs that are inputs", written, list(prototype.written)),
        ("outputs after what is returned", written, outputs[len(returns) :]),
        ("kinds of outputs", {"required"}, {output.kind for output in prototype.outputs}),
    ):
        if expected != got:
            found.append(f"{what}: expected {expected}, got {got}")
    return found


def test_every_op_has_one_prototype_named_after_it(read):
    camel_case = {
        op: "".join(word.capitalize() for word in op.removeprefix("npu_").split("_")) for op in OPS
    }
    assert {op: prototype.type for op, prototype in read.items()} == camel_case


@pytest.mark.parametrize("op", OPS)
def test_a_prototype_says_what_the_schema_says(op, read):
    assert differences(read[op]) == []


@pytest.mark.parametrize(
    "op, old, new",
    [
        pytest.param(
            "npu_lightning_indexer_pto", ".ATTR(sparse_count, Int, 2048)", "", id="attribute-lost"
        ),
        pytest.param("npu_lightning_indexer_pto", "Int, 2048", "Int, 1024", id="other-default"),
        pytest.param("npu_lightning_indexer_pto", "Int, 3", "Float, 3", id="other-kind"),
        pytest.param("npu_lightning_indexer_pto", "INPUT(key,", "INPUT(keys,", id="other-name"),
        pytest.param(
            "npu_sparse_flash_attention_pto",
            "OPTIONAL_INPUT(value",
            "INPUT(value",
            id="optional-is-required",
        ),
        pytest.param(
            "npu_sparse_flash_attention_pto",
            "REQUIRED_ATTR(scale_value, Float)",
            "ATTR(scale_value, Float, 1.0)",
            id="required-is-optional",
        ),
        pytest.param(
            "npu_sparse_attention_pto",
            ".OUTPUT(kr_cache, TensorType({DT_BF16, DT_FLOAT16}))",
            "",
            id="written-cache-is-no-output",
        ),
        pytest.param("npu_sparse_attention_pto", "1e-6", "1e-5", id="other-eps"),
    ],
)
def test_a_prototype_that_differs_from_the_schema_is_found(op, old, new, tmp_path):
    text = (prototypes.FOLDER / f"{op}.h").read_text()
    assert text.count(old) == 1
    changed = tmp_path / f"{op}.h"
    changed.write_text(text.replace(old, new))
    (prototype,) = prototypes.read([changed])
    assert differences(prototype)


def test_swapped_inputs_are_found(tmp_path):
    text = (prototypes.FOLDER / "npu_sparse_attention_pto.h").read_text()
    changed = tmp_path / "npu_sparse_attention_pto.h"
    changed.write_text(
        text.replace("(sin,", "(_,").replace("(cos,", "(sin,").replace("(_,", "(cos,")
    )
    (prototype,) = prototypes.read([changed])
    assert len(differences(prototype)) == 1


CALLS = {
    "add_custom": lambda dtype: dict(
        self=torch.ones(3, dtype=dtype), other=torch.ones(3, dtype=dtype)
    ),
    "npu_lightning_indexer_pto": lambda dtype: indexer_inputs([2], [20], dim=128, dtype=dtype),
    "npu_sparse_flash_attention_pto": lambda dtype: attention_inputs(
        [2], [20], own_value=True, dtype=dtype
    ),
    "npu_sparse_attention_pto": lambda dtype: fused_inputs(
        [20], 2, q_rank=32, index_dim=128, dtype=dtype
    ),
}


@pytest.mark.parametrize("op", OPS)
def test_a_prototype_takes_the_dtypes_that_the_npu_takes(op, read, monkeypatch):
    """Each tensor of calls in each dtype, cast to each dtype: what the wrapper accepts."""
    program = types.SimpleNamespace(kernel=lambda **facts: None)
    monkeypatch.setattr(npu, "program", lambda op: program)  # nothing is launched, so no PyPTO
    run = npu.implementations(lambda kernel, tensors, written: None)[op]
    accepted = {tensor.name: set() for tensor in read[op].inputs}
    returned = set()
    for common, name, dtype in itertools.product(GE_DTYPES, accepted, GE_DTYPES):
        if not common.is_floating_point:
            continue
        x = on_meta(CALLS[op](common))
        try:
            out = run(**(x | {name: x[name].to(dtype)}))
        except RuntimeError:
            continue
        accepted[name].add(GE_DTYPES[dtype])
        returned.add(GE_DTYPES[out.dtype])
    assert {tensor.name: set(tensor.dtypes) for tensor in read[op].inputs} == accepted
    assert set(read[op].outputs[0].dtypes) == returned


def prototype(*lines: str, type: str = "Twice", end: str | None = None) -> str:
    chain = "\n".join([f"REG_OP({type})", *lines, f".OP_END_FACTORY_REG({end or type})"])
    return f'#include "graph/operator_reg.h"\nnamespace ge {{\n{chain}\n}}\n'


X, Y = ".INPUT(x, TensorType({DT_BF16, DT_FLOAT}))", ".OUTPUT(y, TensorType({DT_BF16, DT_FLOAT}))"


def test_the_reader_keeps_all_that_a_chain_says(tmp_path):
    header = tmp_path / "twice.h"
    header.write_text(
        prototype(
            X,
            ".OPTIONAL_INPUT(bias, TensorType(DT_INT64))",
            ".DYNAMIC_INPUT(others, TensorType({DT_FLOAT16}))",
            Y,
            ".OUTPUT(x, TensorType({DT_BF16, DT_FLOAT}))",
            ".DYNAMIC_OUTPUT(parts, TensorType({DT_BOOL}))",
            ".REQUIRED_ATTR(axis, Int)",
            ".ATTR(scale, Float, 1)",
            ".ATTR(eps, Float, -1e-6)",
            r'.ATTR(name, String, "a \"b\"\n")',
            ".ATTR(flag, Bool, true)",
            ".ATTR(to, Type, DT_BF16)",
            ".ATTR(axes, ListInt, {0, -1})",
            ".ATTR(none, ListFloat, {})",
            ".ATTR(pads, ListListInt, {{1, 2}, {}})",
        )
    )
    (found,) = prototypes.read([header])
    assert (found.type, found.header, found.op) == ("Twice", header, "twice")
    assert [(t.name, t.kind, t.dtypes) for t in found.inputs] == [
        ("x", "required", ("DT_BF16", "DT_FLOAT")),
        ("bias", "optional", ("DT_INT64",)),
        ("others", "dynamic", ("DT_FLOAT16",)),
    ]
    assert [(t.name, t.kind) for t in found.outputs] == [
        ("y", "required"),
        ("x", "required"),
        ("parts", "dynamic"),
    ]
    assert found.written == ("x",)
    assert [(a.name, a.vt, a.required, json.dumps(a.default)) for a in found.attributes] == [
        ("axis", "VT_INT", True, "null"),
        ("scale", "VT_FLOAT", False, "1.0"),
        ("eps", "VT_FLOAT", False, "-1e-06"),
        ("name", "VT_STRING", False, r'"a \"b\"\n"'),
        ("flag", "VT_BOOL", False, "true"),
        ("to", "VT_DATA_TYPE", False, '"DT_BF16"'),
        ("axes", "VT_LIST_INT", False, "[0, -1]"),
        ("none", "VT_LIST_FLOAT", False, "[]"),
        ("pads", "VT_LIST_LIST_INT", False, "[[1, 2], []]"),
    ]


@pytest.mark.parametrize(
    "text, message",
    [
        pytest.param(
            prototype(X, Y, end="Thrice"), "Twice: OP_END_FACTORY_REG names Thrice", id="end"
        ),
        pytest.param(
            prototype(X, Y) + prototype(X, Y), "Twice: registered twice, first in ", id="twice"
        ),
        *(
            pytest.param(
                prototype(X, Y, f".ATTR(a, {kind}, {default})"),
                f"Twice: the default of attribute a must be {kind}, got {got or default}",
                id=f"{kind}-{default}",
            )
            for kind, default, got in [
                ("Int", '"many"', None),
                ("Int", "1.5", None),
                ("Float", '"1.5"', None),
                ("Float", "1e39", '"inf"'),
                ("String", "3", None),
                ("Bool", "1", None),
                ("Int", "true", None),
                ("ListInt", "3", None),
                ("ListInt", '{1, "2"}', '[1, "2"]'),
                ("Int", "{1}", "[1]"),
            ]
        ),
        pytest.param(
            prototype(X, Y, ".ATTR(a, Double, 1.0)"),
            "Twice: attribute a is of kind Double, which is unknown",
            id="unknown-kind",
        ),
        pytest.param(prototype(X, X, Y), "Twice: two inputs are named x", id="inputs"),
        pytest.param(prototype(X, Y, Y), "Twice: two outputs are named y", id="outputs"),
        pytest.param(
            prototype(X, Y, ".ATTR(a, Int, 1)", ".REQUIRED_ATTR(a, Int)"),
            "Twice: two attributes are named a",
            id="attributes",
        ),
        pytest.param(
            prototype(X, Y, ".ATTR(x, Int, 1)"),
            "Twice: x is an input and an attribute",
            id="input-and-attribute",
        ),
        pytest.param(prototype(X), "Twice: has no output", id="no-output"),
        pytest.param(
            prototype(X, ".OUTPUT(x, TensorType({DT_BF16}))"),
            "Twice: output x is the input of that name, written in place, and must be as it is: "
            "required, with the same dtypes",
            id="in-place-of-another-dtype",
        ),
        pytest.param(
            prototype(X, Y).replace(".OP_END_FACTORY_REG(Twice)", ";"),
            "Twice: does not end with OP_END_FACTORY_REG",
            id="no-end",
        ),
        pytest.param(prototype(X, ".OUTPT(y, 1)"), "OUTPT", id="unknown-macro"),
        pytest.param(
            prototype(".INPUT(x, TensorType({DT_BFLOAT}))", Y), "DT_BFLOAT", id="unknown-dtype"
        ),
    ],
)
def test_a_wrong_prototype_is_refused_by_name(text, message, tmp_path):
    header = tmp_path / "twice.h"
    header.write_text(text)
    with pytest.raises(prototypes.PrototypeError) as refused:
        prototypes.read([header])
    assert str(header) in str(refused.value) and message in str(refused.value)


def test_an_operator_of_two_headers_is_refused_with_both(tmp_path):
    headers = [tmp_path / "a.h", tmp_path / "b.h"]
    for header in headers:
        header.write_text(prototype(X, Y))
    with pytest.raises(prototypes.PrototypeError) as refused:
        prototypes.read(headers)
    assert f"{headers[1]}: Twice: registered twice, first in {headers[0]}" in str(refused.value)


def test_constructors_are_what_the_prototypes_give(capsys):
    assert command.main(["--check"]) == 0, capsys.readouterr().err


def test_check_finds_another_text_and_leaves_it(tmp_path, monkeypatch, capsys):
    file = tmp_path / "ops.py"
    monkeypatch.setattr(command, "GENERATED", file)
    for text in (None, "edited"):
        if text is not None:
            file.write_text(text)
        assert command.main(["--check"]) == 1
        assert "run `python -m custom_pypto.graph`" in capsys.readouterr().err
        assert not file.exists() if text is None else file.read_text() == text
    assert command.main([]) == 0 and command.main(["--check"]) == 0
    assert file.read_text() == inspect.getsource(ops)
    assert list(tmp_path.iterdir()) == [file]


def test_without_a_compiler_one_line_says_so(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    assert command.main([]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("found no no-such-compiler -O2; install g++, or set CXX")


@pytest.mark.parametrize(
    "line, message",
    [
        pytest.param(
            ".DYNAMIC_OUTPUT(parts, TensorType({DT_BF16}))",
            "Twice: output parts must not be dynamic",
            id="dynamic-output",
        ),
        pytest.param(
            ".ATTR(axes, ListInt, {})",
            "Twice: attribute axes must be one of Int, Float, String, Bool",
            id="list",
        ),
    ],
)
def test_what_no_constructor_can_pass_is_refused(line, message, tmp_path):
    header = tmp_path / "twice.h"
    header.write_text(prototype(X, Y, line))
    with pytest.raises(prototypes.PrototypeError, match=message):
        constructors.source(prototypes.read([header]))


@pytest.fixture
def nodes(monkeypatch) -> list[dict]:
    """What a stand-in for torchair was asked to build."""
    made = []

    def custom_op(type, *, inputs, outputs, attrs=None):
        made.append(dict(type=type, inputs=inputs, outputs=outputs, attrs=attrs or {}))
        return tuple(outputs)

    names = ("Int", "Float", "Str", "Bool")
    attr = {name: lambda value, name=name: (name, value) for name in names}
    torchair = types.ModuleType("torchair")
    torchair.ge = types.SimpleNamespace(custom_op=custom_op, attr=types.SimpleNamespace(**attr))
    monkeypatch.setitem(sys.modules, "torchair", torchair)
    return made


def in_torchair(attribute: prototypes.Attribute, value) -> tuple:
    return {"String": "Str"}.get(attribute.kind, attribute.kind), value


@pytest.mark.parametrize("op", OPS)
def test_a_constructor_builds_the_node_of_its_prototype(op, read, nodes):
    expected = read[op]
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


@pytest.mark.parametrize("op", OPS)
def test_a_constructor_has_the_defaults_of_its_prototype(op, read, nodes):
    construct = getattr(ops, op.removeprefix("npu_"))
    parameters = inspect.signature(construct).parameters.values()
    given = {p.name: object() for p in parameters if p.default is p.empty}
    construct(**given)
    (node,) = nodes
    for tensor in read[op].inputs:
        assert node["inputs"][tensor.name] is given.get(tensor.name)
        assert tensor.name in given or tensor.kind == "optional"
    for a in read[op].attributes:
        value = given[a.name] if a.required else a.default
        assert node["attrs"][a.name] == in_torchair(a, value)
        assert a.required or a.name not in given
