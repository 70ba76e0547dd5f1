"""The divergence of an indexer from attention over every visible key, and the statistics that it
needs, as NPU programs: in the interpreter and as generated code."""

import functools
import importlib.util
import shutil

import pytest
import torch
from cases import INT_MAX, INT_MIN, without_nan
from cases.npu_dense_lightning_indexer_grad_kl_loss_pto import inputs
from cases.npu_programs import HALF, calls, check_by_its_rule, pypto_0_2_0_only

import custom_pypto
from custom_pypto import npu, reference
from custom_pypto.reference.npu_dense_lightning_indexer_grad_kl_loss_pto import with_statistics
from custom_pypto.reference.npu_dense_lightning_indexer_softmax_lse_pto import of_indexer
from custom_pypto.requirements import installed_version

if importlib.util.find_spec("pypto") is None:
    pytest.skip("the sim extra is not installed", allow_module_level=True)

# before pypto, which reads its configuration while it is imported
from custom_pypto import simulation  # noqa: E402

# isort: split
from custom_pypto.kernels import every_key  # noqa: E402
from custom_pypto.kernels import npu_dense_lightning_indexer_grad_kl_loss_pto as kernels  # noqa: E402

pytestmark = pytest.mark.sim
OP = "npu_dense_lightning_indexer_grad_kl_loss_pto"
LSE = "npu_dense_lightning_indexer_softmax_lse_pto"
STATISTICS = ("softmax_max", "softmax_sum", "softmax_max_index", "softmax_sum_index")
kl = custom_pypto.npu_dense_lightning_indexer_grad_kl_loss_pto
softmax_lse = custom_pypto.npu_dense_lightning_indexer_softmax_lse_pto
needs_gcc = pytest.mark.skipif(
    shutil.which("g++") is None, reason="g++, which compiles the generated code, is not installed"
)
CALLS = {
    "one-key": dict(lengths_query=[1], lengths_key=[1]),
    "ragged-and-empty": dict(lengths_query=[2, 0, 1], lengths_key=[70, 0, 33]),
    # tiles of 4 tokens, of which some see no key; BSND: padding among them
    "shorter-than-the-query": dict(lengths_query=[9, 6, 4], lengths_key=[131, 4, 1]),
    "every-key": dict(lengths_query=[3, 2], lengths_key=[140, 30], sparse_mode=0),
    "several-tiles": dict(lengths_query=[5, 1], lengths_key=[2100, 1500]),
    "compressed": dict(lengths_query=[3, 2], lengths_key=[483, 21], cmp_ratio=4),
    "no-rope": dict(lengths_query=[3, 2], lengths_key=[40, 33], rope=0),
    "strided": dict(lengths_query=[3, 2], lengths_key=[40, 33], strided=True),
    "weights-of-float32": dict(
        lengths_query=[2], lengths_key=[300], weights_dtype=torch.float32, index_heads=16
    ),
    # heads that divide no power of two
    "48-heads": dict(lengths_query=[4, 1], lengths_key=[300, 7], heads=80, index_heads=48),
    "heads-of-deepseek-v3-2": dict(
        lengths_query=[6],
        lengths_key=[300],
        heads=128,
        latent=512,
        rope=64,
        index_heads=64,
        dim=128,
    ),
}


@pytest.fixture(autouse=True)
def no_result_by_chance():
    """NaN in fresh memory: a result that a program does not write is wrong in every run."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def interpreted():
    with simulation.on_cpu():
        yield


def of_op(x: dict) -> dict:
    """The arguments of the statistics of a call's indexer."""
    return {name: y for name, y in of_indexer(x).items() if name not in STATISTICS}


def check(x: dict) -> None:
    check_by_its_rule(OP, x)
    check_by_its_rule(LSE, of_op(x))


@pytest.mark.parametrize("dtype, layout", [(HALF[0], "TND"), (HALF[1], "BSND")], ids=str)
@pytest.mark.parametrize("arguments", calls(CALLS))
def test_loss_gradients_and_statistics_are_those_of_the_reference(
    arguments, layout, dtype, interpreted
):
    check(inputs(**arguments, layout=layout, dtype=dtype))


def test_sizes_of_deepseek_v3_2(interpreted):
    sizes = dict(heads=128, latent=512, rope=64, index_heads=64, dim=128)
    check(inputs([5], [1500], **sizes, dtype=torch.bfloat16, weights_dtype=torch.float32))


@needs_gcc
@pytest.mark.parametrize("dtype, layout", [(HALF[0], "BSND"), (HALF[1], "TND")], ids=str)
@pytest.mark.parametrize("arguments", calls(CALLS, fast=["every-key", "weights-of-float32"]))
def test_generated_code_computes_what_the_reference_does(arguments, layout, dtype):
    with simulation.on_cpu(generated=True):
        check(inputs(**arguments, layout=layout, dtype=dtype))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_gradients_are_precise_to_some_roundings(dtype, interpreted):
    """Of the gradients of the products, and of the result; float16 has thousands of small ones."""
    x = inputs(
        [3], [6000], heads=16, index_heads=16, dim=128, dtype=dtype, weights_dtype=torch.float32
    )
    got, expected = kl(**x), getattr(reference, OP)(**x)
    for mine, exact in zip(got[:3], expected[:3], strict=True):
        mine, exact = mine.double(), exact.double()
        assert (mine - exact).norm() <= torch.finfo(dtype).eps / 2 * exact.norm()
    torch.testing.assert_close(got[3], expected[3], rtol=2**-18, atol=0)


def test_statistics_of_the_program_are_good_enough_for_the_divergence(interpreted):
    x = inputs([5, 2], [300, 40], dtype=torch.bfloat16)
    mine = dict(zip(STATISTICS[2:], softmax_lse(**of_op(x)), strict=True))
    check_by_its_rule(OP, x | mine)


def test_tokens_without_keys_have_statistics_of_none_and_add_nothing(interpreted):
    x = inputs([6], [2], dtype=torch.bfloat16)
    largest, total = softmax_lse(**of_op(x))
    assert torch.equal(largest[0, :4], torch.full([4], -torch.inf)) and not total[0, :4].any()
    d_query, _, d_weights, _ = kl(**x)
    assert not d_query[:4].any() and not d_weights[:4].any()


@pytest.mark.parametrize("lengths", [([0], [5]), ([2], [0]), ([0, 0], [3, 3])])
@pytest.mark.parametrize("layout", ["TND", "BSND"])
def test_without_tokens_or_keys_all_is_zero(lengths, layout, interpreted):
    for result in kl(**inputs(*lengths, layout=layout, dtype=torch.bfloat16)):
        assert not result.any()


@pytest.mark.parametrize("value", [-(10**12), INT_MIN, -1, 0, 10**6, INT_MAX, 10**12])
@pytest.mark.parametrize("layout", ["TND", "BSND"])
def test_no_length_leads_outside(value, layout, interpreted):
    x = inputs([3, 2], [140, 30], layout=layout, dtype=torch.bfloat16)
    x = without_nan({name: y for name, y in x.items() if name not in STATISTICS})
    for name in ("actual_seq_qlen", "actual_seq_klen"):
        check(with_statistics(x | {name: [value, x[name][1]]}))
        check(with_statistics(x | {name: [x[name][0], value]}))


def test_lengths_may_be_absent(interpreted):
    x = inputs([3, 3], [40, 40], layout="BSND", dtype=torch.bfloat16)
    x = without_nan({name: y for name, y in x.items() if name not in STATISTICS})
    check(with_statistics(x | dict(actual_seq_qlen=None, actual_seq_klen=None)))


def test_no_tensor_has_an_element_per_pair_of_tokens():
    """Of those of the wrapper; a tile of the program has a fixed number of keys."""
    sizes = []

    def launch(kernel, tensors, written):
        sizes.extend(x.numel() for x in tensors.values())

    x = inputs([3000], [3000], heads=1, latent=16, rope=0, index_heads=1, dim=16, dtype=HALF[0])
    ops = npu.implementations(launch)
    ops[OP](**x)
    ops[LSE](**of_op(x))
    assert 0 < max(sizes) < 3000 * 3000 / 8


@needs_gcc
def test_the_bits_of_every_sum_are_fixed():
    """By the task graph, which orders all additions to a row: the host checks that."""
    x = inputs([9], [70], dtype=torch.bfloat16)
    with simulation.on_cpu(generated=True):
        first, second = (kl(**x) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.fixture
def fresh_kernels(monkeypatch):
    """Kernels of the program that a test changes are the test's own."""
    monkeypatch.setattr(kernels, "kernel", functools.cache(kernels.kernel.__wrapped__))


@needs_gcc
@pytest.mark.skipif(installed_version("pypto") != "0.2.0", reason="a mistake of PyPTO 0.2.0 only")
def test_a_missing_barrier_is_found(monkeypatch, fresh_kernels):
    """The terms of the loss are an argument with a dynamic dim."""
    monkeypatch.setattr(kernels, "after_all", lambda name: kernels.loop(name, 1))
    x = inputs([5], [70], dtype=torch.bfloat16)
    with simulation.on_cpu(generated=True), pytest.raises(RuntimeError, match="race: task"):
        kl(**x)


@needs_gcc
@pypto_0_2_0_only
def test_keys_without_a_last_tile_are_found(monkeypatch, fresh_kernels):
    """Rows behind the keys, which the wrapper appends."""
    x = inputs([2], [70], dtype=torch.bfloat16)
    monkeypatch.setattr(npu._module(OP), "padded", lambda matrix, rows: matrix)
    with simulation.on_cpu(generated=True), pytest.raises(RuntimeError, match="reads .* bytes at"):
        kl(**x)


def test_a_mask_of_another_tile_is_far_off(monkeypatch, fresh_kernels, interpreted):
    """A token that sees one key more."""
    mask = every_key.DenseScores.mask
    monkeypatch.setattr(
        every_key.DenseScores, "mask", lambda self, keys, first: mask(self, keys + 1, first)
    )
    x = inputs([3], [140], dtype=torch.bfloat16)
    with pytest.raises(AssertionError):
        check_by_its_rule(OP, x)
