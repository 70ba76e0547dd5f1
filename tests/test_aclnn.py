"""Eager calls through aclnn, on the host stand-in for CANN and a kernel package built for it."""

import contextlib
import ctypes
import functools
import gc
import itertools
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
from kernel_package import ALL, TUTORIAL, library, package
from memory import FLAT, growth
from npu_calls import CALLS, assert_replays_follow, changed, on_npu, same
from torch.utils._pytree import tree_leaves

import custom_pypto
from custom_pypto import npu
from custom_pypto.descriptions import OPS
from custom_pypto.graph.prototypes import prototypes
from custom_pypto.npu import aclnn
from custom_pypto.npu.aclnn import Operator

pytestmark = pytest.mark.ascend_host

PROTOTYPES = {prototype.name: prototype for prototype in prototypes()}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A package with all operators, written once."""
    from custom_pypto.simulation.ascend_host import kernel_package

    return kernel_package.build(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def stand_in(built, monkeypatch):
    """The module of the package's computation, in a process that calls through aclnn."""
    from custom_pypto.simulation.ascend_host import kernel_package

    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", str(built))
    monkeypatch.setenv("CUSTOM_PYPTO_EAGER", "aclnn")
    nothing = dict(tensors=0, executors=0, plans=0)
    assert kernel_package.live() == nothing
    yield kernel_package
    assert kernel_package.live() == nothing  # after every test, whatever failed in it


@pytest.fixture
def pypto(monkeypatch):
    """Calls through PyPTO fail the test."""

    def launch(*_):
        raise AssertionError("PyPTO was called")

    for op in OPS:
        monkeypatch.setattr(npu._module(op), "kernel_call", launch)


def written(op: str) -> list[str]:
    return [x.name for x in PROTOTYPES[op].outputs if x in PROTOTYPES[op].inputs]


def call(op: str, x: dict) -> list[torch.Tensor]:
    """What the op returns, and what it has written."""
    returned = tree_leaves(getattr(custom_pypto, op)(**x))
    return [tensor for tensor in returned if tensor is not None] + [x[n] for n in written(op)]


def agrees(op: str, x: dict) -> bool:
    """Whether the call equals that on the CPU, to the bit, and writes what that writes."""
    given = on_npu(x)
    got = call(op, given)
    assert all(tensor.device.type == "npu" for tensor in got)
    expected = call(op, cases.copied(x))
    return len(got) == len(expected) and all(map(same, got, expected))


OPTIONAL = [
    (p.op, x.name)
    for p in PROTOTYPES.values()
    if not p.overload
    for x in p.inputs
    if x.kind == "optional"
]
HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("op", OPS)
def test_an_op_computes_what_the_package_does(op, dtype, stand_in, pypto):
    assert agrees(op, inputs_of(op, (2, 1), (30, 17), on_npu=True, dtype=HALF[dtype]))


@pytest.mark.parametrize("op", OPS)
def test_every_input_and_attribute_arrives(op, stand_in, pypto):
    assert agrees(op, cases.not_default(op))


@pytest.mark.parametrize("op, name", OPTIONAL)
def test_an_optional_input_may_be_absent(op, name, stand_in, pypto):
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
    layout_query, layout_key, stand_in, pypto
):
    more = dict(layout_query=layout_query, layout_key=layout_key, dim=48, dtype=torch.float16)
    assert agrees("npu_lightning_indexer_pto", indexer_inputs([2, 1], [30, 17], **more))


def test_the_statistics_of_the_softmax_are_outputs_of_another_operator(stand_in, pypto):
    op = "npu_sparse_flash_attention_pto"
    x = inputs_of(op, (2, 1), (30, 17), on_npu=True, dtype=torch.bfloat16)
    got, expected = (
        getattr(custom_pypto, op)(**given, return_softmax_lse=True) for given in (on_npu(x), x)
    )
    assert len(got) == 3 and all(map(same, got, expected))


@pytest.mark.parametrize("op", OPS)
def test_tensors_may_be_views(op, stand_in, pypto):
    """Each tensor in turn, in wider rows behind a storage offset."""
    x = cases.not_default(op)
    expected = call(op, cases.copied(x))
    views = 0
    for name, tensor in x.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2:
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
def test_empty_tensors_are_no_problem(op, stand_in, pypto):
    assert agrees(op, cases.inputs_of(op, (0, 0), (5, 3), on_npu=True, dtype=torch.bfloat16))


def test_outputs_without_elements_launch_nothing(stand_in, pypto):
    with stand_in.failing("aclnnAddCustomGetWorkspaceSize", "called"):
        x = torch.empty(0, 3).npu()
        assert custom_pypto.add_custom(x, x).shape == (0, 3)


@pytest.mark.parametrize(
    "op", [op for op in OPS if any(tuple(HALF) == x.dtypes for x in PROTOTYPES[op].inputs)]
)
def test_another_dtype_than_the_prototypes_is_rejected(op, stand_in, pypto):
    x = inputs_of(op, (2, 1), (30, 17), on_npu=True, dtype=torch.float32)
    with pytest.raises(RuntimeError, match=rf"^{op}: \w+.dtype must be .* got float32"):
        call(op, on_npu(x))


def test_a_private_format_is_rejected(stand_in):
    import torch_npu

    like = dict(dtype=torch.float16, device="npu")
    x = torch_npu.empty_with_format((64, 64), acl_format=29, **like)
    with pytest.raises(RuntimeError) as rejected:
        custom_pypto.add_custom(torch.zeros(64, 64, **like), x)
    assert str(rejected.value) == (
        "add_custom: other must be in format ND on an NPU, got aclFormat 29; cast it: "
        "torch_npu.npu_format_cast(x, 2)"
    )


def test_the_command_writes_a_package(tmp_path, stand_in, pypto, monkeypatch):
    command = [sys.executable, "-m", "custom_pypto.simulation.ascend_host.kernel_package"]
    folder = str(tmp_path / "new" / "package")
    done = subprocess.run([*command, folder], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{folder}\n"), done.stderr
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", folder)
    assert agrees("add_custom", CALLS["add_custom"]())


# ---- capture -------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_a_captured_call_runs_at_every_replay_and_not_before(op, stand_in, pypto):
    first = CALLS[op]()
    second = changed(op)
    static = on_npu(first)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        captured = call(op, static)
    assert all(same(static[name], first[name]) for name in written(op))
    torch.full((2**20,), 7, dtype=torch.uint8).npu()  # takes memory that is free
    assert_replays_follow(graph, functools.partial(call, op), static, captured, [second, first])


def test_a_compiled_call_is_captured(stand_in, pypto, monkeypatch):
    import torchair

    torchair.get_npu_backend()  # fails if it is called for the first time after the graph below
    # torchair's buffers for inputs would be filled in every replay
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)

    def step(x, slots, cache, scales):
        custom_pypto.npu_quant_index_update_pto(x * 2, slots, cache, scales)
        return custom_pypto.npu_quant_rows_pto(x + 1)[0]

    x = CALLS["npu_quant_index_update_pto"]()
    arguments = [x[name] for name in ("x", "slots", "cache", "scale_cache")]
    device = [tensor.npu() for tensor in arguments]
    compiled = torch.compile(step, backend="npugraph_ex", fullgraph=True, dynamic=False)
    for _ in range(3):
        assert same(compiled(*device), step(*arguments))
        assert all(map(same, device, arguments))
        arguments[0].mul_(-0.5)
        device[0].mul_(-0.5)


# ---- failures ------------------------------------------------------------------------------------

X = torch.ones(3)


@pytest.mark.parametrize("phase", ["GetWorkspaceSize", ""], ids=["first", "second"])
def test_a_phase_that_fails_says_what_cann_says(phase, stand_in, built):
    status = "161002" if phase else "361001"
    with (
        stand_in.failing(f"aclnnQuantRowsPto{phase}", "no core is left"),
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


def test_a_workspace_that_does_not_fit_frees_the_executor(stand_in, monkeypatch):
    plan = stand_in._plan
    monkeypatch.setattr(stand_in, "_plan", lambda *given: (plan(*given)[0], 2**50))
    before = torch.npu.memory_allocated()
    with pytest.raises(RuntimeError, match="out of memory"):
        custom_pypto.add_custom(X.npu(), X.npu())
    assert torch.npu.memory_allocated() == before


def test_without_a_stream_nothing_is_launched(stand_in, monkeypatch):
    monkeypatch.setattr(torch.npu, "current_stream", lambda: SimpleNamespace(npu_stream=0))
    with (
        stand_in.failing("aclnnAddCustom", "launched"),
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
        "ASCEND_CUSTOM_OPP_PATH or ASCEND_OPP_PATH/vendors; install one, built from "
        "custom_pypto/graph/*.h, or set it to pypto"
    )


def test_a_foreign_package_is_not_called(tmp_path, built, stand_in, monkeypatch):
    shutil.copytree(built, tmp_path / "foreign")
    (path,) = (tmp_path / "foreign").rglob("*.json")
    path.write_text(json.dumps(ALL | TUTORIAL))
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", f"{tmp_path}/foreign:{built}")
    with pytest.raises(RuntimeError, match="AddCustom in .* got x, y; put a package built from"):
        custom_pypto.add_custom(X.npu(), X.npu())
    assert agrees("npu_quant_rows_pto", CALLS["npu_quant_rows_pto"]())  # this one it has
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", f"{built}:{tmp_path}/foreign")
    assert agrees("add_custom", CALLS["add_custom"]())


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
        problem = {"what": "needs pypto", "remedy": "pip install pypto"}
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
    problem = {"what": "needs pypto 0.2.0, found none", "remedy": "pip install pypto==0.2.0"}
    monkeypatch.setattr(npu, "_pypto_problem", lambda: problem)
    with pytest.raises(RuntimeError) as rejected:
        custom_pypto.add_custom(X.npu(), X.npu())
    assert str(rejected.value) == (
        "add_custom: an NPU needs pypto 0.2.0, found none, or a kernel package with AddCustom in "
        "ASCEND_CUSTOM_OPP_PATH or ASCEND_OPP_PATH/vendors; pip install pypto==0.2.0, or install "
        "one, built from custom_pypto/graph/*.h, or move the tensors to the CPU, which needs "
        "neither"
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


def test_the_contract_is_checked_first(stand_in):
    with pytest.raises(RuntimeError) as on_cpu:
        custom_pypto.add_custom(X, X.half())
    with (
        stand_in.failing("aclnnAddCustomGetWorkspaceSize", "called"),
        pytest.raises(RuntimeError, match=f"^{re.escape(str(on_cpu.value))}$"),
    ):
        custom_pypto.add_custom(X.npu(), X.npu().half())


def test_the_report_says_that_the_package_works(stand_in):
    report = custom_pypto.env.collect()
    assert report["npu"]["eager"] == "aclnn"
    for way in ("ops on the NPU", "ops on the NPU through aclnn"):
        assert report["ways"][way] == {"works": True, "missing": []}


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [None, "GetWorkspaceSize", ""])
def test_ten_thousand_calls_leave_nothing(fails, stand_in):
    x = on_npu(CALLS["npu_quant_rows_pto"]())

    def once():
        custom_pypto.npu_quant_rows_pto(**x)

    def caught():
        with contextlib.suppress(RuntimeError):
            once()

    once()
    gc.collect()  # of earlier tests
    before = torch.npu.memory_allocated()
    if fails is None:
        assert growth(once, 10_000) < FLAT
    else:
        with stand_in.failing(f"aclnnQuantRowsPto{fails}", "no"):
            assert growth(caught, 10_000) < FLAT
    assert torch.npu.memory_allocated() == before
    assert stand_in.live() == dict(tensors=0, executors=0, plans=0)


# ---- mistakes that the tests above must find -----------------------------------------------------


def is_found(op: str, x: dict) -> bool:
    try:
        return not agrees(op, x)
    except RuntimeError as error:
        assert "failed with" in str(error)
        return True


NEXT_TO = [
    (op, one.name, other.name)
    for op in OPS
    if op != "add_custom"  # whose result stays the same
    for one, other in itertools.pairwise(PROTOTYPES[op].inputs)
    if {one.name, other.name} != {"key_dequant_scale", "value_dequant_scale"}  # always absent
]
ATTRIBUTES = [(op, i) for op in OPS for i in range(len(PROTOTYPES[op].attributes))]


@pytest.mark.parametrize("op, one, other", NEXT_TO)
def test_swapped_inputs_are_found(op, one, other, stand_in, monkeypatch):
    right = Operator._call
    i = [x.name for x in PROTOTYPES[op].inputs].index(one)

    def wrong(self, found, inputs, *others):
        inputs[i], inputs[i + 1] = inputs[i + 1], inputs[i]
        right(self, found, inputs, *others)

    monkeypatch.setattr(Operator, "_call", wrong)
    assert is_found(op, cases.not_default(op))


@pytest.mark.parametrize("op, i", ATTRIBUTES)
def test_a_dropped_attribute_is_found(op, i, stand_in, monkeypatch):
    right = Operator._attributes
    default = PROTOTYPES[op].attributes[i].default

    def wrong(self, arguments):
        values = right(self, arguments)
        other = default.encode() if isinstance(default, str) else default
        if other in (None, values[i]):  # there is no default, or the contract allows only that
            other = b"" if isinstance(values[i], bytes) else values[i] + 1
        values[i] = other
        return values

    monkeypatch.setattr(Operator, "_attributes", wrong)
    assert is_found(op, cases.not_default(op))


def test_contiguous_strides_for_a_view_are_found(stand_in, monkeypatch):
    x = CALLS["npu_quant_rows_pto"]()
    expected = call("npu_quant_rows_pto", x)
    view = on_npu(x) | {"x": cases.in_a_wider_row(x["x"].npu())}
    assert all(map(same, call("npu_quant_rows_pto", view), expected))
    right = aclnn._Cann.described

    def wrong(self, tensor):
        strides = torch.empty(tensor.size(), device="meta").stride()
        return right(self, tensor.as_strided(tensor.size(), strides))

    monkeypatch.setattr(aclnn._Cann, "described", wrong)
    assert not all(map(same, call("npu_quant_rows_pto", view), expected))


@pytest.mark.parametrize(
    "mistake",
    ["workspace of another size", "no workspace", "tensor freed early", "executor used twice"],
)
def test_the_stand_in_rejects_what_cann_does_not_survive(mistake, stand_in, monkeypatch):
    right = Operator.functions

    def functions(self):
        found = right(self)

        def second(workspace, size, executor, stream):
            if mistake == "workspace of another size":
                size = ctypes.c_uint64(size.value - 1)
            if mistake == "no workspace":
                workspace = None
            if mistake == "tensor freed early":
                extra.append(base.aclDestroyTensor(created[-1]))
            status = found.second(workspace, size, executor, stream)
            if mistake == "executor used twice":
                status = found.second(workspace, size, executor, stream)
            return status

        return found._replace(second=second)

    created, extra, base = [], [], aclnn._cann().base
    described = aclnn._Cann.described

    def recorded(self, tensor):
        created.append(described(self, tensor))
        return created[-1]

    monkeypatch.setattr(aclnn._Cann, "described", recorded)
    monkeypatch.setattr(Operator, "functions", functions)
    with pytest.raises(RuntimeError, match="failed with 161002: .*"):
        call("npu_quant_rows_pto", on_npu(CALLS["npu_quant_rows_pto"]()))
