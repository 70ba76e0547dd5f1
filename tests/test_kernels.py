"""The NPU kernels, run by PyPTO's interpreter through the wrappers of custom_pypto.npu."""

import math

import pytest
import torch
from cases import INT_MAX, INT_MIN
from cases.npu_checks import (
    ATTENTION_TOLERANCE,
    check_attention,
    check_fused,
    check_selection,
)
from cases.npu_programs import (
    HALF,
    attention_case,
    call,
    fused_case,
    index_case,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import assert_close_to_rows, assert_same_selection, reference
from with_pypto import simulation

import custom_pypto
from custom_pypto import npu
from custom_pypto.reference import MODULES

pytestmark = pytest.mark.sim


@pytest.fixture(scope="module", autouse=True)
def npu_programs():
    with simulation.on_cpu():
        yield


# ---- add_custom ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1,), (7, 3), (4096,), (33, 1000), (0, 5), (2, 0)], ids=str)
def test_add_is_exact(shape, dtype):
    x, y = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    assert torch.equal(custom_pypto.add_custom(x, y), x + y)


def test_add_takes_strided_operands():
    x = torch.randn(6, 8)
    assert torch.equal(custom_pypto.add_custom(x[::2], x[1::2]), x[::2] + x[1::2])
    assert torch.equal(custom_pypto.add_custom(x.t(), x.t()), 2 * x.t())


def test_add_has_a_gradient():
    x, y = (torch.randn(5, 3, requires_grad=True) for _ in range(2))
    grad = torch.randn(5, 3)
    custom_pypto.add_custom(x, y).backward(grad)
    assert torch.equal(x.grad, grad) and torch.equal(y.grad, grad)


# ---- lightning indexer ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sparse_count",
    [
        pytest.param(n, marks=[] if n in (1, 2048, 8192) else pytest.mark.slow)
        for n in (1, 2, 8, 16, 100, 512, 1000, 2048, 3072, 4096, 8192)
    ],
)
def test_programs_select_and_take_any_number_of_keys(sparse_count):
    check_selection(index_case([1], [8000], sparse_count=sparse_count))
    check_attention(attention_case([2, 1], [700, 40], sparse_count=min(sparse_count, 2048)))


@pytest.mark.parametrize(
    "heads",
    [
        pytest.param(n, marks=[] if n in (1, 12, 64) else pytest.mark.slow)
        for n in (1, 4, 12, 33, 64)
    ],
)
@pytest.mark.parametrize("block_size", [16, 48, 1024])
def test_programs_take_any_heads_and_blocks(heads, block_size):
    sizes = call([2, 1], [1100, 70], block_size=block_size)
    check_selection(index_case(**sizes, heads=heads))
    check_attention(attention_case(**sizes, heads=2 * heads))


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_indexer_does_not_round_float32_weights(weights_dtype):
    check_selection(index_case([2], [600], weights_dtype=weights_dtype, sparse_count=64))


def test_indexer_keeps_scores_that_are_negative():
    x = index_case([2], [600], sparse_count=64)
    check_selection(x | dict(weights=-x["weights"].abs()))


@pytest.mark.slow
@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 700)), min_size=1, max_size=3),
    st.fixed_dictionaries(
        dict(
            layout_query=st.sampled_from(["BSND", "TND"]),
            block_size=st.sampled_from([16, 64, 128]),
            sparse_count=st.sampled_from([8, 64, 512]),
            sparse_mode=st.sampled_from([0, 3]),
            cmp_ratio=st.sampled_from([1, 3, 4, 128]),
            seed=st.integers(0, 2**31),
        )
    ),
)
def test_indexer_on_drawn_sequences(lengths, arguments):
    queries, keys = [q for q, _ in lengths], [k for _, k in lengths]
    check_selection(index_case(queries, keys, heads=16, **arguments))


def test_indexer_with_a_key_of_an_unfinished_group_is_far_off():
    x = index_case([2], [400], sparse_count=128, cmp_ratio=4)
    for tokens in (399, 401):  # one token sees one key less, or more
        other = x | dict(actual_seq_lengths_key=torch.tensor([tokens], dtype=torch.int32))
        with pytest.raises(AssertionError, match="row"):
            check_selection(x, like=other)


@pytest.mark.slow
@pytest.mark.parametrize(
    "lengths", [[65536], [131072], [65536, 971, 32869, 16383]], ids=["64K", "128K", "far-apart"]
)
def test_indexer_at_long_context(lengths):
    queries = [2 if len(lengths) > 1 else 1] * len(lengths)
    check_selection(index_case(queries, lengths, sparse_count=2048, heads=16))


# ---- sparse attention ----------------------------------------------------------------------------


def test_attention_of_indices_that_name_nothing_is_zero():
    x = attention_case([2, 1], [300, 70], sparse_count=64)
    for value in (-1, INT_MIN, INT_MAX, 300):
        indices = torch.full_like(x["sparse_indices"], value)
        x["sparse_indices"] = indices
        assert not custom_pypto.npu_sparse_flash_attention_pto(**x).any()
        for sinks in (None, torch.linspace(-1e4, 1e4, 16)):
            assert_nothing(**x | dict(sinks=sinks))


def test_attention_of_no_index_is_zero():
    x = attention_case([2, 1], [300, 70], sparse_count=64)
    assert_nothing(**x | dict(sparse_indices=x["sparse_indices"][..., :0]))


def assert_nothing(**x):
    out, *statistics = custom_pypto.npu_sparse_flash_attention_pto(**x, return_softmax_lse=True)
    assert not out.any()
    for got, nothing in zip(statistics, (-torch.inf, 0), strict=True):
        assert torch.equal(got, torch.full((2, 1, 3, 16), nothing))


@pytest.mark.parametrize("change", ["dropped", "scaled", "swapped"])
def test_attention_with_other_sinks_is_far_off(change):
    x = attention_case([2, 1], [300, 40], sparse_count=64, sinks=(-9, 9))
    sinks = x["sinks"]
    other = dict(dropped=None, scaled=sinks * x["scale_value"], swapped=sinks.flip(0))[change]
    with pytest.raises(AssertionError, match="elements differ"):
        check_attention(x, like=x | dict(sinks=other))


def test_attention_returns_no_statistics_that_nobody_wants():
    x = attention_case([2, 1], [300, 40], sparse_count=64)
    op = torch.ops.custom_pypto.npu_sparse_flash_attention_pto
    out, *statistics = op(**x, return_softmax_lse=False)
    assert torch.equal(out, op(**x)) and [s.shape for s in statistics] == [(0,), (0,)]


def test_attention_ignores_everything_behind_a_minus_one():
    x = attention_case([1], [300], sparse_count=64)
    indices = torch.arange(64, dtype=torch.int32).view(1, 1, 1, 64).expand_as(x["sparse_indices"])
    cut = indices.clone()
    cut[..., 5] = -1
    check_attention(x | dict(sparse_indices=cut))


def test_attention_counts_an_index_as_often_as_it_occurs():
    x = attention_case([1], [300], sparse_count=64)
    check_attention(x | dict(sparse_indices=x["sparse_indices"] % 7))


@pytest.mark.slow
@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 400)), min_size=1, max_size=3),
    st.fixed_dictionaries(
        dict(
            layout_query=st.sampled_from(["BSND", "TND"]),
            block_size=st.sampled_from([16, 64, 128]),
            sparse_count=st.sampled_from([8, 64, 512]),
            sparse_mode=st.sampled_from([0, 3]),
            hostile=st.booleans(),
            sinks=st.sampled_from([None, (-9, 9)]),
            statistics=st.booleans(),
            seed=st.integers(0, 2**31),
        )
    ),
)
def test_attention_on_drawn_sequences(lengths, arguments):
    check_attention(attention_case([q for q, _ in lengths], [k for _, k in lengths], **arguments))


@pytest.mark.slow
def test_attention_at_long_context():
    check_attention(attention_case([1], [131072], sparse_count=2048))


# ---- the fused op --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lengths, S1, K",
    [
        pytest.param([300, 40], 1, 16, id="decode"),
        pytest.param([700, 130, 3], 2, 64, id="mtp"),
        pytest.param([9000, 300], 1, 64, id="two-chunks"),
    ],
)
def test_fused_selects_and_attends_to_what_it_selected(lengths, S1, K):
    """Selection from its own queries and caches, attention over its own selection: rounding before
    these, which may change what is selected, does not count."""
    values = {}

    def launch(kernel, tensors):
        found = simulation.interpret(kernel, *tensors.values())
        values.update(zip(tensors, found, strict=True))
        for name in ("kv_cache", "kr_cache", "index_k_cache", "out"):
            tensors[name].copy_(values[name])

    x = fused_case(lengths, S1, sparse_count=K)
    out = npu.implementations(launch)["npu_sparse_attention_pto"](**x)
    leading = (len(lengths), S1)
    # rows behind the last token fill tiles
    tokens = math.prod(leading)
    names = "q_latent", "q_rope", "q_index", "indices"
    q_latent, q_rope, q_index, indices = (values[name][:tokens] for name in names)
    indices = indices.view(*leading, 1, K)
    paged = dict(block_table=x["block_table"])
    assert_same_selection(
        indices,
        dict(
            query=q_index.view(*leading, 64, 128),
            key=x["index_k_cache"],
            weights=values["index_weights"].view(*leading, 64),
            actual_seq_lengths_key=x["act_seqs"],
            sparse_count=K,
            **paged,
        ),
    )
    expected = reference.npu_sparse_flash_attention_pto(
        q_latent.view(*leading, 4, 512),
        x["kv_cache"],
        None,
        indices,
        (32 + 64) ** -0.5,
        query_rope=q_rope.view(*leading, 4, 64),
        key_rope=x["kr_cache"],
        actual_seq_lengths_kv=x["act_seqs"],
        **paged,
    )
    assert_close_to_rows(out, expected, ATTENTION_TOLERANCE[out.dtype])


def test_fused_writes_the_caches_without_a_block_table():
    x = fused_case([300, 129], 2, sparse_count=64)
    check_fused(x | dict(block_table=x["block_table"][:, :0].contiguous()))


@pytest.mark.parametrize("rope", ["rope_half_split", "rope_interleaved"])
def test_fused_with_the_other_rope_is_far_off(rope, monkeypatch):
    module = MODULES["npu_sparse_attention_pto"]
    other = dict(rope_half_split="rope_interleaved", rope_interleaved="rope_half_split")[rope]
    monkeypatch.setattr(module, rope, getattr(module, other))
    with pytest.raises(AssertionError, match="elements differ"):
        check_fused(fused_case([300, 129], 1))


def test_fused_takes_int64_slots_and_float32_angles():
    x = fused_case([300, 129], 2)
    angles = {name: x[name].float() for name in ("sin", "cos")}
    check_fused(x | angles | dict(cache_index=x["cache_index"].long()))
    check_fused(x | dict(cos=x["cos"].float()))
