"""Gradients of sparse attention against autograd in float64."""

import functools

import pytest
import torch
from cases import DTYPES, LAYOUT_IDS, LAYOUTS, without_nan
from cases.npu_sparse_flash_attention_grad_pto import inputs
from cases.npu_sparse_flash_attention_pto import inputs as forward_inputs
from numerics import reference
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import custom_pypto
from custom_pypto.reference import MODULES
from custom_pypto.reference.npu_sparse_flash_attention_grad_pto import (
    DIFFERENTIABLE,
    with_gradient,
)

OP = "npu_sparse_flash_attention_grad_pto"
grad = custom_pypto.npu_sparse_flash_attention_grad_pto
attend = custom_pypto.npu_sparse_flash_attention_pto


def check(x: dict) -> tuple:
    got, expected = grad(**x), reference.npu_sparse_flash_attention_grad_pto(**x)
    for name, one, other in zip(DIFFERENTIABLE, got, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype), name
        assert other.isfinite().all(), name
    error, bound = MODULES[OP].error(got, expected, x, x)
    assert error <= bound
    return got


def leaves(x: dict) -> dict:
    """The arguments of the forward, with gradients for those that have them."""
    return {
        name: tensor.detach().clone().requires_grad_()
        if name in DIFFERENTIABLE and tensor is not None
        else tensor
        for name, tensor in x.items()
    }


def backward(x: dict, d_out: torch.Tensor, op=attend) -> list:
    given = leaves(x)
    op(**given).backward(d_out)
    return [None if given[n] is None else given[n].grad for n in DIFFERENTIABLE]


CALLS = {
    "one-key": dict(lengths_query=[1], lengths_key=[1]),
    "ragged-and-empty": dict(lengths_query=[2, 0, 1], lengths_key=[70, 0, 33], sparse_count=40),
    "shorter-than-the-query": dict(lengths_query=[4, 3], lengths_key=[2, 3], sparse_count=4),
    "every-key": dict(lengths_query=[3, 2], lengths_key=[40, 9], sparse_count=40, sparse_mode=0),
    "several-blocks": dict(lengths_query=[40], lengths_key=[300], sparse_count=150),
    "own-value": dict(lengths_query=[3, 2], lengths_key=[40, 33], own_value=True),
    "no-rope": dict(lengths_query=[3, 2], lengths_key=[40, 33], rope=0),
    "sinks": dict(lengths_query=[3, 2], lengths_key=[40, 33], sinks=True),
    "strided": dict(lengths_query=[3, 2], lengths_key=[40, 33], strided=True),
    "hostile": dict(lengths_query=[5, 2], lengths_key=[40, 33], sparse_count=16, hostile=True),
    "one-head": dict(lengths_query=[3], lengths_key=[40], heads=1),
    "heads-17": dict(lengths_query=[3], lengths_key=[40], heads=17),
    "heads-129": dict(lengths_query=[2], lengths_key=[40], heads=129, latent=48, rope=32),
    "full-size": dict(lengths_query=[2], lengths_key=[300], heads=128, latent=512, rope=64),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout_query, layout_kv", LAYOUTS, ids=LAYOUT_IDS)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_autograd_in_float64(name, layout_query, layout_kv, dtype):
    check(inputs(**CALLS[name], layout_query=layout_query, layout_kv=layout_kv, dtype=dtype))


@pytest.mark.parametrize("name", ["ragged-and-empty", "own-value", "no-rope", "sinks"])
@pytest.mark.parametrize("statistics", [False, True])
def test_backward_through_the_forward_op_gives_these_gradients(name, statistics):
    sizes = dict(layout_query="TND", layout_kv="TND", **CALLS[name])
    x = inputs(**sizes)
    out, largest, total = attend(**forward_inputs(**sizes), return_softmax_lse=True)
    x |= dict(out=out, softmax_max=largest, softmax_sum=total)

    def out_of(**call):
        return attend(**call, return_softmax_lse=True)[0] if statistics else attend(**call)

    for one, other in zip(
        backward(forward_inputs(**sizes), x["d_out"], out_of), grad(**x), strict=True
    ):
        assert other.numel() == 0 if one is None else torch.equal(one, other)


def test_statistics_have_no_gradient():
    out, largest, total = attend(**leaves(forward_inputs([3], [40])), return_softmax_lse=True)
    assert out.requires_grad and not largest.requires_grad and not total.requires_grad


class Called(TorchDispatchMode):
    """The overloads that are called."""

    def __init__(self):
        super().__init__()
        self.overloads = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.overloads.append(str(function))
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("wanted", [False, True])
def test_the_forward_keeps_statistics_only_for_a_gradient(wanted):
    x = forward_inputs([3], [40])
    with Called() as called:
        attend(**leaves(x) if wanted else x)
        with torch.no_grad():
            attend(**leaves(x))
    names = [n for n in called.overloads if n.startswith("custom_pypto")]
    op = "custom_pypto.npu_sparse_flash_attention_pto"
    assert names == [f"{op}.softmax_lse" if wanted else f"{op}.default", f"{op}.default"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["TND", "BSND"])
def test_bits_do_not_depend_on_the_number_of_threads(dtype, layout):
    x = inputs([70, 5], [300, 40], sparse_count=100, heads=5, sinks=True, dtype=dtype,
               layout_query=layout, layout_kv=layout)  # fmt: skip
    results = []
    for threads in (1, 2, 5, 40):
        torch.set_num_threads(threads)
        results.append(grad(**x))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_no_bit(use_reentrant):
    x = forward_inputs([5, 2], [70, 33], sparse_count=40)
    d_out = torch.randn(x["query"].shape)

    def again(query, key, **others):
        call = functools.partial(attend, **others)
        return checkpoint(call, query, key, use_reentrant=use_reentrant)

    for one, other in zip(backward(x, d_out), backward(x, d_out, again), strict=True):
        assert one is other is None or torch.equal(one, other)


def test_rows_that_no_token_selects_get_zeros_whatever_they_hold():
    call = forward_inputs([2], [40], layout_kv="BSND")
    call["sparse_indices"] = call["sparse_indices"].clamp(max=19)
    for name in ("key", "key_rope"):
        call[name] = call[name].clone()
        call[name][:, 20:] = torch.nan
    _, d_key, _, _, d_rope, _ = check(with_gradient(call, torch.randn(call["query"].shape)))
    assert not d_key[:, 20:].any() and not d_rope[:, 20:].any()


def test_padding_gets_zeros_whatever_it_holds():
    x = inputs([2, 4], [40, 40])
    x["d_out"] = x["d_out"].clone()
    x["d_out"][0, 2:] = torch.nan
    d_query, *_ = check(x)
    assert not d_query[0, 2:].any()


def test_a_row_of_the_cache_gets_the_sum_over_sequences_that_share_it():
    x = without_nan(inputs([1, 1], [16, 16], sparse_count=4))
    call = forward_inputs([1, 1], [16, 16], sparse_count=4)
    call = without_nan(call | dict(block_table=torch.zeros_like(call["block_table"])))
    _, d_key, *_ = check(with_gradient(call, x["d_out"]))
    assert d_key[0].any() and not d_key[1:].any()


@pytest.mark.parametrize("lengths", [([0], [5]), ([2], [0]), ([0, 0], [3, 3])])
def test_without_tokens_or_keys_gradients_are_zeros(lengths):
    for gradient in check(inputs(*lengths)):
        assert not gradient.any()


def test_the_rounding_of_out_does_not_reach_the_query():
    """With a common mean of the latents, which D = d_out.out of a rounded output would not bear."""
    sizes = dict(sparse_count=2048, sparse_mode=0, heads=16, latent=512, rope=0)
    x = forward_inputs([2], [2048], layout_kv="BSND", **sizes)
    x |= dict(query=x["query"].bfloat16(), key=(x["key"] + 4).bfloat16())
    d_out = torch.randn(x["query"].shape).bfloat16()
    exact = x | dict(query=x["query"].float(), key=x["key"].float())
    (d_query, *_), (expected, *_) = backward(x, d_out), backward(exact, d_out.float())
    assert (d_query.float() - expected).norm() <= 4e-3 * expected.norm()
    # the difference of both D, of which each key's part is its probability
    rounding = attend(**x).float() - attend(**exact)
    of_delta = x["scale_value"] * (d_out * rounding).sum(-1, keepdim=True) * attend(**exact)
    assert of_delta[:, :2].norm() >= 0.1 * expected.norm()


def test_a_second_derivative_is_rejected():
    x = leaves(forward_inputs([2], [20]))
    (first,) = torch.autograd.grad(attend(**x).sum(), x["query"], create_graph=True)
    with pytest.raises(RuntimeError, match=f"derivative for custom_pypto::{OP} is not implemented"):
        first.sum().backward()


def test_a_paged_cache_without_a_gradient_is_rejected():
    x = leaves(forward_inputs([2], [20]))
    x["key"].requires_grad_(False)
    with pytest.raises(RuntimeError, match="key must require a gradient if another tensor does"):
        attend(**x).sum().backward()


def test_a_cache_that_was_written_since_is_rejected():
    x = leaves(forward_inputs([2], [20]))
    out = attend(**x)
    with torch.no_grad():
        x["key"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("name", ["ragged-and-empty", "own-value", "sinks"])
def test_opcheck(name):
    x = without_nan(inputs(**CALLS[name]))
    torch.library.opcheck(getattr(torch.ops.custom_pypto, OP).default, (), x)
    x = without_nan(forward_inputs(**CALLS[name]))
    torch.library.opcheck(
        torch.ops.custom_pypto.npu_sparse_flash_attention_pto.default, (), leaves(x)
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_forward_and_backward_compile_into_one_graph_each(dynamic):
    x = without_nan(forward_inputs([3, 2], [40, 33], sinks=True))
    d_out = torch.randn(x["query"].shape)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for one, other in zip(backward(x, d_out), backward(x, d_out, compiled), strict=True):
        assert one is other is None or torch.equal(one, other)
