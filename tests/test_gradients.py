"""Gradients through the ops that have some: those of the gradient ops, and what autograd must know.

tests/test_npu_sparse_flash_attention_grad_pto.py and tests/test_npu_lightning_indexer_grad_pto.py
compare the gradient ops with float64.
"""

import functools

import pytest
import torch
from cases import inputs_of, of, without_nan
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import custom_pypto
from custom_pypto.reference.npu_sparse_flash_attention_grad_pto import (
    DIFFERENTIABLE as OF_ATTENTION,
)
from custom_pypto.schemas import overload

ATTEND, INDEX = "npu_sparse_flash_attention_pto", "npu_lightning_indexer_pto"
LEAVES = {ATTEND: OF_ATTENTION, INDEX: ("query", "key", "weights")}
GRADIENT = {op: op.replace("_pto", "_grad_pto") for op in LEAVES}
each_op = pytest.mark.parametrize("op", LEAVES)


def leaves(op: str, x: dict) -> dict:
    """The arguments of a call, with gradients for those that have them."""
    return {
        name: y.detach().clone().requires_grad_() if name in LEAVES[op] and y is not None else y
        for name, y in x.items()
    }


def out_of(op: str, x: dict, run=None, statistics: bool = False) -> Tensor:
    """What gradients flow through."""
    run = run or getattr(custom_pypto, op)
    if op == INDEX:
        return run(**x, return_value=True)[1]
    return run(**x, return_softmax_lse=True)[0] if statistics else run(**x)


def backward(op: str, x: dict, d_out: Tensor, run=None, statistics: bool = False) -> list:
    given = leaves(op, x)
    out_of(op, given, run, statistics).backward(d_out)
    return [None if given[name] is None else given[name].grad for name in LEAVES[op]]


def assert_same(got: list, expected) -> None:
    for one, other in zip(got, expected, strict=True):
        if one is None:  # not a tensor of this call
            assert other is None or not other.numel()
        else:
            assert torch.equal(one, other)


CALLS = {
    "ragged-and-empty": dict(lengths_query=[2, 0, 1], lengths_key=[70, 0, 33], sparse_count=40),
    "every-key": dict(lengths_query=[3, 2], lengths_key=[40, 9], sparse_count=40, sparse_mode=0),
}
OF_ONE = {
    ATTEND: {name: {name.replace("-", "_"): True} for name in ("own-value", "sinks")}
    | {"no-rope": dict(rope=0), "statistics": {}},
    INDEX: {"compressed": dict(cmp_ratio=2)},
}
ROWS = [
    pytest.param(op, CALLS["ragged-and-empty"] | more, id=f"{op}-{name}")
    for op in LEAVES
    for name, more in (CALLS | OF_ONE[op]).items()
]


@pytest.mark.parametrize("layout", ["TND", "BSND"])
@pytest.mark.parametrize("op, arguments", ROWS)
def test_backward_gives_the_gradients_of_the_gradient_op(op, arguments, layout, request):
    keys = "layout_kv" if op == ATTEND else "layout_key"
    arguments = dict(layout_query=layout, **{keys: layout}, **arguments)
    x, expected = inputs_of(op, **arguments), of(GRADIENT[op]).inputs(**arguments)
    if op == ATTEND:
        forward = custom_pypto.npu_sparse_flash_attention_pto
        names = ("out", "softmax_max", "softmax_sum")
        expected |= dict(zip(names, forward(**x, return_softmax_lse=True), strict=True))
        d_out = expected["d_out"]
    else:
        d_out = expected["dy"] = expected["dy"].nan_to_num(0)
    got = backward(op, x, d_out, statistics="statistics" in request.node.name)
    assert_same(got, getattr(custom_pypto, GRADIENT[op])(**expected))


def test_indices_and_statistics_have_no_gradient():
    out, largest, total = custom_pypto.npu_sparse_flash_attention_pto(
        **leaves(ATTEND, inputs_of(ATTEND)), return_softmax_lse=True
    )
    assert out.requires_grad and not largest.requires_grad and not total.requires_grad
    x = leaves(INDEX, inputs_of(INDEX))
    indices, values = custom_pypto.npu_lightning_indexer_pto(**x, return_value=True)
    assert values.requires_grad and not indices.requires_grad
    assert not custom_pypto.npu_lightning_indexer_pto(**x).requires_grad
    with torch.no_grad():
        assert not out_of(INDEX, x).requires_grad


class Called(TorchDispatchMode):
    """The ops that are called, and whether they return statistics."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls.append((function, bool((kwargs or {}).get("return_softmax_lse"))))
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("wanted", [False, True])
def test_the_forward_keeps_statistics_only_for_a_gradient(wanted):
    x = inputs_of(ATTEND)
    with Called() as called:
        out_of(ATTEND, leaves(ATTEND, x) if wanted else x)
        with torch.no_grad():
            out_of(ATTEND, leaves(ATTEND, x))
    calls = [(op, asked) for op, asked in called.calls if op.namespace == "custom_pypto"]
    assert calls == [(overload(ATTEND), wanted), (overload(ATTEND), False)]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_no_bit(use_reentrant):
    x = inputs_of(ATTEND, [5, 2], [70, 33], sparse_count=40)
    d_out = torch.randn(x["query"].shape)

    def again(query, key, **others):
        call = functools.partial(custom_pypto.npu_sparse_flash_attention_pto, **others)
        return checkpoint(call, query, key, use_reentrant=use_reentrant)

    assert_same(backward(ATTEND, x, d_out), backward(ATTEND, x, d_out, again))


@each_op
def test_a_second_derivative_is_rejected(op):
    x = leaves(op, inputs_of(op))
    out = out_of(op, x)
    total = out[out > -torch.inf].sum()
    (first,) = torch.autograd.grad(total, x["query"], create_graph=True)
    words = f"derivative for custom_pypto::{GRADIENT[op]} is not implemented"
    with pytest.raises(RuntimeError, match=words):
        first.sum().backward()


@each_op
def test_a_paged_cache_without_a_gradient_is_rejected(op):
    x = leaves(op, inputs_of(op))
    x["key"].requires_grad_(False)
    with pytest.raises(RuntimeError, match="key must require a gradient if another tensor does"):
        out_of(op, x).sum().backward()


def test_a_cache_that_was_written_since_is_rejected():
    x = leaves(ATTEND, inputs_of(ATTEND))
    out = out_of(ATTEND, x)
    with torch.no_grad():
        x["key"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@each_op
def test_the_op_is_registered_as_torch_expects(op):
    x = leaves(op, without_nan(inputs_of(op, [3, 2], [40, 33], sparse_count=4)))
    if op == ATTEND:
        torch.library.opcheck(overload(op), (), x)
        return
    # its fourth test adds the outputs up, which fails for integers
    tests = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(overload(op), (), x | dict(return_value=True), test_utils=tests)


@pytest.mark.parametrize("dynamic", [False, True])
@each_op
def test_forward_and_backward_compile_into_one_graph_each(op, dynamic):
    sinks = dict(sinks=True) if op == ATTEND else {}
    x = without_nan(inputs_of(op, [3, 2], [40, 33], sparse_count=4, **sinks))
    d_out = torch.randn(out_of(op, x).shape)
    run = getattr(custom_pypto, op)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    assert_same(backward(op, x, d_out), backward(op, x, d_out, compiled))
