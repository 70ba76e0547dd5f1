from functools import partial

import pytest
import torch
from cases import DTYPES, INT_MAX, INT_MIN, LAYOUT_IDS, LAYOUTS, int32
from cases.npu_lightning_indexer_pto import inputs as indexer_inputs
from cases.npu_sparse_flash_attention_pto import inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import assert_attends_as_the_reference, assert_close_to_rows

import custom_pypto

attend = custom_pypto.npu_sparse_flash_attention_pto
# fills tile registers, where a CPU has them
attention_inputs = partial(inputs, latent=64, rope=32)

SEQUENCES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 70)), min_size=1, max_size=3)
ARGUMENTS = dict(
    heads=st.sampled_from([1, 2, 3, 4, 7, 16, 33, 64, 128]),
    latent=st.sampled_from([16, 32, 48, 64, 192]),
    rope=st.sampled_from([0, 16, 32]),
    block_size=st.sampled_from([16, 32, 48, 128, 1024]),
    dtype=st.sampled_from(DTYPES),
    sparse_count=st.sampled_from([1, 2, 7, 8, 16, 64, 100]),
    sparse_mode=st.sampled_from([0, 3]),
    own_value=st.booleans(),
    sinks=st.booleans(),
    hostile=st.booleans(),
    strided=st.booleans(),
    seed=st.integers(0, 2**31),
)


@settings(max_examples=200)
@given(SEQUENCES, st.sampled_from(LAYOUTS), st.fixed_dictionaries(ARGUMENTS))
def test_equals_the_reference(lengths, layouts, arguments):
    layouts = dict(zip(("layout_query", "layout_kv"), layouts, strict=True))
    assert_attends_as_the_reference(inputs(*zip(*lengths, strict=True), **layouts, **arguments))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_reference_at_every_tail_of_heads(dtype):
    for heads in range(1, 66):
        keys = 1 + heads * 5 % 43
        x = attention_inputs([1], [keys], heads=heads, latent=48, dtype=dtype, sparse_count=keys)
        assert_attends_as_the_reference(x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [4, 20, 64])  # a vector, two, four
def test_equals_the_reference_at_every_tail_of_keys(heads, dtype):
    # of a tile, of a first chunk, of the next, and of a part of the indices
    for keys in (*range(1, 50), *range(90, 100), *range(155, 165), 287, 289, 511, 513, 545, 700):
        x = attention_inputs([1], [keys], heads=heads, dtype=dtype, sparse_count=keys)
        assert_attends_as_the_reference(x)


REAL = dict(heads=16, latent=512, rope=64, block_size=128, sparse_count=2048, strided=True)
CALLS = {
    "decode-128-heads": ([1], [5000], dict(heads=128)),
    "decode-3": ([1, 1, 1], [5000, 40, 2048], {}),
    "mtp": ([4, 2], [3000, 2049], dict(heads=3)),
    "4-heads": ([12], [2500], dict(heads=4)),
    "prefill-128-heads-dense": ([40], [80], dict(heads=128)),
    "prefill-dense": ([250], [600], dict(heads=8, sparse_count=512)),
    "prefill-few-selected": ([200], [600], dict(heads=3, sparse_count=32)),
    "prefill-gather": ([60], [6000], dict(sparse_count=64)),
    "mixed-prefill-and-decode": ([30, 1, 90], [30, 4000, 200], dict(sparse_count=128)),
}


@pytest.mark.parametrize("hostile", [False, True], ids=["selected", "hostile"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths_query, lengths_key, arguments", CALLS.values(), ids=CALLS)
def test_equals_the_reference_at_real_sizes(lengths_query, lengths_key, arguments, dtype, hostile):
    arguments = REAL | dict(dtype=dtype, hostile=hostile) | arguments
    assert_attends_as_the_reference(inputs(lengths_query, lengths_key, **arguments))


def test_all_keys_selected_is_dense_attention():
    # what the indexer selects when K is no less than the number of keys is every visible one
    lengths = dict(lengths_query=[5, 3], lengths_key=[40, 17])
    x = attention_inputs(**lengths, sparse_count=64)
    x["sparse_indices"] = custom_pypto.npu_lightning_indexer_pto(
        **indexer_inputs(**lengths, sparse_count=64)
    )
    bsnd = attention_inputs(**lengths, layout_kv="BSND")
    got = attend(**x)
    for b, (n, k) in enumerate([(5, 40), (3, 17)]):
        q = torch.cat([bsnd["query"][b, :n], bsnd["query_rope"][b, :n]], -1).double()
        value = bsnd["key"][b, :k, 0].double()
        keys = torch.cat([value, bsnd["key_rope"][b, :k, 0].double()], -1)
        logits = torch.einsum("shd,kd->shk", q, keys) * x["scale_value"]
        future = torch.arange(k) > torch.arange(n)[:, None] + k - n
        dense = logits.masked_fill(future[:, None], -torch.inf).softmax(-1) @ value
        assert_close_to_rows(got[b, :n], dense.float())


@pytest.mark.parametrize("K", [2, 8, 16])
def test_keys_that_are_not_selected_have_no_part(K):
    x = attention_inputs([1], [60], layout_kv="BSND", sparse_count=K)
    expected = attend(**x)
    unselected = [p for p in range(60) if p not in x["sparse_indices"][0, 0, 0].tolist()]
    x["key"][0, unselected] = 1e4
    x["key_rope"][0, unselected] = 1e4
    assert torch.equal(attend(**x), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads, tokens", [(1, 64), (4, 30), (128, 3)])
def test_nan_in_a_key_reaches_only_the_tokens_that_select_it(heads, tokens, dtype):
    # neighbours of one prefill share their keys: 0 * NaN must not leak from one to the other
    x = attention_inputs(
        [tokens],
        [100],
        layout_kv="BSND",
        heads=heads,
        sparse_count=50,
        sparse_mode=0,
        dtype=dtype,
    )
    selects = (x["sparse_indices"][0, :tokens, 0] == 17).any(-1)
    assert selects.any() and not selects.all()
    x["key"][0, 17, 0, 3] = torch.nan
    got = assert_attends_as_the_reference(x)
    assert torch.equal(got[0, :tokens].isnan().any(-1).any(-1), selects)


def test_infinite_value_reaches_only_the_tokens_that_select_it():
    x = attention_inputs(
        [30], [100], layout_kv="BSND", own_value=True, sparse_count=50, sparse_mode=0
    )
    x["value"][0, 17] = torch.inf
    got = assert_attends_as_the_reference(x)
    selects = (x["sparse_indices"][0, :30, 0] == 17).any(-1)
    assert torch.equal(got[0, :30].isinf().any(-1).any(-1), selects)


@pytest.mark.parametrize("heads, tokens", [(1, 64), (4, 30), (128, 3)])
def test_nan_in_a_query_reaches_only_its_own_head(heads, tokens):
    x = attention_inputs([tokens], [100], heads=heads, sparse_count=50)
    x["query"][0, 1, heads // 2, 5] = torch.nan
    got = assert_attends_as_the_reference(x)
    assert got.isnan().any(-1).nonzero().tolist() == [[0, 1, heads // 2]]


def test_value_is_the_latent_part_of_the_key_when_none():
    x = attention_inputs([2], [40])
    assert torch.equal(attend(**x), attend(**x | dict(value=x["key"])))
    assert torch.equal(attend(**x), attend(**x | dict(value=x["key"].clone())))


def test_value_of_its_own_is_what_is_summed():
    x = attention_inputs([2], [40])
    x["value"] = torch.full_like(x["key"], 3.0)
    got = attend(**x)[0, :2]
    torch.testing.assert_close(got, torch.full_like(got, 3.0))


def test_weights_of_a_row_sum_to_one():
    x = attention_inputs([3], [50], sparse_count=30)
    x["value"] = torch.ones_like(x["key"])
    got = attend(**x)[0, :3]
    torch.testing.assert_close(got, torch.ones_like(got))


def test_rope_part_counts_in_the_logits():
    x = attention_inputs([2], [40])
    without = attend(**x | dict(query_rope=None, key_rope=None))
    assert (attend(**x) - without)[0, :2].abs().amin(-1).max() > 1e-3
    whole = dict(
        query=torch.cat([x["query"], x["query_rope"]], -1),
        key=torch.cat([x["key"], x["key_rope"]], -1),
        query_rope=None,
        key_rope=None,
    )
    latent = x["query"].size(-1)
    assert_close_to_rows(attend(**x | whole)[..., :latent], attend(**x), 1e-5)


def test_logits_of_any_size_do_not_overflow():
    x = attention_inputs([2], [40], heads=3)
    x["scale_value"] = 1e3  # exp(1000) is not a float32; the largest logit takes all the weight
    got = assert_attends_as_the_reference(x)
    assert got.isfinite().all()


def test_smallest_scale_makes_the_mean_of_what_is_selected():
    # tokens that share a task, some of which select nothing of its first keys: -Inf times the scale
    x = attention_inputs([4], [64], heads=2, sparse_count=50)
    x["scale_value"] = 1e-38
    got = assert_attends_as_the_reference(x)
    assert got.isfinite().all()


def test_largest_logit_last_rescales_what_was_summed():
    x = attention_inputs([1], [3000], layout_kv="BSND", sparse_count=2048, heads=2)
    order = torch.arange(3000)
    x["key"][0, :3000] = order[:, None, None] / 3000  # logits rise along the row, by 60 in all
    x["query"] = torch.ones_like(x["query"])
    x["scale_value"] = 60 / 32
    x["sparse_indices"][0, 0, 0] = order[-2048:]
    assert_attends_as_the_reference(x)
    x["sparse_indices"] = x["sparse_indices"].flip(-1)
    assert_attends_as_the_reference(x)


def test_minus_one_ends_a_row():
    x = attention_inputs([1], [40], layout_kv="BSND")
    x["sparse_indices"][0, 0, 0] = int32([5, 9, -1, 3, 2, 1, 0, 4])
    expected = x | dict(sparse_indices=x["sparse_indices"].clone())
    expected["sparse_indices"][0, 0, 0] = int32([5, 9, -1, -1, -1, -1, -1, -1])
    assert torch.equal(attend(**x), attend(**expected))
    assert_attends_as_the_reference(x)


@pytest.mark.parametrize("K", [8, 64, 2048])
@pytest.mark.parametrize("heads", [1, 16, 128])
def test_invalid_indices_before_valid_ones_are_skipped(K, heads):
    # the first chunks of a row add nothing: the running maximum is still -Inf
    x = attention_inputs([2], [40], sparse_count=K, heads=heads)
    indices = torch.full_like(x["sparse_indices"], INT_MAX)
    indices[..., 1:-2:3], indices[..., -2], indices[..., -1] = INT_MIN, 40, 7
    x["sparse_indices"] = indices
    got = assert_attends_as_the_reference(x)
    only = x | dict(sparse_indices=torch.full_like(indices, -1))
    only["sparse_indices"][..., 0] = 7
    assert_close_to_rows(got, attend(**only))
    assert got[0, :2].abs().amin(-1).gt(0).any()


@pytest.mark.parametrize("layout_query, layout_kv", LAYOUTS, ids=LAYOUT_IDS)
@pytest.mark.parametrize("index", [-1, -2, INT_MIN, INT_MAX, 40], ids=str)
def test_rows_without_a_valid_index_are_zeros(index, layout_query, layout_kv):
    x = attention_inputs([2, 3], [40, 33], layout_query=layout_query, layout_kv=layout_kv)
    x["sparse_indices"] = torch.full_like(x["sparse_indices"], index)
    assert torch.equal(attend(**x), torch.zeros_like(x["query"]))


def test_one_row_without_a_valid_index_leaves_its_neighbours_alone():
    x = attention_inputs([6], [40], heads=2, sparse_count=32)
    expected = attend(**x)
    x["sparse_indices"][0, 3] = -1
    expected[0, 3] = 0
    assert_close_to_rows(attend(**x), expected)


def test_duplicates_count_once_per_occurrence():
    x = attention_inputs([1], [40], layout_kv="BSND", heads=1, sparse_count=4)
    x["sparse_indices"][0, 0, 0] = int32([3, 3, 3, 5])
    q = torch.cat([x["query"], x["query_rope"]], -1)[0, 0, 0]
    k = torch.cat([x["key"], x["key_rope"]], -1)[0, [3, 5], 0]
    weights = torch.tensor([3.0, 1.0]) * (k @ q * x["scale_value"]).exp()
    expected = weights / weights.sum() @ x["key"][0, [3, 5], 0]
    assert_close_to_rows(attend(**x)[0, 0, 0], expected)


@pytest.mark.parametrize("tokens, heads", [(1, 4), (40, 4)], ids=["decode", "prefill"])
def test_duplicates_equal_the_reference(tokens, heads):
    x = attention_inputs([tokens], [60], heads=heads, sparse_count=50)
    x["sparse_indices"] = x["sparse_indices"].clamp(min=-1, max=20)
    assert_attends_as_the_reference(x)


def test_order_of_the_indices_does_not_matter():
    x = attention_inputs([3], [60], sparse_count=40)
    flipped = x["sparse_indices"].sort(-1, descending=True).values
    assert_close_to_rows(attend(**x | dict(sparse_indices=flipped)), attend(**x))


def test_future_positions_contribute_nothing():
    x = attention_inputs([3], [40], layout_kv="BSND")
    x["sparse_indices"][0, 0, 0] = int32([38, 3, 39, 5, 39, 7, 38, 37])
    only = x | dict(sparse_indices=x["sparse_indices"].clone())
    only["sparse_indices"][0, 0, 0] = int32([3, 5, 7, 37, -1, -1, -1, -1])
    assert_close_to_rows(attend(**x), attend(**only))
    assert (attend(**x | dict(sparse_mode=0)) - attend(**x))[0, 0].abs().max() > 1e-3


@pytest.mark.parametrize("tokens", [1, 40], ids=["decode", "prefill"])
@pytest.mark.parametrize("bad", [-1, INT_MIN, INT_MAX, 7], ids=str)
def test_positions_in_a_block_that_does_not_exist_contribute_nothing(bad, tokens):
    x = attention_inputs([tokens], [48], sparse_count=40)
    assert x["key"].size(0) <= 7
    x["block_table"][0, 1] = bad
    got = assert_attends_as_the_reference(x)
    indices = x["sparse_indices"]
    skipped = torch.where((indices >= 16) & (indices < 32), INT_MAX, indices)
    assert_close_to_rows(got, attend(**x | dict(sparse_indices=skipped)))
