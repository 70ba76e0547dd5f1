"""The divergence of an indexer from sparse attention as an NPU program: in the interpreter and as
generated code.
"""

import importlib.util

import pytest
import torch
from cases import INT_MAX, INT_MIN, without_nan
from cases.npu_index_programs import INDEX_LOSS, index_loss_case
from cases.npu_programs import HALF, calls, check_by_its_rule, needs_gcc, pypto_0_2_0_only

import custom_pypto
from custom_pypto import reference
from custom_pypto.reference import MODULES

if importlib.util.find_spec("pypto") is None:
    pytest.skip("the sim extra is not installed", allow_module_level=True)

# before pypto, which reads its configuration while it is imported
from custom_pypto import simulation  # noqa: E402

# isort: split
from custom_pypto.kernels import (  # noqa: E402
    npu_sparse_lightning_indexer_grad_kl_loss_pto as kernels,
)

pytest_plugins = ["program_fixtures"]
pytestmark = pytest.mark.sim
PROGRAMS = [kernels]
OP = "npu_sparse_lightning_indexer_grad_kl_loss_pto"
kl = custom_pypto.npu_sparse_lightning_indexer_grad_kl_loss_pto
exact = getattr(reference, OP)


@pytest.mark.parametrize(
    "dtype, hostile",
    [(torch.float16, False), (torch.bfloat16, True)],
    ids=["selected-float16", "hostile-bfloat16"],
)
@pytest.mark.parametrize("arguments", calls(INDEX_LOSS))
def test_loss_and_gradients_equal_the_reference(arguments, dtype, hostile, interpreted):
    check_by_its_rule(OP, index_loss_case(**arguments, dtype=dtype, hostile=hostile))


def assert_precise(x: dict, dtype: torch.dtype) -> None:
    """To some roundings: of the gradients of products, and of the result. The results may be below
    the normal numbers of float16.
    """
    limits = torch.finfo(dtype)
    *got, loss = kl(**x)
    *expected, total = exact(**x)
    torch.testing.assert_close(loss, total, rtol=1e-5, atol=0)
    for mine, other in zip(got, expected, strict=True):
        mine, other = mine.double(), other.double()
        difference = ((mine - other).abs() - limits.tiny * limits.eps).clamp(min=0)
        assert difference.norm() <= limits.eps / 2 * other.norm()


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_loss_and_gradients_are_precise_to_some_roundings(dtype, interpreted):
    assert_precise(index_loss_case([20], [300], sparse_count=128, dtype=dtype), dtype)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_sizes_of_deepseek_v3_2(dtype, interpreted):
    """Gradients of scores of about 1 / 2048, which float16 holds only scaled."""
    sizes = dict(heads=128, index_heads=64, sparse_count=2048, weights_dtype=torch.float32)
    x = index_loss_case([2], [3000], **sizes, dtype=dtype)
    x["weights"] = x["weights"] / 64
    assert_precise(x, dtype)


@needs_gcc
@pytest.mark.parametrize(
    "dtype, hostile",
    [(torch.bfloat16, False), (torch.float16, True)],
    ids=["selected-bfloat16", "hostile-float16"],
)
@pytest.mark.parametrize("arguments", calls(INDEX_LOSS, fast=["by-sequence", "5-heads"]))
def test_generated_results_equal_the_reference(arguments, dtype, hostile):
    """Indices that name a row twice leave the order of two additions open."""
    with simulation.on_cpu(generated=True, unordered_adds=hostile):
        check_by_its_rule(OP, index_loss_case(**arguments, dtype=dtype, hostile=hostile))


@needs_gcc
def test_the_bits_of_loss_and_sums_are_fixed():
    """By the task graph, which orders all additions to a row: the host checks that."""
    x = index_loss_case([9], [70], sparse_count=64)
    with simulation.on_cpu(generated=True):
        first, second = kl(**x), kl(**x)
    assert all(map(torch.equal, first, second))


@needs_gcc
@pypto_0_2_0_only
def test_a_missing_barrier_is_found(monkeypatch, fresh_kernels):
    """The losses of the tokens are an argument with a dynamic dim."""
    monkeypatch.setattr(kernels, "after_all", lambda name: kernels.loop(name, 1))
    x = index_loss_case([5], [300], sparse_count=64)
    with simulation.on_cpu(generated=True), pytest.raises(RuntimeError, match="race: task"):
        kl(**x)


def test_probabilities_of_zero_teach_nothing(interpreted):
    x = index_loss_case([4], [40], sparse_count=16)
    *gradients, loss = kl(**x | dict(softmax_max=x["softmax_max"] + 500))
    assert loss == 0 and not any(gradient.any() for gradient in gradients)


def test_statistics_of_more_keys_than_the_indices_name(interpreted):
    """As of an attention that also reads a window, or has sinks."""
    x = index_loss_case([4], [40], sparse_count=16)
    x["softmax_sum"] = x["softmax_sum"] * torch.linspace(1, 9, 16)
    check_by_its_rule(OP, x)


def test_rows_that_no_token_selects_reach_nothing(interpreted):
    x = index_loss_case([2], [40], layout="BSND", sparse_count=16)
    x["sparse_indices"] = x["sparse_indices"].clamp(max=19)
    for name in ("key", "key_rope", "key_index"):
        x[name][:, 20:] = torch.nan
    got = kl(**x)
    assert all(result.isfinite().all() for result in got)
    assert got[1][:, :20].any() and not got[1][:, 20:].any()


@pytest.mark.parametrize("lengths", [([0], [5]), ([2], [0])])
def test_without_tokens_or_keys_all_is_zero(lengths, interpreted):
    assert not any(result.any() for result in kl(**index_loss_case(*lengths)))


@pytest.mark.parametrize("value", [INT_MIN, -1, 10**6, INT_MAX, 2**40])
@pytest.mark.parametrize("cmp_ratio", [1, 4])
@pytest.mark.parametrize("layout", ["BSND", "TND"])
def test_no_length_leads_outside(layout, cmp_ratio, value, interpreted):
    x = without_nan(index_loss_case([2, 1], [300, 40], heads=5, layout=layout, cmp_ratio=cmp_ratio))
    for name in ("actual_seq_klen", "actual_seq_qlen"):
        hostile = x | {name: [value, *x[name][1:]]}
        # with statistics of this call
        hostile |= MODULES[OP].with_selection(hostile, 16)
        got, expected = kl(**hostile), exact(**hostile)
        error, bound = MODULES[OP].error(got, expected, hostile, hostile)
        assert error <= bound, f"{name}: {error} from the reference, {bound} allowed"
