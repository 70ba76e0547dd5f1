"""Gradients of sparse attention against autograd in float64."""

import functools

import pytest
import torch
from cases import DTYPES, LAYOUT_IDS, LAYOUTS, without_nan
from cases.npu_sparse_flash_attention_grad_pto import inputs
from cases.npu_sparse_flash_attention_pto import inputs as forward_inputs
from numerics import assert_within_its_bound

import custom_pypto
from custom_pypto.reference.npu_sparse_flash_attention_grad_pto import (
    with_gradient,
)

OP = "npu_sparse_flash_attention_grad_pto"
check = functools.partial(assert_within_its_bound, OP)
attend = custom_pypto.npu_sparse_flash_attention_pto


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


def d_query_of(x: dict, d_out: torch.Tensor) -> torch.Tensor:
    query = x["query"].clone().requires_grad_()
    key = x["key"].clone().requires_grad_()
    attend(**x | dict(query=query, key=key)).backward(d_out)
    return query.grad


def test_the_rounding_of_out_does_not_reach_the_query():
    """With a common mean of the latents, which D = d_out.out of a rounded output would not bear."""
    sizes = dict(sparse_count=2048, sparse_mode=0, heads=16, latent=512, rope=0)
    x = forward_inputs([2], [2048], layout_kv="BSND", **sizes)
    x |= dict(query=x["query"].bfloat16(), key=(x["key"] + 4).bfloat16())
    d_out = torch.randn(x["query"].shape).bfloat16()
    exact = x | dict(query=x["query"].float(), key=x["key"].float())
    d_query, expected = (d_query_of(x, d_out), d_query_of(exact, d_out.float()))
    # dS may be rounded, each by up to 2^-8 of itself and independently, and the result is
    q, g = (y.float()[:, :2].transpose(1, 2) for y in (x["query"], d_out))
    k = exact["key"][:, :2048].transpose(1, 2)
    p = (x["scale_value"] * q @ k.mT).softmax(-1)
    dots = g @ k.mT
    d_logits = x["scale_value"] * p * (dots - (p * dots).sum(-1, keepdim=True))
    of_operands = (d_logits * k.norm(dim=-1).unsqueeze(-2)).norm()
    limit = 2**-8 * (expected.norm() + of_operands)
    assert (d_query.float() - expected).norm() <= limit
    # the difference of both D, of which each key's part is its probability
    rounding = attend(**x).float() - attend(**exact)
    of_delta = x["scale_value"] * (d_out * rounding).sum(-1, keepdim=True) * attend(**exact)
    assert of_delta[:, :2].norm() >= max(0.1 * expected.norm(), 4 * limit)
