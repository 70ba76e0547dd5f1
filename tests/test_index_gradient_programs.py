"""Training an indexer on its NPU kernels: the scores that it returns, and back through them."""

import pytest
import torch
from cases.npu_checks import needs_gcc
from cases.npu_programs import HALF, INDEXER, index_case
from numerics import assert_same_selection

import custom_pypto
from custom_pypto import reference
from custom_pypto.reference import MODULES

pytestmark = pytest.mark.sim
OP = "npu_lightning_indexer_grad_pto"
LEAVES = ("query", "key", "weights")


def rows(*fast: str) -> list:
    return [
        # a row in one dtype, as the programs of both differ in its name alone
        pytest.param(id, HALF[i % 2], id=id, marks=[] if id in fast else [pytest.mark.slow])
        for i, id in enumerate(INDEXER)
        if id != "levels"  # of 50,000 keys, for which the interpreter takes 20 GB
    ]


def scores_and_gradients(x: dict) -> tuple:
    """Positions and scores of the public forward, the gradients of the scores, and those that
    ``backward()`` makes of them.
    """
    x = x | {name: x[name].detach().requires_grad_() for name in LEAVES}
    indices, values = custom_pypto.npu_lightning_indexer_pto(**x, return_value=True)
    g = torch.Generator().manual_seed(1)
    dy = torch.randn(values.shape, generator=g).to(values.dtype)
    values.backward(dy)
    return indices, values.detach(), dy, tuple(x[name].grad for name in LEAVES)


def check_training(x: dict) -> None:
    indices, values, dy, got = scores_and_gradients(x)
    assert torch.equal(indices, custom_pypto.npu_lightning_indexer_pto(**x))
    assert_same_selection(indices, x)
    # almost equal scores may change places
    _, expected = reference.npu_lightning_indexer_pto(**x, return_value=True)
    rtol = torch.finfo(values.dtype).eps  # a step: float32 may round to either neighbour
    torch.testing.assert_close(values, expected, rtol=rtol, atol=2**-10)
    assert torch.equal(values == -torch.inf, indices == -1)
    call = MODULES[OP].with_gradient(x, dy) | dict(sparse_indices=indices)
    error, bound = MODULES[OP].error(got, getattr(reference, OP)(**call), call, call)
    assert error <= bound


@pytest.mark.parametrize(
    "id, dtype", rows("ragged-and-empty", "packed-keys", "keys-by-sequence", "compressed")
)
def test_backward_through_the_scores(id, dtype, interpreted):
    check_training(index_case(**INDEXER[id], dtype=dtype))


@needs_gcc
@pytest.mark.parametrize("id, dtype", rows())
def test_generated_code_of_a_backward_through_the_scores(id, dtype, generated):
    check_training(index_case(**INDEXER[id], dtype=dtype))


def test_without_a_key_all_scores_are_minus_infinity(interpreted):
    x = index_case([2], [0])
    indices, values, _, gradients = scores_and_gradients(x)
    assert (indices == -1).all() and (values == -torch.inf).all()
    assert not any(gradient.any() for gradient in gradients)
