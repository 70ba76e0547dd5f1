"""Gradients of the lightning indexer against autograd in float64."""

import pytest
import torch
from cases import DTYPES, LAYOUT_IDS, LAYOUTS, without_nan
from cases.npu_lightning_indexer_grad_pto import inputs
from cases.npu_lightning_indexer_pto import inputs as forward_inputs
from numerics import reference

import custom_pypto
from custom_pypto.reference import MODULES

OP = "npu_lightning_indexer_grad_pto"
grad = custom_pypto.npu_lightning_indexer_grad_pto
index = custom_pypto.npu_lightning_indexer_pto
DIFFERENTIABLE = ("query", "key", "weights")


def check(x: dict) -> tuple:
    got, expected = grad(**x), reference.npu_lightning_indexer_grad_pto(**x)
    for name, one, other in zip(DIFFERENTIABLE, got, expected, strict=True):
        assert (one.shape, one.dtype) == (x[name].shape, x[name].dtype), name
        assert other.isfinite().all(), name
    error, bound = MODULES[OP].error(got, expected, x, x)
    assert error <= bound
    return got


def leaves(x: dict) -> dict:
    """The arguments of the forward, with gradients for those that have them."""
    return {
        name: y.detach().clone().requires_grad_() if name in DIFFERENTIABLE else y
        for name, y in x.items()
    }


def backward(x: dict, d_values: torch.Tensor, op=index) -> list:
    given = leaves(x)
    _, values = op(**given, return_value=True)
    values.backward(d_values)
    return [given[name].grad for name in DIFFERENTIABLE]


CALLS = {
    "one-key": dict(lengths_query=[1], lengths_key=[1]),
    "ragged-and-empty": dict(lengths_query=[2, 0, 1], lengths_key=[70, 0, 33], sparse_count=40),
    "shorter-than-the-query": dict(lengths_query=[4, 3], lengths_key=[2, 3], sparse_count=4),
    "every-key": dict(lengths_query=[3, 2], lengths_key=[40, 9], sparse_count=40, sparse_mode=0),
    "several-blocks": dict(lengths_query=[40], lengths_key=[300], sparse_count=150),
    "compressed": dict(lengths_query=[3, 2], lengths_key=[83, 21], cmp_ratio=4),
    "strided": dict(lengths_query=[3, 2], lengths_key=[40, 33], strided=True),
    "hostile": dict(lengths_query=[5, 2], lengths_key=[40, 33], sparse_count=16, hostile=True),
    "integers": dict(lengths_query=[5, 2], lengths_key=[40, 33], integers=True),
    "weights-of-float32": dict(
        lengths_query=[2], lengths_key=[30], weights_dtype=torch.float32, dy_dtype=torch.float32
    ),
    "one-head": dict(lengths_query=[3], lengths_key=[40], heads=1),
    "heads-129": dict(lengths_query=[2], lengths_key=[40], heads=129, dim=48),
    "full-size": dict(lengths_query=[2], lengths_key=[300], heads=64, dim=128, sparse_count=128),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout_query, layout_key", LAYOUTS, ids=LAYOUT_IDS)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_autograd_in_float64(name, layout_query, layout_key, dtype):
    check(inputs(**CALLS[name], layout_query=layout_query, layout_key=layout_key, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout_query, layout_key", LAYOUTS, ids=LAYOUT_IDS)
@pytest.mark.parametrize("name", ["ragged-and-empty", "compressed", "integers"])
def test_the_values_are_the_scores_of_the_indices(name, layout_query, layout_key, dtype):
    x = forward_inputs(**CALLS[name], layout_query=layout_query, layout_key=layout_key, dtype=dtype)
    indices, values = index(**x, return_value=True)
    assert torch.equal(indices, index(**x))
    found, expected = reference.npu_lightning_indexer_pto(**x, return_value=True)
    assert torch.equal(indices, found)
    torch.testing.assert_close(values, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    assert torch.equal(values == -torch.inf, indices == -1)


def test_values_of_split_keys_are_those_of_whole_ones():
    x = forward_inputs([1, 2], [5000, 3000], sparse_count=64)
    torch.set_num_threads(1)
    expected = index(**x, return_value=True)
    torch.set_num_threads(7)  # splits the keys
    assert all(map(torch.equal, index(**x, return_value=True), expected))


def test_a_score_that_is_not_a_number_ranks_first_in_the_values():
    x = forward_inputs([1], [20], layout_key="BSND", integers=True)
    x["key"][0, 7] = torch.nan
    indices, values = index(**x, return_value=True)
    assert indices[0, 0, 0, 0] == 7
    assert values[0, 0, 0, 0].isnan() and not values[0, 0, 0, 1:].isnan().any()


@pytest.mark.parametrize("name", ["ragged-and-empty", "every-key", "compressed"])
@pytest.mark.parametrize("layout", ["TND", "BSND"])
def test_backward_through_the_scores_gives_these_gradients(name, layout):
    keywords = dict(**CALLS[name], layout_query=layout, layout_key=layout)
    x = inputs(**keywords)
    d_values = x["dy"].nan_to_num(0)
    expected = grad(**x | dict(dy=d_values))
    assert all(map(torch.equal, backward(forward_inputs(**keywords), d_values), expected))


def test_without_a_wanted_gradient_nothing_is_kept():
    x = forward_inputs([3], [40])
    with torch.no_grad():
        assert not any(y.requires_grad for y in index(**leaves(x), return_value=True))
    indices, values = index(**leaves(x), return_value=True)
    assert values.requires_grad and not indices.requires_grad
    assert not index(**leaves(x)).requires_grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["TND", "BSND"])
def test_bits_do_not_depend_on_the_number_of_threads(dtype, layout):
    x = inputs([70, 5], [300, 40], sparse_count=100, heads=5, dtype=dtype,
               layout_query=layout, layout_key=layout)  # fmt: skip
    results = []
    for threads in (1, 2, 5, 40):
        torch.set_num_threads(threads)
        results.append(grad(**x))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_keys_that_no_token_selects_get_zeros_whatever_they_hold():
    x = inputs([2], [40], layout_key="BSND")
    x["sparse_indices"] = x["sparse_indices"].clamp(max=19)
    x["key"] = x["key"].clone()
    x["key"][:, 20:] = torch.nan
    _, d_key, _ = check(x)
    assert d_key[:, :20].any() and not d_key[:, 20:].any()


def test_a_product_of_zero_has_no_gradient():
    """As relu in torch."""
    x = inputs([1], [1], heads=1, dim=16, sparse_count=1, layout_key="BSND")
    x["key"] = torch.zeros_like(x["key"])
    assert not any(gradient.any() for gradient in check(x))


@pytest.mark.parametrize("lengths", [([0], [5]), ([2], [0]), ([0, 0], [3, 3])])
def test_without_tokens_or_keys_gradients_are_zeros(lengths):
    for gradient in check(inputs(*lengths)):
        assert not gradient.any()


def test_a_second_derivative_is_rejected():
    x = leaves(forward_inputs([2], [20]))
    _, values = index(**x, return_value=True)
    total = values[values > -torch.inf].sum()
    (first,) = torch.autograd.grad(total, x["query"], create_graph=True)
    with pytest.raises(RuntimeError, match=f"derivative for custom_pypto::{OP} is not implemented"):
        first.sum().backward()


def test_a_paged_cache_without_a_gradient_is_rejected():
    x = leaves(forward_inputs([2], [20]))
    x["key"].requires_grad_(False)
    _, values = index(**x, return_value=True)
    with pytest.raises(RuntimeError, match="key must require a gradient if another tensor does"):
        values.sum().backward()


def test_opcheck_of_the_forward():
    x = leaves(without_nan(forward_inputs([3, 2], [40, 33], sparse_count=4)))
    op = torch.ops.custom_pypto.npu_lightning_indexer_pto.return_value
    # its fourth test adds the outputs up, which fails for integers
    tests = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(op, (), x | dict(return_value=True), test_utils=tests)


@pytest.mark.parametrize("dynamic", [False, True])
def test_forward_and_backward_compile_into_one_graph_each(dynamic):
    x = without_nan(forward_inputs([3, 2], [40, 33], sparse_count=4))
    d_values = torch.randn(*x["query"].shape[:2], 1, 4)
    compiled = torch.compile(index, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    expected = backward(x, d_values)
    assert all(map(torch.equal, backward(x, d_values, compiled), expected))
