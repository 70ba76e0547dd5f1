"""The gradients of an indexer as an NPU program: in the interpreter and as generated code."""

import importlib.util

import pytest
import torch
from cases import INT_MAX, INT_MIN, without_nan
from cases.npu_index_programs import INDEX_GRADIENT, index_gradient_case
from cases.npu_programs import (
    HALF,
    INDEXER,
    block_ids_clamped,
    calls,
    check_by_its_rule,
    index_case,
    needs_gcc,
)
from numerics import assert_same_selection

import custom_pypto
from custom_pypto import reference
from custom_pypto.reference import MODULES

if importlib.util.find_spec("pypto") is None:
    pytest.skip("the sim extra is not installed", allow_module_level=True)

# before pypto, which reads its configuration while it is imported
from custom_pypto import simulation  # noqa: E402

# isort: split
import pypto  # noqa: E402

from custom_pypto.kernels import npu_lightning_indexer_grad_pto as kernels  # noqa: E402
from custom_pypto.kernels import selected_rows  # noqa: E402

pytest_plugins = ["program_fixtures"]
pytestmark = pytest.mark.sim
PROGRAMS = [kernels]
OP = "npu_lightning_indexer_grad_pto"
LEAVES = ("query", "key", "weights")
SMALL = dict(lengths_query=[5], lengths_key=[300], sparse_count=64)


@pytest.mark.parametrize(
    "dtype, hostile",
    [(torch.float16, False), (torch.bfloat16, True)],
    ids=["selected-float16", "hostile-bfloat16"],
)
@pytest.mark.parametrize("arguments", calls(INDEX_GRADIENT))
def test_gradients_equal_the_reference(arguments, dtype, hostile, interpreted):
    check_by_its_rule(OP, index_gradient_case(**arguments, dtype=dtype, hostile=hostile))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_gradients_of_64_heads_and_2048_keys(dtype, interpreted):
    arguments = dict(heads=64, sparse_count=2048, layout_query="TND", layout_key="TND")
    check_by_its_rule(OP, index_gradient_case([2], [3000], **arguments, dtype=dtype))


@needs_gcc
@pytest.mark.parametrize(
    "dtype, hostile",
    [(torch.bfloat16, False), (torch.float16, True)],
    ids=["selected-bfloat16", "hostile-float16"],
)
@pytest.mark.parametrize("arguments", calls(INDEX_GRADIENT, fast=["packed", "5-heads"]))
def test_generated_gradients_equal_the_reference(arguments, dtype, hostile):
    """Indices that name a row twice leave the order of two additions open."""
    with simulation.on_cpu(generated=True, unordered_adds=hostile):
        check_by_its_rule(OP, index_gradient_case(**arguments, dtype=dtype, hostile=hostile))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("size", [1e-5, 1.0, 1e4])
def test_gradients_of_any_size_are_precise_to_some_roundings(size, dtype, interpreted):
    """Of the gradients of products, and of the result: float16 could not hold small ones."""
    x = index_gradient_case(
        [20], [300], sparse_count=128, weights_dtype=torch.float32, dy_dtype=torch.float32,
        dtype=dtype,
    )  # fmt: skip
    x["dy"] = x["dy"] * size
    for name in ("query", "key"):  # float16 holds the results
        x[name] = x[name] * size**-0.6
    got, expected = custom_pypto.npu_lightning_indexer_grad_pto(**x), getattr(reference, OP)(**x)
    for mine, exact in zip(got, expected, strict=True):
        mine, exact = mine.double(), exact.double()
        assert (mine - exact).norm() <= torch.finfo(dtype).eps / 2 * exact.norm()


@needs_gcc
def test_the_bits_of_every_sum_are_fixed():
    """By the task graph, which orders all additions to a row: the host checks that."""
    x = index_gradient_case([9], [70], sparse_count=64)
    with simulation.on_cpu(generated=True):
        first, second = (custom_pypto.npu_lightning_indexer_grad_pto(**x) for _ in range(2))
    assert all(map(torch.equal, first, second))


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
    rtol = torch.finfo(values.dtype).eps
    torch.testing.assert_close(values, expected, rtol=rtol, atol=2**-10)
    assert torch.equal(values == -torch.inf, indices == -1)
    call = MODULES[OP].with_gradient(x, dy) | dict(sparse_indices=indices)
    error, bound = MODULES[OP].error(got, getattr(reference, OP)(**call), call, call)
    assert error <= bound


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("arguments", calls(INDEXER))
def test_backward_through_the_scores(arguments, dtype, interpreted):
    check_training(index_case(**arguments, dtype=dtype))


@needs_gcc
@pytest.mark.parametrize("arguments", calls(INDEXER, fast=["ragged-and-empty"]))
def test_generated_code_of_a_backward_through_the_scores(arguments):
    with simulation.on_cpu(generated=True):
        check_training(index_case(**arguments))


def test_without_a_key_all_scores_are_minus_infinity(interpreted):
    x = index_case([2], [0])
    indices, values, _, gradients = scores_and_gradients(x)
    assert (indices == -1).all() and (values == -torch.inf).all()
    assert not any(gradient.any() for gradient in gradients)


def test_keys_that_no_token_selects_get_zeros_whatever_they_hold(interpreted):
    x = index_gradient_case([2], [40], layout_key="BSND")
    x["sparse_indices"] = x["sparse_indices"].clamp(max=19)
    x["key"][:, 20:] = torch.nan
    got = custom_pypto.npu_lightning_indexer_grad_pto(**x)
    assert all(gradient.isfinite().all() for gradient in got)
    assert got[1][:, :20].any() and not got[1][:, 20:].any()


@needs_gcc
def test_a_missing_clamp_is_found(monkeypatch, fresh_kernels):
    def unchecked(indices, row, last):
        width = indices.shape[1]
        pypto.set_vec_tile_shapes(1, width)
        index = pypto.cast(pypto.view(indices, [1, width], [row, 0]), pypto.DT_FP32)
        return index, pypto.where(pypto.eq(index, index), 1.0, 0.0)

    monkeypatch.setattr(selected_rows, "checked_indices", unchecked)
    x = index_gradient_case(**SMALL, layout_key="BSND")
    x["sparse_indices"][..., 1] = -INT_MAX
    with (
        simulation.on_cpu(generated=True),
        pytest.raises(RuntimeError, match="reads 4 bytes at byte"),
    ):
        custom_pypto.npu_lightning_indexer_grad_pto(**x)


@pytest.mark.parametrize("value", [INT_MIN, -1, 10**6, INT_MAX])
@pytest.mark.parametrize("cmp_ratio", [1, 4])
@pytest.mark.parametrize("layout", ["PA_BSND", "BSND", "TND"])
def test_no_length_and_no_block_id_leads_outside(layout, cmp_ratio, value, interpreted):
    layouts = dict(layout_key=layout, layout_query="TND" if layout == "TND" else "BSND")
    x = without_nan(
        index_gradient_case(
            [2, 1], [300, 40], sparse_count=64, heads=5, cmp_ratio=cmp_ratio, **layouts
        )
    )
    for name in ("actual_seq_lengths_key", "actual_seq_lengths_query", "block_table"):
        if x[name] is None:
            continue
        hostile = x | {name: x[name].clone()}
        hostile[name].view(-1)[0] = value
        legal = block_ids_clamped(hostile) if layout == "PA_BSND" else hostile
        got = custom_pypto.npu_lightning_indexer_grad_pto(**hostile)
        expected = getattr(reference, OP)(**legal)
        error, bound = MODULES[OP].error(got, expected, legal, legal)
        assert error <= bound, f"{name}: {error} from the reference, {bound} allowed"
