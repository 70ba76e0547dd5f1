"""Gradients of the lightning indexer against autograd in float64."""

import functools
import math

import pytest
import torch
from cases import DTYPES, LAYOUT_IDS, LAYOUTS
from cases.npu_lightning_indexer_grad_pto import inputs
from cases.npu_lightning_indexer_pto import inputs as forward_inputs
from numerics import assert_within_its_bound, reference

import custom_pypto

OP = "npu_lightning_indexer_grad_pto"
check = functools.partial(assert_within_its_bound, OP)
index = custom_pypto.npu_lightning_indexer_pto


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
    # of sums of products, in any order
    largest = (x[name].nan_to_num().abs().max() for name in ("query", "key", "weights"))
    atol = 2 * math.prod(x["query"].shape[-2:]) * 2**-24 * float(math.prod(largest))
    torch.testing.assert_close(values, expected, rtol=2 * torch.finfo(dtype).eps, atol=atol)
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
