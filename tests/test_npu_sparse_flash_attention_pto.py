from functools import partial

import pytest
import torch
from cases import (
    DTYPES,
    FIVE_SHAPES,
    INT_MAX,
    INT_MIN,
    LAYOUT_IDS,
    LAYOUTS,
    in_a_wider_row,
    int32,
    on_meta,
    place,
    without_nan,
)
from cases.npu_lightning_indexer_pto import inputs as indexer_inputs
from cases.npu_sparse_flash_attention_pto import inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import assert_close_to_rows, reference
from torch._dynamo.testing import CompileCounterWithBackend

import custom_pypto

attend = custom_pypto.npu_sparse_flash_attention_pto
# fills tile registers, where a CPU has them
attention_inputs = partial(inputs, latent=64, rope=32)

sequences = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 70)), min_size=1, max_size=3)
extremes = st.one_of(
    st.sampled_from([INT_MIN, INT_MIN + 1, -1, 0, 1, INT_MAX - 1, INT_MAX]), st.integers(-5, 60)
)


def assert_equals_reference(x: dict) -> torch.Tensor:
    got, *ours = attend(**x, return_softmax_lse=True)
    expected, *theirs = reference.npu_sparse_flash_attention_pto(**x, return_softmax_lse=True)
    info = torch.finfo(got.dtype)
    # a step of the subnormal numbers: sinks may leave nothing else of a row
    assert_close_to_rows(got, expected, smallest=info.tiny * info.eps)
    # logits round by 2^-20 of the largest, and so does an exponential of two
    largest = theirs[0].nan_to_num(0, 0, 0).abs().max() if theirs[0].numel() else 0
    near = 2**-20 * float(8 + largest)
    for name, mine, other in zip(("max", "sum"), ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=near, atol=near, equal_nan=True, msg=name)
    torch.testing.assert_close(attend(**x), got, rtol=0, atol=0, equal_nan=True)
    return got


@st.composite
def calls(draw):
    lengths = draw(sequences)
    layout_query, layout_kv = draw(st.sampled_from(LAYOUTS))
    return attention_inputs(
        [q for q, _ in lengths],
        [k for _, k in lengths],
        heads=draw(st.sampled_from([1, 2, 3, 4, 7, 16, 33, 64, 128])),
        latent=draw(st.sampled_from([16, 32, 48, 64, 192])),
        rope=draw(st.sampled_from([0, 16, 32])),
        block_size=draw(st.sampled_from([16, 32, 48, 128, 1024])),
        layout_query=layout_query,
        layout_kv=layout_kv,
        dtype=draw(st.sampled_from(DTYPES)),
        sparse_count=draw(st.sampled_from([1, 2, 7, 8, 16, 64, 100])),
        sparse_mode=draw(st.sampled_from([0, 3])),
        own_value=draw(st.booleans()),
        sinks=draw(st.booleans()),
        hostile=draw(st.booleans()),
        strided=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )


@settings(max_examples=200)
@given(calls())
def test_equals_the_reference(x):
    assert_equals_reference(x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_reference_at_every_tail_of_heads(dtype):
    for heads in range(1, 66):
        keys = 1 + heads * 5 % 43
        x = attention_inputs([1], [keys], heads=heads, latent=48, dtype=dtype, sparse_count=keys)
        assert_equals_reference(x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [4, 20, 64])  # a vector, two, four
def test_equals_the_reference_at_every_tail_of_keys(heads, dtype):
    # of a tile, of a first chunk, of the next, and of a part of the indices
    for keys in (*range(1, 50), *range(90, 100), *range(155, 165), 287, 289, 511, 513, 545, 700):
        x = attention_inputs([1], [keys], heads=heads, dtype=dtype, sparse_count=keys)
        assert_equals_reference(x)


@pytest.mark.parametrize("hostile", [False, True], ids=["selected", "hostile"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(dict(lengths_query=[1], lengths_key=[5000], heads=128), id="decode-128-heads"),
        pytest.param(dict(lengths_query=[1, 1, 1], lengths_key=[5000, 40, 2048]), id="decode-3"),
        pytest.param(dict(lengths_query=[4, 2], lengths_key=[3000, 2049], heads=3), id="mtp"),
        pytest.param(dict(lengths_query=[12], lengths_key=[2500], heads=4), id="4-heads"),
        pytest.param(
            dict(lengths_query=[40], lengths_key=[80], heads=128), id="prefill-128-heads-dense"
        ),
        pytest.param(
            dict(lengths_query=[250], lengths_key=[600], heads=8, sparse_count=512),
            id="prefill-dense",
        ),
        pytest.param(
            dict(lengths_query=[200], lengths_key=[600], heads=3, sparse_count=32),
            id="prefill-few-selected",
        ),
        pytest.param(
            dict(lengths_query=[60], lengths_key=[6000], heads=16, sparse_count=64),
            id="prefill-gather",
        ),
        pytest.param(
            dict(lengths_query=[30, 1, 90], lengths_key=[30, 4000, 200], sparse_count=128),
            id="mixed-prefill-and-decode",
        ),
    ],
)
def test_equals_the_reference_at_real_sizes(arguments, dtype, hostile):
    sizes = dict(heads=16, latent=512, rope=64, block_size=128, sparse_count=2048, strided=True)
    assert_equals_reference(attention_inputs(**sizes | arguments, dtype=dtype, hostile=hostile))


@pytest.mark.parametrize("layout_query, layout_kv", LAYOUTS, ids=LAYOUT_IDS)
def test_every_layout_gives_the_same(layout_query, layout_kv):
    lengths = dict(lengths_query=[2, 4, 1], lengths_key=[40, 33, 70])
    x = attention_inputs(**lengths, layout_query=layout_query, layout_kv=layout_kv)
    bsnd = attention_inputs(**lengths, layout_kv="BSND")

    def placed(rows, fill):
        rows = [r[:n] for r, n in zip(rows, lengths["lengths_query"], strict=True)]
        return place(rows, layout_query, padding=1, fill=fill)

    # query and keys are the same rows in every layout, the makers' indices are not
    x["sparse_indices"] = placed(bsnd["sparse_indices"], fill=-1)
    assert_close_to_rows(attend(**x), placed(attend(**bsnd), fill=0))


def test_lengths_left_out_mean_every_token_and_key():
    x = attention_inputs([3, 3], [40, 40], layout_kv="BSND")
    x |= {name: x[name][:, :3] for name in ("query", "query_rope", "sparse_indices")}
    x |= {name: x[name][:, :40] for name in ("key", "key_rope")}
    without = x | dict(actual_seq_lengths_query=None, actual_seq_lengths_kv=None)
    assert torch.equal(attend(**without), attend(**x))


def test_defaults_are_paged_keys_and_causal():
    x = attention_inputs([3, 2], [40, 33], hostile=True)
    expected = attend(**x)
    for name in ("layout_query", "layout_kv", "sparse_mode"):
        del x[name]
    assert torch.equal(attend(**x), expected)


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
    got = assert_equals_reference(x)
    assert torch.equal(got[0, :tokens].isnan().any(-1).any(-1), selects)


def test_infinite_value_reaches_only_the_tokens_that_select_it():
    x = attention_inputs(
        [30], [100], layout_kv="BSND", own_value=True, sparse_count=50, sparse_mode=0
    )
    x["value"][0, 17] = torch.inf
    got = assert_equals_reference(x)
    selects = (x["sparse_indices"][0, :30, 0] == 17).any(-1)
    assert torch.equal(got[0, :30].isinf().any(-1).any(-1), selects)


@pytest.mark.parametrize("heads, tokens", [(1, 64), (4, 30), (128, 3)])
def test_nan_in_a_query_reaches_only_its_own_head(heads, tokens):
    x = attention_inputs([tokens], [100], heads=heads, sparse_count=50)
    x["query"][0, 1, heads // 2, 5] = torch.nan
    got = assert_equals_reference(x)
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
    got = assert_equals_reference(x)
    assert got.isfinite().all()


def test_smallest_scale_makes_the_mean_of_what_is_selected():
    # tokens that share a task, some of which select nothing of its first keys: -Inf times the scale
    x = attention_inputs([4], [64], heads=2, sparse_count=50)
    x["scale_value"] = 1e-38
    got = assert_equals_reference(x)
    assert got.isfinite().all()


def test_largest_logit_last_rescales_what_was_summed():
    x = attention_inputs([1], [3000], layout_kv="BSND", sparse_count=2048, heads=2)
    order = torch.arange(3000)
    x["key"][0, :3000] = order[:, None, None] / 3000  # logits rise along the row, by 60 in all
    x["query"] = torch.ones_like(x["query"])
    x["scale_value"] = 60 / 32
    x["sparse_indices"][0, 0, 0] = order[-2048:]
    assert_equals_reference(x)
    x["sparse_indices"] = x["sparse_indices"].flip(-1)
    assert_equals_reference(x)


def test_minus_one_ends_a_row():
    x = attention_inputs([1], [40], layout_kv="BSND")
    x["sparse_indices"][0, 0, 0] = int32([5, 9, -1, 3, 2, 1, 0, 4])
    expected = x | dict(sparse_indices=x["sparse_indices"].clone())
    expected["sparse_indices"][0, 0, 0] = int32([5, 9, -1, -1, -1, -1, -1, -1])
    assert torch.equal(attend(**x), attend(**expected))
    assert_equals_reference(x)


@pytest.mark.parametrize("K", [8, 64, 2048])
@pytest.mark.parametrize("heads", [1, 16, 128])
def test_invalid_indices_before_valid_ones_are_skipped(K, heads):
    # the first chunks of a row add nothing: the running maximum is still -Inf
    x = attention_inputs([2], [40], sparse_count=K, heads=heads)
    indices = torch.full_like(x["sparse_indices"], INT_MAX)
    indices[..., 1:-2:3], indices[..., -2], indices[..., -1] = INT_MIN, 40, 7
    x["sparse_indices"] = indices
    got = assert_equals_reference(x)
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
    assert_equals_reference(x)


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


def test_padded_rows_are_zeros():
    x = attention_inputs([1, 3], [40, 40])
    x["sparse_indices"] = torch.zeros_like(x["sparse_indices"])  # position 0 exists
    got = attend(**x)
    assert (got[0, 1:] == 0).all()
    assert (got[1, 3:] == 0).all()
    assert (got[0, 0] != 0).any()


@pytest.mark.parametrize("layout_query, layout_kv", LAYOUTS, ids=LAYOUT_IDS)
@pytest.mark.parametrize(
    "lengths_query, lengths_key",
    [
        pytest.param([2, 3], [0, 0], id="no-keys"),
        pytest.param([0, 0], [20, 5], id="no-tokens"),
        pytest.param([0], [0], id="nothing"),
        pytest.param([0, 2, 0], [9, 20, 0], id="holes"),
        pytest.param([4], [2], id="fewer-keys-than-tokens"),
    ],
)
def test_zero_lengths_give_zeros(lengths_query, lengths_key, layout_query, layout_kv):
    x = attention_inputs(
        lengths_query, lengths_key, layout_query=layout_query, layout_kv=layout_kv, hostile=True
    )
    got = assert_equals_reference(x)
    if max(lengths_key) == 0 or max(lengths_query) == 0:
        assert (got == 0).all()


PER_SEQUENCE = [
    "query",
    "query_rope",
    "sparse_indices",
    "actual_seq_lengths_query",
    "actual_seq_lengths_kv",
    "block_table",
]
TOKENS = PER_SEQUENCE[:3]


@pytest.mark.parametrize(
    "empty",
    [
        pytest.param(lambda x: x | {k: x[k][:0] for k in PER_SEQUENCE}, id="no-sequences"),
        pytest.param(lambda x: x | {k: x[k][:, :0] for k in TOKENS}, id="no-tokens"),
        pytest.param(lambda x: x | {k: x[k][:0] for k in ("key", "key_rope")}, id="no-blocks"),
        pytest.param(lambda x: x | dict(block_table=x["block_table"][:, :0]), id="no-table"),
        pytest.param(lambda x: x | dict(sparse_indices=x["sparse_indices"][..., :0]), id="K-0"),
    ],
)
def test_empty_tensors_give_zeros(empty):
    x = empty(attention_inputs([2, 1], [40, 33]))
    assert torch.equal(attend(**x), torch.zeros_like(x["query"]))


@pytest.mark.parametrize("layout_kv", ["PA_BSND", "BSND"])
def test_sequences_without_a_token_take_no_memory(layout_kv):
    # as many sequences as no memory could list
    sequences = 2**40
    lengths = int32([7]).expand(sequences)
    x = dict(
        query=torch.zeros(sequences, 0, 2, 16),
        key=torch.zeros(*((2, 16) if layout_kv == "PA_BSND" else (sequences, 0)), 1, 16),
        value=None,
        sparse_indices=int32([]).view(0, 1, 8).expand(sequences, 0, 1, 8),
        scale_value=1.0,
        actual_seq_lengths_query=lengths,
        actual_seq_lengths_kv=lengths,
        block_table=int32([[0]]).expand(sequences, 1) if layout_kv == "PA_BSND" else None,
    )
    assert attend(**x, layout_kv=layout_kv).shape == x["query"].shape


@settings(max_examples=300)
@given(
    st.sampled_from(LAYOUTS),
    st.lists(extremes, min_size=2, max_size=2),
    st.lists(extremes, min_size=2, max_size=2),
    st.lists(extremes, min_size=6, max_size=6),
    st.lists(extremes, min_size=8, max_size=8),
    st.sampled_from([0, 3]),
)
def test_no_length_index_or_block_id_leads_outside_the_tensors(
    layouts, len_q, len_kv, ids, indices, mode
):
    x = without_nan(  # every row may be reached now
        attention_inputs(
            [3, 2], [40, 33], layout_query=layouts[0], layout_kv=layouts[1], sparse_mode=mode
        )
    )
    x |= dict(actual_seq_lengths_query=int32(len_q), actual_seq_lengths_kv=int32(len_kv))
    x["sparse_indices"] = int32(indices).expand_as(x["sparse_indices"])
    if layouts[1] == "PA_BSND":
        x["block_table"] = int32(ids).view(2, 3)
    assert_equals_reference(x)


@pytest.mark.parametrize("tokens", [1, 40], ids=["decode", "prefill"])
@pytest.mark.parametrize("bad", [-1, INT_MIN, INT_MAX, 7], ids=str)
def test_positions_in_a_block_that_does_not_exist_contribute_nothing(bad, tokens):
    x = attention_inputs([tokens], [48], sparse_count=40)
    assert x["key"].size(0) <= 7
    x["block_table"][0, 1] = bad
    got = assert_equals_reference(x)
    indices = x["sparse_indices"]
    skipped = torch.where((indices >= 16) & (indices < 32), INT_MAX, indices)
    assert_close_to_rows(got, attend(**x | dict(sparse_indices=skipped)))


def test_rows_outside_the_sequences_are_not_read():
    # the makers poison them all, and a NaN would be seen
    x = attention_inputs([3, 1], [17, 40], hostile=True, sparse_count=64)
    assert x["key"].isnan().any() and x["query"].isnan().any()
    assert torch.equal(attend(**x), attend(**without_nan(x)))


@pytest.mark.parametrize(
    "name", ["query", "key", "value", "sparse_indices", "query_rope", "key_rope", "sinks"]
)
def test_strided_inputs_give_the_same_as_contiguous_ones(name):
    x = attention_inputs([3, 2], [40, 33], own_value=True, sinks=True)
    wide = None
    if name in ("sparse_indices", "sinks"):
        wide = x[name].repeat_interleave(2, -1)[..., ::2]
    strided = x | {name: in_a_wider_row(x[name]) if wide is None else wide}
    assert not strided[name].is_contiguous()
    assert torch.equal(attend(**strided), attend(**x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(dict(lengths_query=[1], lengths_key=[5000], sparse_count=2048), id="decode"),
        pytest.param(
            dict(lengths_query=[1, 3, 1], lengths_key=[3000, 30, 2500], sparse_count=2048),
            id="ragged",
        ),
        pytest.param(dict(lengths_query=[70], lengths_key=[300], sparse_count=200), id="dense"),
        pytest.param(dict(lengths_query=[30], lengths_key=[3000], sparse_count=40), id="gather"),
    ],
)
def test_result_does_not_depend_on_the_number_of_threads(arguments, dtype):
    x = attention_inputs(**arguments, heads=8, latent=64, rope=16, block_size=128, dtype=dtype)
    results = []
    for threads in (1, 2, 3, 7, 2):
        torch.set_num_threads(threads)
        results.append(attend(**x, return_softmax_lse=True))
    assert all(torch.equal(a, b) for r in results[1:] for a, b in zip(results[0], r, strict=True))


def test_a_chunk_gives_what_single_tokens_give():
    x = attention_inputs([6], [60], heads=2, sparse_count=32)
    chunk = attend(**x)
    for i in range(6):
        step = x | {k: x[k][:, i : i + 1] for k in ("query", "query_rope", "sparse_indices")}
        step |= dict(actual_seq_lengths_query=None, actual_seq_lengths_kv=int32([60 - 5 + i]))
        assert_close_to_rows(attend(**step), chunk[:, i : i + 1])


@pytest.mark.parametrize("name", ["query", "key", "value", "query_rope", "key_rope", "sinks"])
@pytest.mark.parametrize("output", range(4))
def test_backward_says_that_it_is_not_implemented(name, output):
    x = without_nan(attention_inputs([2], [40], own_value=True, sinks=True))
    x[name].requires_grad_()
    out = attend(**x, return_softmax_lse=True)[output] if output < 3 else attend(**x)
    with pytest.raises(RuntimeError, match="npu_sparse_flash_attention_pto.*not implemented"):
        out.sum().backward()
    assert x[name].grad is None


def test_inference_takes_inputs_that_require_gradients():
    x = without_nan(attention_inputs([2], [40]))
    expected = attend(**x)
    x["query"].requires_grad_()
    with torch.no_grad():
        assert torch.equal(attend(**x), expected)
    with torch.inference_mode():
        assert torch.equal(attend(**x), expected)


@pytest.mark.parametrize("layout_query, layout_kv", LAYOUTS, ids=LAYOUT_IDS)
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(dict(), id="rope"),
        pytest.param(dict(rope=0), id="no-rope"),
        pytest.param(dict(own_value=True, dtype=torch.bfloat16), id="value-bf16"),
        pytest.param(dict(sinks=True), id="sinks"),
        pytest.param(dict(strided=True, dtype=torch.float16), id="strided-fp16"),
    ],
)
def test_op_is_registered_as_torch_expects(arguments, layout_query, layout_kv):
    x = without_nan(
        attention_inputs(
            [2, 3], [20, 33], layout_query=layout_query, layout_kv=layout_kv, **arguments
        )
    )
    names = ("query", "key", "value", "sparse_indices", "scale_value")
    positional = tuple(x.pop(name) for name in names)
    op = torch.ops.custom_pypto.npu_sparse_flash_attention_pto
    torch.library.opcheck(op.default, positional, x)
    for wanted in (True, False):
        torch.library.opcheck(op.softmax_lse, positional, x | dict(return_softmax_lse=wanted))


@pytest.mark.parametrize("layout_query, layout_kv", LAYOUTS, ids=LAYOUT_IDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_meta_gives_the_shape_and_dtype_of_the_result(layout_query, layout_kv, dtype):
    x = attention_inputs(
        [2, 3], [20, 33], layout_query=layout_query, layout_kv=layout_kv, dtype=dtype
    )
    x["query"] = in_a_wider_row(x["query"])
    for wanted in (False, True):
        outputs = (attend(**y, return_softmax_lse=wanted) for y in (x, on_meta(x)))
        for real, meta in zip(*(o if wanted else (o,) for o in outputs), strict=True):
            expected = real.shape, real.stride(), real.dtype
            assert (meta.shape, meta.stride(), meta.dtype) == expected


@pytest.mark.parametrize("statistics", [False, True], ids=["", "statistics"])
@pytest.mark.parametrize("layout_query, layout_kv", LAYOUTS, ids=LAYOUT_IDS)
def test_five_shapes_compile_at_most_twice_and_equal_eager(layout_query, layout_kv, statistics):
    function = partial(attend, return_softmax_lse=True) if statistics else attend
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter, dynamic=True, fullgraph=True)
    for lengths_query, lengths_key in FIVE_SHAPES:
        # heads, dims and K that no other size equals: equal sizes would share a symbol
        x = attention_inputs(
            lengths_query,
            lengths_key,
            layout_query=layout_query,
            layout_kv=layout_kv,
            heads=11,
            latent=64,
            rope=48,
            sparse_count=27,
            sinks=statistics,
        )
        got, expected = (f(**x) for f in (compiled, function))
        pairs = zip(got, expected, strict=True) if statistics else [(got, expected)]
        assert all(torch.equal(mine, eager) for mine, eager in pairs)
    assert counter.frame_count <= 2
