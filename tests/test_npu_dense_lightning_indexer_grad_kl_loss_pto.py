"""The divergence of an indexer from attention over every visible key, against float64."""

import functools

import pytest
import torch
from cases import DTYPES
from cases.npu_dense_lightning_indexer_grad_kl_loss_pto import inputs
from cases.npu_sparse_lightning_indexer_grad_kl_loss_pto import inputs as of_selection
from numerics import assert_within_its_bound
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import custom_pypto
from custom_pypto.reference import MODULES
from custom_pypto.reference.npu_dense_lightning_indexer_softmax_lse_pto import of_indexer

OP = "npu_dense_lightning_indexer_grad_kl_loss_pto"
LSE = "npu_dense_lightning_indexer_softmax_lse_pto"
STATISTICS = ("softmax_max", "softmax_sum", "softmax_max_index", "softmax_sum_index")
kl = custom_pypto.npu_dense_lightning_indexer_grad_kl_loss_pto
check = functools.partial(assert_within_its_bound, OP)
softmax_lse = custom_pypto.npu_dense_lightning_indexer_softmax_lse_pto


def of_op(x: dict) -> dict:
    """The arguments of the statistics of a call's indexer."""
    return {name: y for name, y in of_indexer(x).items() if name not in STATISTICS}


CALLS = {
    "one-key": dict(lengths_query=[1], lengths_key=[1]),
    "ragged-and-empty": dict(lengths_query=[2, 0, 1], lengths_key=[70, 0, 33]),
    "shorter-than-the-query": dict(lengths_query=[4, 3], lengths_key=[2, 3]),
    "every-key": dict(lengths_query=[3, 2], lengths_key=[40, 9], sparse_mode=0),
    "several-tiles": dict(lengths_query=[3, 2], lengths_key=[2100, 1024]),
    "several-chunks": dict(lengths_query=[150], lengths_key=[150]),
    "compressed": dict(lengths_query=[3, 2], lengths_key=[83, 21], cmp_ratio=4),
    "no-rope": dict(lengths_query=[3, 2], lengths_key=[40, 33], rope=0),
    "strided": dict(lengths_query=[3, 2], lengths_key=[40, 33], strided=True),
    "weights-of-float32": dict(lengths_query=[2], lengths_key=[30], weights_dtype=torch.float32),
    "heads-129": dict(lengths_query=[2], lengths_key=[40], heads=129, index_heads=129),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["TND", "BSND"])
@pytest.mark.parametrize("name", CALLS)
def test_loss_and_gradients_are_those_of_float64(name, layout, dtype):
    x = inputs(**CALLS[name], layout=layout, dtype=dtype)
    check(x)
    mine = dict(zip(STATISTICS[2:], softmax_lse(**of_op(x)), strict=True))
    error, bound = MODULES[LSE].error(
        tuple(mine.values()), tuple(x[name] for name in mine), of_op(x), of_op(x)
    )
    assert error <= bound
    check(x | mine)


def test_over_all_keys_both_losses_are_equal():
    keywords = dict(lengths_query=[5, 2], lengths_key=[40, 33], seed=3)
    dense, sparse = inputs(**keywords), of_selection(**keywords, sparse_count=64)
    got, expected = (
        kl(**dense),
        custom_pypto.npu_sparse_lightning_indexer_grad_kl_loss_pto(**sparse),
    )
    error, bound = MODULES[OP].error(got, expected, dense, dense)
    assert error <= 2 * bound  # of each


class Largest(TorchDispatchMode):
    """The largest tensor that an op returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        returned = function(*args, **kwargs or {})
        sizes = [x.numel() for x in tree_leaves(returned) if isinstance(x, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return returned


def test_no_result_has_an_element_per_pair_of_tokens():
    x = inputs([600], [600], heads=1, latent=16, rope=0, index_heads=1, dim=16)
    with Largest() as largest:
        kl(**x)
        softmax_lse(**of_op(x))
    assert 0 < largest.elements < 600 * 600 / 10
