"""The divergence of an indexer from the attention over its selection, against float64."""

import functools

import pytest
import torch
from cases import DTYPES
from cases.npu_sparse_lightning_indexer_grad_kl_loss_pto import inputs
from numerics import assert_within_its_bound

import custom_pypto
from custom_pypto.reference import MODULES

OP = "npu_sparse_lightning_indexer_grad_kl_loss_pto"
kl = custom_pypto.npu_sparse_lightning_indexer_grad_kl_loss_pto
check = functools.partial(assert_within_its_bound, OP)


CALLS = {
    "one-key": dict(lengths_query=[1], lengths_key=[1]),
    "ragged-and-empty": dict(lengths_query=[2, 0, 1], lengths_key=[70, 0, 33], sparse_count=40),
    "shorter-than-the-query": dict(lengths_query=[4, 3], lengths_key=[2, 3], sparse_count=4),
    "every-key": dict(lengths_query=[3, 2], lengths_key=[40, 9], sparse_count=40, sparse_mode=0),
    "several-blocks": dict(lengths_query=[40], lengths_key=[300], sparse_count=150),
    "compressed": dict(lengths_query=[3, 2], lengths_key=[83, 21], cmp_ratio=4),
    "no-rope": dict(lengths_query=[3, 2], lengths_key=[40, 33], rope=0),
    "strided": dict(lengths_query=[3, 2], lengths_key=[40, 33], strided=True),
    "hostile": dict(lengths_query=[5, 2], lengths_key=[40, 33], sparse_count=16, hostile=True),
    "weights-of-float32": dict(lengths_query=[2], lengths_key=[30], weights_dtype=torch.float32),
    "one-head": dict(lengths_query=[3], lengths_key=[40], heads=1, index_heads=1),
    "heads-129": dict(lengths_query=[2], lengths_key=[40], heads=129, index_heads=129),
    "full-size": dict(
        lengths_query=[2],
        lengths_key=[300],
        heads=128,
        latent=512,
        rope=64,
        index_heads=64,
        dim=128,
        sparse_count=128,
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["TND", "BSND"])
@pytest.mark.parametrize("name", CALLS)
def test_loss_and_gradients_are_those_of_float64(name, layout, dtype):
    check(inputs(**CALLS[name], layout=layout, dtype=dtype))


def definition(x: dict) -> torch.Tensor:
    """The loss of one sequence whose tokens all select K keys, with torch's own functions."""
    keys = x["sparse_indices"][:, 0].long()
    scores = torch.relu(torch.einsum("thd,tkd->thk", x["query_index"], x["key_index"][keys, 0]))
    q = torch.einsum("thk,th->tk", scores, x["weights"]).log_softmax(-1)
    logits = torch.einsum("thd,tkd->thk", x["query"], x["key"][keys, 0])
    logits = logits + torch.einsum("thd,tkd->thk", x["query_rope"], x["key_rope"][keys, 0])
    p = (logits * x["scale_value"]).softmax(-1).mean(1)
    return torch.nn.functional.kl_div(q, p, reduction="sum")


def test_the_loss_is_that_of_torch():
    x = inputs([5], [40], sparse_count=8)
    real = {
        name: x[name][:5].double()
        for name in ("query", "query_rope", "query_index", "weights", "sparse_indices")
    }
    keys = {name: x[name][:40].double() for name in ("key", "key_rope", "key_index")}
    index = ("query_index", "key_index", "weights")
    exact = {**x, **real, **keys}
    leaves = {name: exact[name].requires_grad_() for name in index}
    expected = definition(exact | leaves)
    gradients = torch.autograd.grad(expected, [leaves[name] for name in index])
    of_torch = *gradients, expected.detach()[None]
    got = kl(**x)
    rest = [len(one) - len(other) for one, other in zip(got, of_torch, strict=True)]  # padding
    padded = [
        torch.cat([x, x.new_zeros(n, *x.shape[1:])]) for x, n in zip(of_torch, rest, strict=True)
    ]
    error, bound = MODULES[OP].error(got, tuple(padded), x, x)
    assert error <= bound


def test_sinks_in_the_statistics_change_nothing():
    """They scale the probabilities of a head, so the heads weigh otherwise."""
    x = inputs([4], [40], heads=1)
    more = x | dict(softmax_sum=x["softmax_sum"] * 3)
    error, bound = MODULES[OP].error(kl(**more), kl(**x), x, x)
    assert error <= 2 * bound  # of each
    x = inputs([4], [40], heads=2)
    weighed = x | dict(softmax_sum=x["softmax_sum"] * torch.tensor([1.0, 3.0]))
    assert not torch.allclose(check(weighed)[0], kl(**x)[0])


def test_probabilities_of_zero_teach_nothing():
    x = inputs([4], [40])
    *gradients, loss = kl(**x | dict(softmax_max=x["softmax_max"] + 500))
    assert loss == 0 and not any(gradient.any() for gradient in gradients)


def test_an_indexer_that_agrees_has_neither_loss_nor_gradient():
    x = inputs([1], [20], heads=1, index_heads=1, latent=48, dim=48, rope=0, sparse_count=8)
    positive = x["query"].abs(), x["key"].abs()
    x |= dict(query=positive[0], key=positive[1], query_index=positive[0], key_index=positive[1])
    x["weights"] = torch.full_like(x["weights"], x["scale_value"])
    x |= MODULES[OP].with_selection(x, 8)
    *gradients, loss = kl(**x)
    # the largest logit, a sum of 48 positive products, rounds so in either distribution
    logits = 2 * 48 * 2**-24 * x["scale_value"] * (x["query"][0] @ x["key"][:20, 0].T).max()
    assert abs(loss) <= 2 * logits
    assert all(gradient[:1].abs().max() <= 1e-6 for gradient in gradients)


def test_lengths_beyond_int32_are_clamped():
    x = inputs([3], [40])
    far = x | dict(actual_seq_qlen=[2**40], actual_seq_klen=[2**50])
    near = x | dict(actual_seq_qlen=[4], actual_seq_klen=[42])  # the tensors' sizes
    for one, other in zip(kl(**far), kl(**near), strict=True):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))
