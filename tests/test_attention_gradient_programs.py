"""The gradients of sparse attention as an NPU program: in the interpreter and as generated code."""

import importlib.util

import pytest
import torch
from cases import INT_MAX, INT_MIN, without_nan
from cases.npu_programs import (
    GRADIENT,
    HALF,
    attention_case,
    block_ids_clamped,
    calls,
    check_by_its_rule,
    gradient_case,
    needs_gcc,
    pypto_0_2_0_only,
)

import custom_pypto
from custom_pypto import reference
from custom_pypto.reference import MODULES

if importlib.util.find_spec("pypto") is None:
    pytest.skip("the sim extra is not installed", allow_module_level=True)

# before pypto, which reads its configuration while it is imported
from custom_pypto import simulation  # noqa: E402

# isort: split
import pypto  # noqa: E402

from custom_pypto.kernels import npu_sparse_flash_attention_grad_pto as kernels  # noqa: E402
from custom_pypto.kernels import selected_rows  # noqa: E402

pytest_plugins = ["program_fixtures"]
pytestmark = pytest.mark.sim
PROGRAMS = [kernels]
OP = "npu_sparse_flash_attention_grad_pto"
FAST = ["packed", "sinks-of-5-heads", "latent-48-rope-32"]  # as generated code
SMALL = dict(lengths_query=[5], lengths_key=[300], sparse_count=64)


@pytest.mark.parametrize(
    "dtype, hostile",
    [(torch.float16, False), (torch.bfloat16, True)],
    ids=["selected-float16", "hostile-bfloat16"],
)
@pytest.mark.parametrize("arguments", calls(GRADIENT))
def test_gradients_equal_the_reference(arguments, dtype, hostile, interpreted):
    check_by_its_rule(OP, gradient_case(**arguments, dtype=dtype, hostile=hostile))


def test_gradients_of_128_heads_and_2048_keys(interpreted):
    arguments = dict(heads=128, sparse_count=2048, layout_query="TND", layout_kv="TND")
    check_by_its_rule(OP, gradient_case([2], [3000], **arguments))


@needs_gcc
@pytest.mark.parametrize(
    "dtype, hostile",
    [(torch.bfloat16, False), (torch.float16, True)],
    ids=["selected-bfloat16", "hostile-float16"],
)
@pytest.mark.parametrize("arguments", calls(GRADIENT, fast=FAST))
def test_generated_gradients_equal_the_reference(arguments, dtype, hostile):
    """Indices that name a row twice leave the order of two additions open."""
    with simulation.on_cpu(generated=True, unordered_adds=hostile):
        check_by_its_rule(OP, gradient_case(**arguments, dtype=dtype, hostile=hostile))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_gradients_are_precise_to_some_roundings(dtype, interpreted):
    """Of P and dS, and of the result."""
    x = gradient_case([20], [300], sparse_count=128, own_value=True, dtype=dtype)
    got = custom_pypto.npu_sparse_flash_attention_grad_pto(**x)
    expected = reference.npu_sparse_flash_attention_grad_pto(**x)
    for mine, exact in zip(got[:5], expected[:5], strict=True):
        mine, exact = mine.double().nan_to_num(), exact.double().nan_to_num()
        assert (mine - exact).norm() <= torch.finfo(dtype).eps / 2 * exact.norm()


@needs_gcc
def test_the_bits_of_every_sum_are_fixed():
    """By the task graph, which orders all additions to a row: the host checks that."""
    x = gradient_case([9], [70], sparse_count=64)
    with simulation.on_cpu(generated=True):
        first, second = (custom_pypto.npu_sparse_flash_attention_grad_pto(**x) for _ in range(2))
    assert all(map(torch.equal, map(torch.nan_to_num, first), map(torch.nan_to_num, second)))


@needs_gcc
@pypto_0_2_0_only
def test_a_missing_barrier_is_found(monkeypatch, fresh_kernels):
    """The terms of the sinks are an argument with a dynamic dim."""
    monkeypatch.setattr(kernels, "after_all", lambda name: kernels.loop(name, 1))
    x = gradient_case(**SMALL, sinks=(-9, 9))
    with simulation.on_cpu(generated=True), pytest.raises(RuntimeError, match="race: task"):
        custom_pypto.npu_sparse_flash_attention_grad_pto(**x)


@needs_gcc
def test_a_missing_clamp_is_found(monkeypatch, fresh_kernels):
    def unchecked(indices, row, last):
        width = indices.shape[1]
        pypto.set_vec_tile_shapes(1, width)
        index = pypto.cast(pypto.view(indices, [1, width], [row, 0]), pypto.DT_FP32)
        return index, pypto.where(pypto.eq(index, index), 1.0, 0.0)

    monkeypatch.setattr(selected_rows, "checked_indices", unchecked)
    x = gradient_case(**SMALL, layout_kv="BSND")
    x["sparse_indices"][..., 1] = -INT_MAX
    with (
        simulation.on_cpu(generated=True),
        pytest.raises(RuntimeError, match="reads 4 bytes at byte"),
    ):
        custom_pypto.npu_sparse_flash_attention_grad_pto(**x)


@pytest.mark.parametrize("value", [INT_MIN, -1, 10**6, INT_MAX])
@pytest.mark.parametrize("layout", ["PA_BSND", "BSND", "TND"])
def test_no_length_and_no_block_id_leads_outside(value, layout, interpreted):
    layouts = dict(layout_kv=layout, layout_query="TND" if layout == "TND" else "BSND")
    x = without_nan(attention_case([2, 1], [300, 40], sparse_count=64, heads=5, **layouts))
    for name in ("actual_seq_lengths_kv", "actual_seq_lengths_query", "block_table"):
        if x[name] is None:
            continue
        hostile = x | {name: x[name].clone()}
        hostile[name].view(-1)[0] = value
        legal = block_ids_clamped(hostile) if layout == "PA_BSND" else hostile
        # with statistics of this call
        call = MODULES[OP].with_gradient(legal, torch.ones_like(x["query"]))
        got = custom_pypto.npu_sparse_flash_attention_grad_pto(
            **call | dict(block_table=hostile["block_table"])
        )
        expected = reference.npu_sparse_flash_attention_grad_pto(**call)
        error, bound = MODULES[OP].error(got, expected, call, call)
        assert error <= bound, f"{name}: {error} from the reference, {bound} allowed"
