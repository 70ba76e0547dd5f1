"""Eager calls through aclnn, on the host simulator of CANN and a kernel package built for it."""

import gc
import json
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import cases
import pytest
import torch
from cases import inputs_of
from cases.npu_lightning_indexer_pto import inputs as indexer_inputs
from kernel_package import (  # noqa: F401, fixtures among them
    ALL,
    FOREIGN,
    TUTORIAL,
    built_package,
    calls_through_aclnn,
    library,
    no_calls_through_pypto,
    package,
)
from npu_calls import CALLS, PROTOTYPES, agrees, call, on_npu, same

import custom_pypto
from custom_pypto import npu, requirements
from custom_pypto.descriptions import OPS
from custom_pypto.npu.aclnn import Operator

pytestmark = pytest.mark.ascend_host

OPTIONAL = [(p.op, x.name) for p in PROTOTYPES.values() for x in p.inputs if x.kind == "optional"]
HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("op", OPS)
def test_an_op_computes_what_the_package_does(op, dtype, simulator, pypto):
    assert agrees(op, inputs_of(op, (2, 1), (30, 17), on_npu=True, dtype=HALF[dtype]))


@pytest.mark.parametrize("op", OPS)
def test_every_input_and_attribute_arrives(op, simulator, pypto):
    assert agrees(op, cases.not_default(op))


@pytest.mark.parametrize("op, name", OPTIONAL)
def test_an_optional_input_may_be_absent(op, name, simulator, pypto):
    x = cases.not_default(op) | {name: None}
    try:
        getattr(custom_pypto, op)(**cases.copied(x))
    except RuntimeError as rejected:  # this call needs it, by contract
        with pytest.raises(RuntimeError, match=f"^{re.escape(str(rejected))}$"):
            call(op, on_npu(x))
    else:
        assert agrees(op, x)


@pytest.mark.parametrize("layout_query, layout_key", cases.LAYOUTS, ids=cases.LAYOUT_IDS)
def test_limits_of_the_npu_programs_are_none_of_the_packages(
    layout_query, layout_key, simulator, pypto
):
    more = dict(layout_query=layout_query, layout_key=layout_key, dim=48, dtype=torch.float16)
    assert agrees("npu_lightning_indexer_pto", indexer_inputs([2, 1], [30, 17], **more))


def test_the_statistics_of_the_softmax_are_outputs_too(simulator, pypto):
    op = "npu_sparse_flash_attention_pto"
    x = inputs_of(op, (2, 1), (30, 17), on_npu=True, dtype=torch.bfloat16)
    got, expected = (
        getattr(custom_pypto, op)(**given, return_softmax_lse=True) for given in (on_npu(x), x)
    )
    assert len(got) == 3 and all(map(same, got, expected))


@pytest.mark.parametrize("op", OPS)
def test_tensors_may_be_views(op, simulator, pypto):
    """Each tensor in turn, in wider rows behind a storage offset."""
    x = cases.not_default(op)
    expected = call(op, cases.copied(x))
    views = 0
    for name, tensor in x.items():
        # one row has no other strides
        if not isinstance(tensor, torch.Tensor) or tensor.numel() == tensor.size(-1):
            continue
        wide = on_npu(x)
        shared = [n for n, other in x.items() if other is tensor]
        wide |= dict.fromkeys(shared, cases.in_a_wider_row(wide[name]))
        assert wide[name].storage_offset() and not wide[name].is_contiguous()
        try:
            got = call(op, wide)
        except RuntimeError as rejected:
            assert f"{name}.stride" in str(rejected)
            continue
        assert all(map(same, got, expected)), name
        views += 1
    assert views


@pytest.mark.parametrize("op", OPS)
def test_empty_tensors_are_no_problem(op, simulator, pypto):
    assert agrees(op, cases.inputs_of(op, (0, 0), (5, 3), on_npu=True, dtype=torch.bfloat16))


def test_outputs_without_elements_launch_nothing(simulator, pypto):
    with simulator.failing("aclnnAddCustomGetWorkspaceSize", "called"):
        x = torch.empty(0, 3).npu()
        assert custom_pypto.add_custom(x, x).shape == (0, 3)


@pytest.mark.parametrize(
    "op", [op for op in OPS if any(tuple(HALF) == x.dtypes for x in PROTOTYPES[op].inputs)]
)
def test_another_dtype_than_the_prototypes_is_rejected(op, simulator, pypto):
    x = inputs_of(op, (2, 1), (30, 17), on_npu=True, dtype=torch.float32)
    with pytest.raises(RuntimeError, match=rf"^{op}: \w+.dtype must be .* got float32"):
        call(op, on_npu(x))


def test_a_private_format_is_rejected(simulator):
    import torch_npu

    like = dict(dtype=torch.float16, device="npu")
    x = torch_npu.empty_with_format((64, 64), acl_format=29, **like)
    with pytest.raises(RuntimeError) as rejected:
        custom_pypto.add_custom(torch.zeros(64, 64, **like), x)
    assert str(rejected.value) == (
        "add_custom: y must be in format ND on an NPU, got aclFormat 29; cast it: "
        "torch_npu.npu_format_cast(x, 2)"
    )


def test_the_command_writes_a_package(tmp_path, simulator, pypto, monkeypatch):
    command = [sys.executable, "-m", "custom_pypto.simulation.ascend_host.kernel_package"]
    folder = str(tmp_path / "new" / "package")
    done = subprocess.run([*command, folder], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{folder}\n"), done.stderr
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", folder)
    assert agrees("add_custom", CALLS["add_custom"]())


# ---- failures ------------------------------------------------------------------------------------

X = torch.ones(3)


@pytest.mark.parametrize("phase", ["GetWorkspaceSize", ""], ids=["first", "second"])
def test_a_phase_that_fails_says_what_cann_says(phase, simulator, built):
    status = "161002" if phase else "361001"
    with (
        simulator.failing(f"aclnnQuantRowsPto{phase}", "no core is left"),
        pytest.raises(RuntimeError) as failed,
    ):
        call("npu_quant_rows_pto", on_npu(CALLS["npu_quant_rows_pto"]()))
    said = str(failed.value)
    assert said.startswith(
        f"npu_quant_rows_pto: aclnnQuantRowsPto{phase} in {built}/op_api/lib/libcust_opapi.so "
        f"failed with {status}: "
    )
    assert said.endswith("no core is left")
    assert agrees("npu_quant_rows_pto", CALLS["npu_quant_rows_pto"]())


def test_a_workspace_that_does_not_fit_frees_the_executor(simulator, monkeypatch):
    plan = simulator._plan
    monkeypatch.setattr(simulator, "_plan", lambda *given: (plan(*given)[0], 2**50))
    gc.collect()  # what other tests left would be freed meanwhile
    torch.npu.synchronize()
    before = torch.npu.memory_allocated()
    with pytest.raises(RuntimeError, match="out of memory"):
        custom_pypto.add_custom(X.npu(), X.npu())
    assert torch.npu.memory_allocated() == before


def test_without_a_stream_nothing_is_launched(simulator, monkeypatch):
    monkeypatch.setattr(torch.npu, "current_stream", lambda: SimpleNamespace(npu_stream=0))
    with (
        simulator.failing("aclnnAddCustom", "launched"),
        pytest.raises(RuntimeError, match="^add_custom: torch_npu gives no stream, .* failed;"),
    ):
        custom_pypto.add_custom(X.npu(), X.npu())


def test_without_a_package_the_error_names_the_remedy(monkeypatch):
    monkeypatch.delenv("ASCEND_CUSTOM_OPP_PATH", raising=False)
    monkeypatch.delenv("ASCEND_OPP_PATH", raising=False)
    monkeypatch.setenv("CUSTOM_PYPTO_EAGER", "aclnn")
    with pytest.raises(RuntimeError) as rejected:
        custom_pypto.add_custom(X.npu(), X.npu())
    assert str(rejected.value) == (
        "add_custom: CUSTOM_PYPTO_EAGER=aclnn needs a kernel package with AddCustom in "
        "ASCEND_CUSTOM_OPP_PATH or ASCEND_OPP_PATH/vendors; this package ships no kernels for "
        "CANN, and PyPTO needs none; one of your own is built from custom_pypto/graph/*.h, or set "
        "it to pypto"
    )


def test_a_foreign_package_is_not_called(tmp_path, built, simulator, monkeypatch):
    shutil.copytree(built, tmp_path / "foreign")
    (path,) = (tmp_path / "foreign").rglob("*.json")
    path.write_text(json.dumps(ALL | FOREIGN))
    op = "npu_lightning_indexer_pto"
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", f"{tmp_path}/foreign:{built}")
    with pytest.raises(RuntimeError, match="Indexer.* got x0, .*, x4; put a package built from"):
        getattr(custom_pypto, op)(**on_npu(CALLS[op]()))
    assert agrees("npu_quant_rows_pto", CALLS["npu_quant_rows_pto"]())  # this one it has
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", f"{built}:{tmp_path}/foreign")
    assert agrees(op, CALLS[op]())


def test_the_package_of_the_tutorial_runs_add_custom(tmp_path, built, simulator, monkeypatch):
    shutil.copytree(built, tmp_path / "tutorial")
    (path,) = (tmp_path / "tutorial").rglob("*.json")
    path.write_text(json.dumps(TUTORIAL))
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", f"{tmp_path}/tutorial")
    assert agrees("add_custom", CALLS["add_custom"]())
    with pytest.raises(RuntimeError, match="needs a kernel package with QuantRowsPto in"):
        custom_pypto.npu_quant_rows_pto(**on_npu(CALLS["npu_quant_rows_pto"]()))


@pytest.mark.parametrize("source", ["", "int aclnnAddCustomGetWorkspaceSize() {}"], ids=len)
def test_a_function_that_is_missing_is_named(tmp_path, source, monkeypatch):
    package(tmp_path, ALL)
    path = library(tmp_path, source)
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", str(tmp_path))
    monkeypatch.setenv("CUSTOM_PYPTO_EAGER", "aclnn")
    missing = "aclnnAddCustom" + ("" if source else "GetWorkspaceSize")
    with pytest.raises(RuntimeError, match=f"needs {path} has no function {missing};"):
        custom_pypto.add_custom(X.npu(), X.npu())


# ---- choice --------------------------------------------------------------------------------------


@pytest.fixture
def chosen(monkeypatch):
    """Which of the two launches each call took."""
    taken = []
    for module, name, label in ((npu, "_call", "pypto"), (Operator, "run", "aclnn")):
        right = getattr(module, name)

        def wrapped(*args, right=right, label=label, **kwargs):
            taken.append(label)
            return right(*args, **kwargs)

        monkeypatch.setattr(module, name, wrapped)
    return taken


@pytest.mark.parametrize(
    "asked, has_pypto, has_package, expected",
    [
        (None, True, True, "pypto"),
        (None, True, False, "pypto"),
        (None, False, True, "aclnn"),
        (None, False, False, None),
        ("", False, True, "aclnn"),
        ("auto", True, True, "pypto"),
        ("auto", False, True, "aclnn"),
        ("pypto", True, True, "pypto"),
        ("pypto", False, True, "pypto"),
        ("aclnn", True, True, "aclnn"),
        ("aclnn", False, False, None),
    ],
)
def test_the_variable_chooses_at_each_call(
    asked, has_pypto, has_package, expected, built, chosen, monkeypatch
):
    x = X.npu()
    if asked is None:
        monkeypatch.delenv("CUSTOM_PYPTO_EAGER", raising=False)
    else:
        monkeypatch.setenv("CUSTOM_PYPTO_EAGER", asked)
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", str(built) if has_package else "")
    if not has_pypto:
        problem = requirements.Problem("needs pypto", "pip install pypto")
        monkeypatch.setattr(npu, "_pypto_problem", lambda: problem)
    if expected:
        assert custom_pypto.add_custom(x, x).tolist() == [2, 2, 2]
        assert chosen == [expected]
    else:
        with pytest.raises(RuntimeError, match="a kernel package with AddCustom in"):
            custom_pypto.add_custom(x, x)
        assert chosen == []


def test_without_either_the_error_names_both_remedies(monkeypatch):
    monkeypatch.delenv("CUSTOM_PYPTO_EAGER", raising=False)
    monkeypatch.delenv("ASCEND_CUSTOM_OPP_PATH", raising=False)
    problem = requirements.Problem("needs pypto 0.2.0, found none", "pip install pypto==0.2.0")
    monkeypatch.setattr(npu, "_pypto_problem", lambda: problem)
    with pytest.raises(RuntimeError) as rejected:
        custom_pypto.add_custom(X.npu(), X.npu())
    assert str(rejected.value) == (
        "add_custom: an NPU needs pypto 0.2.0, found none, or a kernel package with AddCustom in "
        "ASCEND_CUSTOM_OPP_PATH or ASCEND_OPP_PATH/vendors; pip install pypto==0.2.0, or move the "
        "tensors to the CPU, which needs neither"
    )


@pytest.mark.parametrize("asked", ["ACLNN", "1", " "])
def test_another_value_is_rejected(asked, monkeypatch):
    monkeypatch.setenv("CUSTOM_PYPTO_EAGER", asked)
    with pytest.raises(ValueError) as rejected:
        custom_pypto.add_custom(X.npu(), X.npu())
    assert str(rejected.value) == (
        "custom_pypto: CUSTOM_PYPTO_EAGER must be auto (PyPTO where it is installed, else aclnn), "
        f"pypto or aclnn (a kernel package), got {asked!r}"
    )


def test_the_contract_is_checked_first(simulator):
    with pytest.raises(RuntimeError) as on_cpu:
        custom_pypto.add_custom(X, X.half())
    with (
        simulator.failing("aclnnAddCustomGetWorkspaceSize", "called"),
        pytest.raises(RuntimeError, match=f"^{re.escape(str(on_cpu.value))}$"),
    ):
        custom_pypto.add_custom(X.npu(), X.npu().half())


def test_the_report_says_that_the_package_works(simulator):
    report = custom_pypto.env.collect()
    assert report["npu"]["eager"] == "aclnn"
    for way in ("ops on the NPU", "ops on the NPU through aclnn"):
        assert report["ways"][way] == {"works": True, "missing": []}
