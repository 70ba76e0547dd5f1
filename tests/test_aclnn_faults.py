"""Captured calls through aclnn, their memory, and mistakes that the tests must find."""

import contextlib
import ctypes
import functools
import gc
import itertools

import cases
import pytest
import torch
from cases import written
from kernel_package import (  # noqa: F401, fixtures
    built_package,
    calls_through_aclnn,
    no_calls_through_pypto,
)
from npu_calls import (
    CALLS,
    PROTOTYPES,
    agrees,
    assert_replays_follow,
    call,
    changed,
    on_npu,
    same,
)
from processes import FLAT, growth

import custom_pypto
from custom_pypto.descriptions import OPS
from custom_pypto.npu import aclnn
from custom_pypto.npu.aclnn import Operator

pytestmark = pytest.mark.ascend_host

# ---- capture -------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_a_captured_call_runs_at_every_replay_and_not_before(op, simulator, pypto):
    first = CALLS[op]()
    second = changed(op)
    static = on_npu(first)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        captured = call(op, static)
    assert all(same(static[name], first[name]) for name in written(op))
    torch.full((2**20,), 7, dtype=torch.uint8).npu()  # takes memory that is free
    assert_replays_follow(graph, functools.partial(call, op), static, captured, [second, first])


def test_a_compiled_call_is_captured(simulator, pypto, monkeypatch):
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


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("fails", [None, "GetWorkspaceSize", ""])
def test_ten_thousand_calls_leave_nothing(fails, simulator):
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
        with simulator.failing(f"aclnnQuantRowsPto{fails}", "no"):
            assert growth(caught, 10_000) < FLAT
    assert torch.npu.memory_allocated() == before
    assert simulator.live() == dict(tensors=0, executors=0, plans=0)


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
    if PROTOTYPES[op].type != "AddCustom"  # whose result stays the same
    for one, other in itertools.pairwise(PROTOTYPES[op].inputs)
    if {one.name, other.name} != {"key_dequant_scale", "value_dequant_scale"}  # always absent
]
ATTRIBUTES = [(op, i) for op in OPS for i in range(len(PROTOTYPES[op].attributes))]


@pytest.mark.parametrize("op, one, other", NEXT_TO)
def test_swapped_inputs_are_found(op, one, other, simulator, monkeypatch):
    right = Operator._call
    i = [x.name for x in PROTOTYPES[op].inputs].index(one)

    def wrong(self, found, inputs, *others):
        inputs[i], inputs[i + 1] = inputs[i + 1], inputs[i]
        right(self, found, inputs, *others)

    monkeypatch.setattr(Operator, "_call", wrong)
    assert is_found(op, cases.not_default(op))


@pytest.mark.parametrize("op, i", ATTRIBUTES)
def test_a_dropped_attribute_is_found(op, i, simulator, monkeypatch):
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


def test_contiguous_strides_for_a_view_are_found(simulator, monkeypatch):
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
def test_the_simulator_rejects_what_cann_does_not_survive(mistake, simulator, monkeypatch):
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
