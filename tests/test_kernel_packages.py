"""Which installed kernel packages count, and why others do not; no torch_npu is needed."""

import copy
import dataclasses
import functools
import json
import re

import pytest
from kernel_package import (
    ALL,
    FOREIGN,
    IS_ANOTHER,
    PROTOTYPES,
    TUTORIAL,
    VARIABLES,
    library,
    package,
)

from custom_pypto import converter, env, kernel_packages
from custom_pypto.kernel_packages import listing
from custom_pypto.requirements import Problem

BY_HAND = {
    "AddCustom": {
        "input0": {"name": "x", "dtype": "float16,float32", "paramType": "required"},
        "input1": {"name": "y", "dtype": "float16,float32", "paramType": "required"},
        "output0": {"name": "z", "dtype": "float16,float32", "paramType": "required"},
    },
    "QuantRowsPto": {
        "input0": {"name": "x", "dtype": "bfloat16", "paramType": "required", "shape": "all"},
        "input1": {"name": "hadamard", "dtype": "bfloat16", "paramType": "optional"},
        "output0": {"name": "rows", "dtype": "int8", "paramType": "required"},
        "output1": {"name": "scales", "dtype": "float16", "paramType": "required"},
    },
    "KvQuantUpdatePto": {
        "input0": {"name": "latent", "dtype": "bfloat16", "paramType": "required"},
        "input1": {"name": "rope", "dtype": "bfloat16", "paramType": "required"},
        "input2": {"name": "slots", "dtype": "int32", "paramType": "required"},
        "input3": {"name": "cache", "dtype": "int8", "paramType": "required"},
        "output0": {"name": "cache", "dtype": "int8", "paramType": "required"},
    },
    "LightningIndexerPto": {
        "input0": {"name": "query", "paramType": "required"},
        "input1": {"name": "key", "paramType": "required"},
        "input2": {"name": "weights", "paramType": "required"},
        "input3": {"name": "actual_seq_lengths_query", "paramType": "optional"},
        "input4": {"name": "actual_seq_lengths_key", "paramType": "optional"},
        "input5": {"name": "block_table", "paramType": "optional"},
        "output0": {"name": "sparse_indices", "paramType": "required"},
        "output1": {"name": "sparse_values", "paramType": "required"},
        "attr": {"list": "layout_query,layout_key,sparse_count,sparse_mode,cmp_ratio,return_value"},
        "attr_layout_query": {"type": "str", "paramType": "optional", "defaultValue": "BSND"},
        "attr_layout_key": {"type": "str", "paramType": "optional", "defaultValue": "PA_BSND"},
        "attr_sparse_count": {"type": "int", "paramType": "optional", "defaultValue": "2048"},
        "attr_sparse_mode": {"type": "int", "paramType": "optional", "defaultValue": "3"},
        "attr_cmp_ratio": {"type": "int", "paramType": "optional", "defaultValue": "1"},
        "attr_return_value": {"type": "bool", "paramType": "optional", "defaultValue": "false"},
    },
}


NEW_PACKAGE = (
    "this package ships no kernels for CANN, and PyPTO needs none; one of your own is built from "
    "custom_pypto/graph/*.h"
)


@pytest.fixture(autouse=True)
def no_cann(monkeypatch):
    for variable in (*VARIABLES, "CUSTOM_PYPTO_EAGER", converter.VARIABLE):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a package in ``tmp_path``, by the path to its folder."""
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", str(tmp_path))
    return functools.partial(package, tmp_path)


def problem_of(type: str, **keywords) -> str | None:
    found = kernel_packages.problem([PROTOTYPES[type]], **keywords)
    return found and found.what


def test_a_package_is_found_by_the_path_to_its_folder(tmp_path, monkeypatch):
    package(tmp_path, ALL | {"Another": {}})
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", f"{tmp_path}/")
    assert kernel_packages.problem() is None
    assert kernel_packages.package(PROTOTYPES["AddCustom"]) == f"{tmp_path}/"


def test_a_package_is_found_among_other_entries_and_socs(tmp_path, monkeypatch):
    package(tmp_path / "a", {"Another": ALL["AddCustom"]})
    package(tmp_path / "b [1]", {"AddCustom": ALL["AddCustom"]}, "ascend310p")
    package(tmp_path / "b [1]", ALL, "ascend910_93")
    entries = ["", f"{tmp_path}/none", f"{tmp_path}/a", f"{tmp_path}/b [1]"]
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", ":".join(entries))
    assert kernel_packages.problem() is None


def test_the_package_of_the_tutorial_has_our_operator(install):
    install(TUTORIAL)
    assert problem_of("AddCustom") is None


def test_a_package_is_found_where_cann_installs_packages(tmp_path, monkeypatch):
    package(tmp_path / "vendors/customize", FOREIGN)
    package(tmp_path / "vendors/us", ALL)
    monkeypatch.setenv("ASCEND_OPP_PATH", str(tmp_path))
    assert kernel_packages.problem() is None


def test_operators_may_come_from_several_packages(tmp_path, monkeypatch):
    first = dict(list(ALL.items())[:3])
    package(tmp_path / "a", first)
    package(tmp_path / "vendors/b", {type: x for type, x in ALL.items() if type not in first})
    monkeypatch.setenv("ASCEND_OPP_PATH", str(tmp_path))
    assert "AddCustom" in kernel_packages.problem().what
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", f"{tmp_path}/a")
    assert kernel_packages.problem() is None


@pytest.mark.parametrize("variable", VARIABLES)
def test_the_first_package_with_an_operator_decides(tmp_path, monkeypatch, variable):
    package(tmp_path / "vendors/us", ALL)
    package(tmp_path / "vendors/customize", FOREIGN)  # installed later
    entries = [f"{tmp_path}/vendors/{name}" for name in ("customize", "us")]
    value = ":".join(entries) if variable == "ASCEND_CUSTOM_OPP_PATH" else str(tmp_path)
    monkeypatch.setenv(variable, value)
    assert problem_of("QuantRowsPto") is None
    assert problem_of("LightningIndexerPto") == (
        f"LightningIndexerPto in {tmp_path}/vendors/customize/op_impl/ai_core/tbe/config/"
        f"ascend910b/aic-ascend910b-ops-info.json {IS_ANOTHER}"
    )
    # the remedy that the error names
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", entries[1])
    assert problem_of("LightningIndexerPto") is None


def test_vendors_without_a_priority_are_none(tmp_path, monkeypatch):
    package(tmp_path / "vendors/us", ALL)
    monkeypatch.setenv("ASCEND_OPP_PATH", str(tmp_path))
    (tmp_path / "vendors/config.ini").write_text("load_priority=customize\n")
    assert problem_of("AddCustom") == (
        "a kernel package with AddCustom in ASCEND_CUSTOM_OPP_PATH or ASCEND_OPP_PATH/vendors"
    )
    (tmp_path / "vendors/config.ini").unlink()
    assert problem_of("AddCustom") is not None


def test_only_what_is_absent_is_named_as_absent(install):
    install(BY_HAND)
    absent = ", ".join(type for type in ALL if type not in BY_HAND)
    assert str(kernel_packages.problem()) == (
        f"a kernel package with {absent} in ASCEND_CUSTOM_OPP_PATH or ASCEND_OPP_PATH/vendors; "
        f"{NEW_PACKAGE}"
    )


def test_what_is_foreign_is_named_beside_what_is_absent(install):
    path = install(BY_HAND | FOREIGN)
    what, *foreign = kernel_packages.problem().what.split("; ")
    assert what.startswith("a kernel package with ")
    assert foreign == [f"LightningIndexerPto in {path} {IS_ANOTHER}"]


@pytest.mark.parametrize("type", BY_HAND)
def test_a_description_written_by_hand_agrees(install, type):
    install(BY_HAND)
    assert problem_of(type) is None


def edited(**changes) -> dict:
    found = copy.deepcopy(BY_HAND)
    for key, change in changes.items():
        found["LightningIndexerPto"][key] |= change
    return found


INPUTS = "query, key, weights, actual_seq_lengths_query (optional), "
MORE = "actual_seq_lengths_key (optional), block_table (optional)"
COUNTS = "layout_query (str), layout_key (str), sparse_count (int), sparse_mode (int), cmp_ratio"
FLAG = "return_value (bool)"

OTHERS = {
    "swapped": (
        edited(input0={"name": "key"}, input1={"name": "query"}),
        f"inputs must be {INPUTS}{MORE}, got key, query{INPUTS[10:]}{MORE}",
    ),
    "lengths-by-value": (
        edited(input3={"valueDepend": "optional"}),
        f"inputs must be {INPUTS}{MORE}, got query, key, weights, "
        f"actual_seq_lengths_query (optional, by value), {MORE}",
    ),
    "a-list-of-tensors": (
        edited(input2={"paramType": "dynamic"}),
        f"inputs must be {INPUTS}{MORE}, got query, key, weights (dynamic){INPUTS[19:]}{MORE}",
    ),
    "output": (
        edited(output0={"name": "indices"}),
        "outputs must be sparse_indices, sparse_values, got indices, sparse_values",
    ),
    "an-attribute-less": (
        edited(attr={"list": "layout_query,layout_key,sparse_count,sparse_mode,cmp_ratio"}),
        f"attributes must be {COUNTS} (int), {FLAG}, got {COUNTS} (int)",
    ),
    "attribute-of-another-type": (
        edited(attr_cmp_ratio={"type": "float"}),
        f"attributes must be {COUNTS} (int), {FLAG}, got {COUNTS} (float), {FLAG}",
    ),
}


@pytest.mark.parametrize("operators, difference", OTHERS.values(), ids=OTHERS)
def test_another_operator_of_the_same_type_is_rejected(tmp_path, install, operators, difference):
    path = install(operators)
    found = kernel_packages.problem([PROTOTYPES["LightningIndexerPto"]])
    assert found.what == f"LightningIndexerPto in {path} is another operator: its {difference}"
    assert found.remedy == (
        "put a package built from custom_pypto/graph/npu_lightning_indexer_pto.h before "
        f"{tmp_path} in ASCEND_CUSTOM_OPP_PATH"
    )


@pytest.mark.parametrize("type", PROTOTYPES)
def test_every_part_of_every_operator_is_compared(install, type):
    path = install(ALL)
    right = PROTOTYPES[type]
    for part in ("inputs", "outputs", "attributes"):
        things = getattr(right, part)
        for i, thing in enumerate(things):
            renamed = dataclasses.replace(thing, name=f"{thing.name}_")
            for other in (
                (*things[:i], *things[i + 1 :]),
                (*things[:i], renamed, *things[i + 1 :]),
            ):
                wrong = dataclasses.replace(right, **{part: other})
                path.unlink()
                path.write_text(json.dumps(ALL | listing([wrong])))
                assert f"its {part} must be" in problem_of(type)


def test_every_soc_of_the_deciding_package_must_agree(install):
    install(ALL, "ascend910_93")
    install(FOREIGN, "ascend310p")
    assert IS_ANOTHER in problem_of("LightningIndexerPto")


NO_LISTS = {
    "similar-name": json.dumps({"AddCustomV2": ALL["AddCustom"]}),
    "cut": json.dumps(ALL)[:-3],
    "empty": "",
    "a-list": json.dumps(list(ALL)),
    "below": json.dumps({"operators": ALL}),
    "null": json.dumps(dict.fromkeys(ALL)),
    "others": json.dumps(dict.fromkeys(ALL, {"attr": 7, "input0": []})),
    "a-number": "7",
}


@pytest.mark.parametrize("text", NO_LISTS.values(), ids=NO_LISTS)
@pytest.mark.parametrize("variable", VARIABLES)
def test_anything_else_is_no_package(tmp_path, monkeypatch, variable, text):
    package(tmp_path / "vendors/us", text)
    folder = tmp_path / "vendors/us" if variable == "ASCEND_CUSTOM_OPP_PATH" else tmp_path
    monkeypatch.setenv(variable, str(folder))
    assert kernel_packages.problem() is not None


def test_a_list_that_cannot_be_read_is_no_package(tmp_path, install):
    install("").write_bytes(b"\xff\xfe{")
    (tmp_path / "op_impl/ai_core/tbe/config/ascend310p/aic-x-ops-info.json").mkdir(parents=True)
    assert kernel_packages.problem() is not None


# ---- the library ---------------------------------------------------------------------------------


def test_eager_calls_need_the_library_and_its_two_functions(tmp_path, monkeypatch):
    phases = ["int aclnnAddCustomGetWorkspaceSize() { return 0; }", "int aclnnAddCustom() {}"]
    expected = {}
    for name, source in {
        "none": None,
        "first": phases[:1],
        "second": phases[1:],
        "both": phases,
        "unresolved": [*phases, "void nowhere(); void f() { nowhere(); }"],
    }.items():
        package(tmp_path / name, ALL)
        path = tmp_path / name / "op_api/lib/libcust_opapi.so"
        if source:
            library(tmp_path / name, "\n".join(source))
        expected[name] = {
            "none": f"{path}, with aclnnAddCustom",
            "first": f"{path} has no function aclnnAddCustom",
            "second": f"{path} has no function aclnnAddCustomGetWorkspaceSize",
            "both": None,
            "unresolved": f"{path} cannot be loaded: {path}: undefined symbol: nowhere",
        }[name]
        monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", f"{tmp_path}/{name}")
        assert problem_of("AddCustom", library=True) == expected[name]
        assert problem_of("AddCustom") is None  # graph mode needs none


# ---- the report ----------------------------------------------------------------------------------


@pytest.fixture
def with_cann(tmp_path, monkeypatch):
    """The report of a machine without NPU names nothing of one."""
    (tmp_path / "cann").mkdir()
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "cann"))


FUNCTIONS = "".join(
    f"int aclnn{type}GetWorkspaceSize() {{ return 0; }} int aclnn{type}() {{ return 0; }}\n"
    for type in ALL
)
NO_PYPTO = Problem("needs pypto 0.2.0, found none", "pip install pypto==0.2.0")
NO_PACKAGE = f"a kernel package with the operators of the ops in {kernel_packages.PLACES}"


@pytest.mark.parametrize(
    "asked, pypto, package_, eager, lacking",
    [
        ("", True, "none", "PyPTO", None),
        ("", False, "right", "aclnn", None),
        ("", True, "right", "PyPTO", None),
        ("", False, "none", None, f"{NO_PYPTO.what}, or {NO_PACKAGE}"),
        ("", False, "foreign", None, f"{NO_PYPTO.what}, or LightningIndexerPto in "),
        ("pypto", False, "right", None, NO_PYPTO.what),
        ("aclnn", True, "right", "aclnn", None),
        ("aclnn", True, "none", None, NO_PACKAGE),
        ("aclnn", True, "foreign", None, "LightningIndexerPto in "),
        ("both", True, "right", None, "custom_pypto: CUSTOM_PYPTO_EAGER must be auto"),
    ],
)
def test_the_report_says_what_runs_eager_calls(
    tmp_path, monkeypatch, with_cann, asked, pypto, package_, eager, lacking
):
    if package_ != "none":
        package(tmp_path, ALL if package_ == "right" else ALL | FOREIGN)
        library(tmp_path, FUNCTIONS)
        monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", str(tmp_path))
    monkeypatch.setenv("CUSTOM_PYPTO_EAGER", asked)
    monkeypatch.setattr(env, "pypto_problem", lambda: None if pypto else NO_PYPTO)
    monkeypatch.setattr(converter, "_registered", False)
    report = env.collect()
    assert report["npu"]["eager"] == eager
    assert f"eager calls   {eager or 'nothing runs them'}\n" in env.render(report)
    what = {
        way: [missing["what"] for missing in state["missing"]]
        for way, state in report["ways"].items()
    }
    wanted = [lacking] if lacking else []
    assert len([w for w in what["ops on the NPU"] if w.startswith(tuple(wanted))]) == len(wanted)
    for way in ("ops on the NPU through aclnn", "graph mode max-autotune, by a kernel package"):
        assert any(IS_ANOTHER in w for w in what[way]) == (package_ == "foreign")
        assert (NO_PACKAGE in what[way]) == (package_ == "none")


def test_the_report_says_each_missing_thing_once(monkeypatch, with_cann):
    monkeypatch.setattr(env, "pypto_problem", lambda: NO_PYPTO)
    report = env.collect()
    said = env.render(report).partition("What works here")[2]
    problems = [
        (missing["what"], missing["remedy"])
        for state in report["ways"].values()
        for missing in state["missing"]
    ]
    assert len(problems) > len(set(problems)) > 2
    for what, remedy in set(problems):
        assert f"{said}\n".count(f"  missing: {what}\n     remedy:  {remedy}\n") == 1
    for way, state in report["ways"].items():  # each way has the numbers of what it lacks
        numbers = re.search(rf"^  \w+ +{re.escape(way)}(?:: needs ([\d, ]+))?$", said, re.M)[1]
        found = [
            re.search(rf"^  {number}  missing: (.*)$", said, re.M)[1]
            for number in re.findall(r"\d+", numbers or "")
        ]
        assert found == [missing["what"] for missing in state["missing"]]


def test_the_report_recommends_pypto_where_neither_is_there(monkeypatch, with_cann):
    monkeypatch.setattr(env, "pypto_problem", lambda: NO_PYPTO)
    (missing, *_) = env.collect()["ways"]["ops on the NPU"]["missing"]
    assert missing["remedy"] == NO_PYPTO.remedy
