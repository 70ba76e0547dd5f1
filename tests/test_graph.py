"""The GE prototypes that are generated from schemas and descriptions."""

import ast
import dataclasses
import importlib.util
import itertools
import os
import shlex
import shutil
import subprocess
import types
from pathlib import Path

import pytest
import torch
from cases import inputs_of, on_meta
from torch.utils._pytree import tree_leaves

from custom_pypto import npu
from custom_pypto.descriptions import FLOAT, OPS, TRAINING, Description
from custom_pypto.graph import __main__ as command
from custom_pypto.graph import headers, prototypes
from custom_pypto.schemas import overload

COMPILER = shlex.split(os.environ.get("CXX") or "g++")


def needs_compiler(test):
    reason = f"no C++ compiler to compile the prototypes: {COMPILER[0]} ($CXX or g++)"
    return pytest.mark.ge(pytest.mark.skipif(not shutil.which(COMPILER[0]), reason=reason)(test))


# how a prototype says what an attribute's type cannot: the schema's None
ABSENT = {
    ("npu_sparse_attention_pto", "softmax_scale"): 0.0,
    ("npu_sparse_flash_attention_grad_pto", "layout_kv"): "",
    ("npu_lightning_indexer_grad_pto", "layout_key"): "",
}
KINDS = {"int": "Int", "float": "Float", "str": "String", "bool": "Bool", "List[int]": "ListInt"}
GE_DTYPES = {
    torch.bfloat16: "DT_BF16",
    torch.float16: "DT_FLOAT16",
    torch.float32: "DT_FLOAT",
    torch.float64: "DT_DOUBLE",
    torch.int8: "DT_INT8",
    torch.int32: "DT_INT32",
    torch.int64: "DT_INT64",
}


@dataclasses.dataclass
class Compiled:
    """What a C++ compiler finds in a header: written apart from the package, to judge it."""

    type: str = ""
    end: str = ""
    inputs: list = dataclasses.field(default_factory=list)  # name, kind, dtypes
    outputs: list = dataclasses.field(default_factory=list)  # name, dtypes
    attributes: list = dataclasses.field(default_factory=list)  # name, kind, required, default


def compiled(headers: list[str], folder: Path) -> list[Compiled]:
    """Compiles headers and runs them with the macros of tests/cann, which print their chains."""
    program, unit = folder / "print", folder / "print.cpp"
    spaces = [
        f"namespace n{i} {{ namespace ge {{ using namespace ::ge; }}\n{text}\n}}\n"
        for i, text in enumerate(headers)
    ]
    unit.write_text('#include "graph/operator_reg.h"\n' + "".join(spaces) + "int main() {}\n")
    include = f"-I{Path(__file__).parent / 'cann'}"
    subprocess.run([*COMPILER, "-std=c++17", include, str(unit), "-o", str(program)], check=True)
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    found = []
    for macro, name, *fields in (line.split("\t") for line in printed.splitlines()):
        if macro == "REG_OP":
            found.append(Compiled(type=name))
        elif macro == "OP_END_FACTORY_REG":
            found[-1].end = name
        elif macro.endswith("INPUT"):
            kind = {"INPUT": "required", "OPTIONAL_INPUT": "optional"}[macro]
            found[-1].inputs.append((name, kind, fields[0].split(",")))
        elif macro == "OUTPUT":
            found[-1].outputs.append((name, fields[0].split(",")))
        else:
            kind, text = fields
            value = {"true": True, "false": False}.get(text)
            # braces hold a list
            text = text.replace("{", "[").replace("}", "]") if kind == "ListInt" else text
            default = ast.literal_eval(text) if text and value is None else value
            found[-1].attributes.append((name, kind, macro == "REQUIRED_ATTR", default))
    return found


SCHEMAS = {op: overload(op)._schema for op in OPS}


def differences(op: str, prototype: Compiled) -> list[str]:
    """Where a prototype is not what the schema of its op says."""
    arguments, returns = SCHEMAS[op].arguments, SCHEMAS[op].returns
    inputs, attributes, written = [], [], []
    for a in arguments:
        optional = str(a.type).startswith("Optional[")
        kind = str(a.type).removeprefix("Optional[")
        kind = kind.removesuffix("]") if optional else kind
        if kind == "Tensor":
            inputs.append((a.name, "optional" if optional else "required"))
            if a.alias_info is not None and a.alias_info.is_write:
                written.append(a.name)
        else:
            none = [] if kind == "List[int]" else ABSENT.get((op, a.name))
            default = none if optional else a.default_value
            attributes.append((a.name, KINDS[kind], not a.has_default_value(), default))
    dtypes = {name: dtypes for name, _, dtypes in prototype.inputs}
    camel_case = "".join(word.capitalize() for word in op.removeprefix("npu_").split("_"))
    found = []
    for what, expected, got in (
        ("type", (camel_case, camel_case), (prototype.type, prototype.end)),
        ("inputs", inputs, [(name, kind) for name, kind, _ in prototype.inputs]),
        ("attributes", attributes, prototype.attributes),
        (
            "outputs after what is returned",
            [(name, dtypes.get(name)) for name in written],
            prototype.outputs[len(returns) :],
        ),
        ("outputs that are inputs", set(written), {n for n, _ in prototype.outputs} & set(dtypes)),
    ):
        if expected != got:
            found.append(f"{what}: expected {expected}, got {got}")
    return found


def test_every_op_has_one_prototype_named_after_it():
    assert {path.stem for path in command.FOLDER.glob("*.h")} == set(OPS)


HEADERS = {op: (command.FOLDER / f"{op}.h").read_text() for op in SCHEMAS}
INDEXER, ATTENTION = "npu_lightning_indexer_pto", "npu_sparse_flash_attention_pto"
FUSED = "npu_sparse_attention_pto"
WRITTEN = ".OUTPUT(kr_cache, TensorType({DT_BF16, DT_FLOAT16}))"
SCALE = "ATTR(scale_value, Float"
SIN_COS = "{}, TensorType({{DT_BF16, DT_FLOAT16, DT_FLOAT}}))\n    .INPUT({},"
DIFFERENT = {
    "attribute-lost": (INDEXER, ".ATTR(sparse_count, Int, 2048)", ""),
    "other-default": (INDEXER, "Int, 2048", "Int, 1024"),
    "other-kind": (INDEXER, "Int, 3", "Float, 3"),
    "other-name": (INDEXER, "INPUT(key,", "INPUT(keys,"),
    "optional-is-required": (ATTENTION, "OPTIONAL_INPUT(value", "INPUT(value"),
    "required-is-optional": (ATTENTION, f"REQUIRED_{SCALE})", f"{SCALE}, 1.0)"),
    "written-cache-is-no-output": (FUSED, WRITTEN, ""),
    "other-eps": (FUSED, "1e-06", "1e-05"),
    "swapped-inputs": (FUSED, SIN_COS.format("sin", "cos"), SIN_COS.format("cos", "sin")),
    "other-flag": (ATTENTION, "return_softmax_lse, Bool, false", "return_softmax_lse, Bool, true"),
}


@pytest.fixture(scope="module")
def chains(tmp_path_factory) -> dict[str, Compiled]:
    """What the compiler finds in the headers and in those that differ, all in one program."""
    texts = dict(HEADERS)
    for id, (op, old, new) in DIFFERENT.items():
        assert HEADERS[op].count(old) == 1
        texts[id] = HEADERS[op].replace(old, new)
    found = compiled([*texts.values()], tmp_path_factory.mktemp("headers"))
    return dict(zip(texts, found, strict=True))


@needs_compiler
@pytest.mark.parametrize("op", SCHEMAS)
def test_a_prototype_compiles_and_says_what_the_schema_says(op, chains):
    assert '#include "graph/operator_reg.h"' in HEADERS[op]
    assert differences(op, chains[op]) == []


@needs_compiler
@pytest.mark.parametrize("id", DIFFERENT)
def test_a_prototype_that_differs_from_the_schema_is_found(id, chains):
    assert differences(DIFFERENT[id][0], chains[id])


PROTOTYPES = {prototype.op: prototype for prototype in prototypes.prototypes()}


def torch_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def test_dtypes_have_the_names_of_ge():
    named = {torch_name(dtype): name for dtype, name in GE_DTYPES.items()}
    assert headers.GE_DTYPES.items() <= named.items()


class NoFacts(types.SimpleNamespace):
    """Stands for the facts of a program that appends no rows."""

    rows_behind_query = 0

    def missing_rows(self, count):
        return 0


@pytest.mark.parametrize("name", OPS)
def test_a_prototype_takes_the_dtypes_that_the_npu_takes(name, monkeypatch):
    """Each tensor of calls in each dtype, cast to each dtype: what the wrapper accepts."""
    pads = {FUSED, "npu_lightning_indexer_prolog_pto", *TRAINING}
    if name in pads and importlib.util.find_spec("pypto") is None:
        pytest.skip("the sim extra is not installed, whose programs pad the arguments")
    prototype = PROTOTYPES[name]
    attributes = {attribute.name for attribute in prototype.attributes}
    # nothing is launched, so no PyPTO
    if name not in pads:
        program = types.SimpleNamespace(Facts=NoFacts)
        monkeypatch.setattr(npu._module(name), "program", lambda op: program)
    monkeypatch.setattr(npu, "prepared", lambda op, call: (None, call.tensors))
    run = npu.implementations(lambda kernel, tensors: None)[name]
    # what a call may not give, or only as another argument, has no dtype of its own
    fixed = {"value", "key_dequant_scale", "value_dequant_scale"} if "kv_quant" in name else set()
    accepted = {tensor.name: set() for tensor in prototype.inputs if tensor.name not in fixed}
    returned = [set() for _ in SCHEMAS[name].returns]
    kinds = [dict(w8a8=False), dict(w8a8=True)] if "prolog" in name else [{}]
    floating = [dtype for dtype in GE_DTYPES if dtype.is_floating_point]
    for common, kind in itertools.product(floating, kinds):
        x = on_meta(inputs_of(name, on_npu=True, dtype=common, **kind))
        if "sinks" in x:  # given, so that they have a dtype
            x |= dict(value=x["key"], sinks=x["query"].new_empty(x["query"].size(-2)).float())
        if "hadamard" in x:
            x["hadamard"] = x["x"].new_empty(x["x"].size(-1), x["x"].size(-1))
        x |= {flag: True for flag in ("return_value", "return_softmax_lse") if flag in attributes}
        for changed, dtype in itertools.product(accepted, GE_DTYPES):
            if kind and x[changed] is None:  # a scale of the other kind
                continue
            try:
                out = run(**(x | {changed: x[changed].to(dtype)}))
            except RuntimeError:
                continue
            accepted[changed].add(torch_name(dtype))
            outputs = [y for y in tree_leaves(out) if y is not None]
            for dtypes, output in zip(returned, outputs, strict=True):
                dtypes.add(torch_name(output.dtype))
    expected = {tensor.name: set(tensor.dtypes) for tensor in prototype.inputs}
    assert {tensor: expected[tensor] for tensor in accepted} == accepted
    assert [set(tensor.dtypes) for tensor in prototype.outputs[: len(returned)]] == returned


COUNT = "the description must name the {} outputs of the schema, got {}"
MISFITS = {
    "unknown-argument": (
        "add_custom",
        Description({"out": FLOAT}, dtypes={"selfs": FLOAT}),
        "the description names selfs, which the schema lacks",
    ),
    "no-output": ("add_custom", Description({}), COUNT.format(1, "none")),
    "two-outputs": (
        "add_custom",
        Description({"out": FLOAT, "more": FLOAT}),
        COUNT.format(1, "out, more"),
    ),
    "none-of-an-attribute": (
        FUSED,
        OPS[FUSED]._replace(absent={}),
        "the description must map softmax_scale in absent to the value that stands for None, which "
        "GE cannot hold",
    ),
    "never-none": (
        FUSED,
        OPS[FUSED]._replace(absent={"softmax_scale": 0.0, "eps": 0.0}),
        "the description maps eps in absent, but eps is never None",
    ),
    "one-of-three-outputs": (
        ATTENTION,
        OPS[ATTENTION]._replace(outputs={"attention_out": FLOAT}),
        COUNT.format(3, "attention_out"),
    ),
}


@pytest.mark.parametrize("op, description, message", MISFITS.values(), ids=MISFITS)
def test_a_description_that_does_not_fit_its_schema_is_rejected(op, description, message):
    with pytest.raises(prototypes.PrototypeError) as rejected:
        prototypes.prototype(SCHEMAS[op], description)
    assert str(rejected.value) == f"{op}: {message}"


@pytest.mark.parametrize("type", ["float[]", "Tensor[]", "Scalar", "str?[]"])
def test_an_argument_that_ge_cannot_hold_is_rejected(type):
    parsed = torch._C.parse_schema(f"custom_pypto::twice(Tensor x, {type} a) -> Tensor")
    message = r"twice: a must be Tensor or one of int, float, str, bool, int\[\] for GE"
    with pytest.raises(prototypes.PrototypeError, match=message):
        prototypes.prototype(parsed, Description(outputs={"y": FLOAT}))


@needs_compiler
def test_all_that_a_schema_says_is_in_the_header_and_compiles(tmp_path):
    """What none of the ops has: attributes of every kind, text to be escaped, two results."""
    parsed = torch._C.parse_schema(
        "custom_pypto::npu_twice(Tensor x, Tensor? y, int n, bool flag=True, bool other=False, "
        """str name='a "b"', float low=-1e-07, float whole=2.0, int most=9223372036854775807, """
        "int[] sizes=[1, -2], Tensor(a!)? z=None) -> (Tensor, Tensor)"
    )
    outputs = {"one": FLOAT, "two": ("int64",)}
    header = headers.source(prototypes.prototype(parsed, Description(outputs, {"z": ("int32",)})))
    (found,) = compiled([header], tmp_path)
    half = ["DT_BF16", "DT_FLOAT16"]
    assert found == Compiled(
        "Twice",
        "Twice",
        [("x", "required", half), ("y", "optional", half), ("z", "optional", ["DT_INT32"])],
        [("one", [*half, "DT_FLOAT"]), ("two", ["DT_INT64"]), ("z", ["DT_INT32"])],
        [
            ("n", "Int", True, None),
            ("flag", "Bool", False, True),
            ("other", "Bool", False, False),
            ("name", "String", False, 'a "b"'),
            ("low", "Float", False, -1e-07),
            ("whole", "Float", False, 2.0),
            ("most", "Int", False, 2**63 - 1),
            ("sizes", "ListInt", False, [1, -2]),
        ],
    )


def test_generated_files_are_what_the_descriptions_give(capsys):
    assert command.main(["--check"]) == 0, capsys.readouterr().err


def test_check_finds_another_text_and_leaves_it(tmp_path, monkeypatch, capsys):
    right = {path.name: path.read_text() for path in command.FOLDER.glob("*.h")}
    monkeypatch.setattr(command, "FOLDER", tmp_path)
    assert command.main([]) == 0 and command.main(["--check"]) == 0
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == right
    file = tmp_path / "add_custom.h"
    for text in (None, "edited"):
        file.unlink() if text is None else file.write_text(text)
        capsys.readouterr()
        assert command.main(["--check"]) == 1
        said = f"{file} is out of date; run `python -m custom_pypto.graph`\n"
        assert capsys.readouterr().err == said
        assert not file.exists() if text is None else file.read_text() == text
    assert command.main([]) == 0 and file.read_text() == right[file.name]


def test_a_wrong_description_is_one_line_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "FOLDER", tmp_path)
    monkeypatch.setitem(OPS, "add_custom", Description(outputs={}))
    assert command.main([]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
