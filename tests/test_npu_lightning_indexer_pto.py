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
    visible_keys,
    without_nan,
)
from cases.npu_lightning_indexer_pto import inputs as indexer_inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import assert_same_selection, reference
from torch._dynamo.testing import CompileCounterWithBackend

import custom_pypto

index = custom_pypto.npu_lightning_indexer_pto

sequences = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 70)), min_size=1, max_size=3)
extremes = st.one_of(
    st.sampled_from([INT_MIN, INT_MIN + 1, -1, 0, 1, INT_MAX - 1, INT_MAX]), st.integers(-5, 60)
)


@st.composite
def calls(draw, **fixed):
    lengths = draw(sequences)
    layout_query, layout_key = draw(st.sampled_from(LAYOUTS))
    dtype = draw(st.sampled_from(DTYPES))
    arguments = dict(
        heads=draw(st.sampled_from([1, 2, 3, 4, 7, 16, 33, 64])),
        dim=draw(st.sampled_from([16, 32, 48, 96, 128, 160])),
        block_size=draw(st.sampled_from([16, 32, 48, 128, 1024])),
        layout_query=layout_query,
        layout_key=layout_key,
        dtype=dtype,
        weights_dtype=draw(st.sampled_from([dtype, torch.float32])),
        sparse_count=draw(st.sampled_from([1, 2, 7, 8, 16, 64, 2048])),
        sparse_mode=draw(st.sampled_from([0, 3])),
        cmp_ratio=draw(st.sampled_from([1, 1, 2, 4, 7])),
        strided=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )
    return indexer_inputs([q for q, _ in lengths], [k for _, k in lengths], **arguments | fixed)


def one_token(scores: list[float], **keywords) -> dict:
    """A call in which key ``j`` scores exactly ``scores[j]``: ``±1 * relu(|scores[j]|)``."""
    query = torch.zeros(1, 1, 2, 16)
    query[..., 0, 0], query[..., 1, 1] = 1, 1  # head 0 reads dim 0, head 1 reads dim 1
    key = torch.zeros(1, len(scores), 1, 16)
    key[0, :, 0, 0] = torch.tensor(scores).clamp(min=0)
    key[0, :, 0, 1] = (-torch.tensor(scores)).clamp(min=0)
    weights = torch.tensor([[[1.0, -1.0]]])
    return dict(query=query, key=key, weights=weights, layout_key="BSND", sparse_count=8) | keywords


@settings(max_examples=200)
@given(calls())
def test_selects_what_the_reference_selects(x):
    assert_same_selection(index(**x), x)


@settings(max_examples=200)
@given(calls(integers=True))
def test_equals_the_reference_exactly_where_arithmetic_is_exact(x):
    # small integers: no rounding, many ties, so order and choice are determined
    assert torch.equal(index(**x), reference.npu_lightning_indexer_pto(**x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [16, 48, 128, 1024])
def test_selects_what_the_reference_selects_at_every_tail(block_size, dtype):
    """Numbers of heads that fill panels and those that do not, keys that fill tiles and not, and
    as many places as keys, one less and one more."""
    for heads in range(1, 66):
        for rest in range(16):
            # each number of heads meets each rest in one of the four block sizes
            if (heads + rest) % 4 != (16, 48, 128, 1024).index(block_size):
                continue
            keys = 16 * (heads % 3) + rest
            x = indexer_inputs(
                [2],
                [keys],
                heads=heads,
                dim=16,
                block_size=block_size,
                dtype=dtype,
                sparse_count=max(1, keys + heads % 3 - 1),
                integers=True,
                seed=heads,
            )
            expected = reference.npu_lightning_indexer_pto(**x)
            assert torch.equal(index(**x), expected), f"{heads} heads, {keys} keys"


@pytest.mark.parametrize("integers", [False, True], ids=["random", "ties"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(dict(lengths_query=[1], lengths_key=[20_000], heads=64), id="decode-20k-keys"),
        pytest.param(dict(lengths_query=[2], lengths_key=[2049], heads=4), id="one-key-too-many"),
        pytest.param(dict(lengths_query=[1], lengths_key=[2048], heads=16), id="as-many-keys-as-K"),
        pytest.param(
            dict(lengths_query=[1, 2, 3], lengths_key=[5000, 17, 2500], heads=40), id="ragged"
        ),
        pytest.param(dict(lengths_query=[3], lengths_key=[4100], heads=1), id="1-head"),
        pytest.param(dict(lengths_query=[2], lengths_key=[3000], heads=128), id="128-heads"),
        pytest.param(dict(lengths_query=[150], lengths_key=[2600], heads=16), id="prefill-chunk"),
        pytest.param(dict(lengths_query=[300], lengths_key=[300], heads=64), id="prefill"),
        pytest.param(
            dict(lengths_query=[2], lengths_key=[6000], heads=4, dim=64, block_size=1024),
            id="blocks-of-1024",
        ),
        pytest.param(
            dict(lengths_query=[1], lengths_key=[9000], heads=2, sparse_count=1), id="K-1"
        ),
        pytest.param(
            dict(lengths_query=[2], lengths_key=[9001], heads=4, sparse_count=8192), id="K-8192"
        ),
    ],
)
def test_selects_what_the_reference_selects_at_real_sizes(arguments, dtype, integers):
    x = indexer_inputs(
        **dict(dim=128, block_size=128, sparse_count=2048, integers=integers, dtype=dtype)
        | arguments
    )
    got = index(**x)
    if integers:
        assert torch.equal(got, reference.npu_lightning_indexer_pto(**x))
    else:
        assert_same_selection(got, x)


def test_positions_beyond_65535_are_selected():
    x = indexer_inputs([1], [70_000], heads=2, dim=16, block_size=1024, sparse_count=3072)
    got = index(**x)
    assert (got > 65_535).any()
    assert_same_selection(got, x)


@pytest.mark.parametrize("layout_query, layout_key", LAYOUTS, ids=LAYOUT_IDS)
def test_every_layout_selects_the_same(layout_query, layout_key):
    lengths = dict(lengths_query=[2, 4, 1], lengths_key=[40, 33, 70])
    x = indexer_inputs(**lengths, layout_query=layout_query, layout_key=layout_key, integers=True)
    bsnd = indexer_inputs(**lengths, integers=True, layout_key="BSND")
    got, expected = index(**x), index(**bsnd)
    rows = [expected[b, :n] for b, n in enumerate(lengths["lengths_query"])]
    assert torch.equal(got, place(rows, layout_query, padding=1, fill=-1))


def test_lengths_left_out_mean_every_token_and_key():
    x = indexer_inputs([3, 3], [40, 40], layout_key="BSND")
    x |= dict(query=x["query"][:, :3], weights=x["weights"][:, :3], key=x["key"][:, :40])
    without = x | dict(actual_seq_lengths_query=None, actual_seq_lengths_key=None)
    assert torch.equal(index(**without), index(**x))
    assert (index(**x) >= 0).all()


def test_defaults_are_paged_keys_2048_wide_and_causal():
    x = indexer_inputs([3, 2], [40, 33], sparse_count=2048)
    for name in ("layout_query", "layout_key", "sparse_count", "sparse_mode", "cmp_ratio"):
        del x[name]
    got = index(**x)
    assert got.shape == (2, 4, 1, 2048)
    assert_same_selection(got, x)


def test_relu_comes_before_the_weight():
    query = torch.eye(2, 16)[None, None]
    key = torch.zeros(1, 3, 1, 16)
    key[0, :, 0, :2] = torch.tensor([[1.0, -1.0], [1.5, 0.0], [3.0, 2.5]])
    x = dict(query=query, key=key, weights=torch.tensor([[[1.0, -1.0]]]), layout_key="BSND")
    # relu, weight, sum: 1, 1.5, 0.5; weight, relu, sum: 2, 1.5, 3; weight, sum, relu: 2, 1.5, 0.5
    assert index(**x, sparse_count=3).tolist() == [[[[1, 0, 2]]]]


def test_negative_scores_are_ranked_not_cut_at_zero():
    x = one_token([-3.0, -1.0, -2.0, 0.0])
    assert index(**x).flatten().tolist() == [3, 1, 2, 0, -1, -1, -1, -1]


def test_every_weight_negative_puts_the_least_alike_key_first():
    x = indexer_inputs([2], [50], integers=True)
    x["weights"] = -x["weights"].abs() - 1
    assert torch.equal(index(**x), reference.npu_lightning_indexer_pto(**x))


def test_float32_weights_are_not_rounded_to_the_dtype_of_the_query():
    # 1 + 2^-12 is 1 in bf16 and fp16; it decides between two keys here
    x = one_token([1.0, 1.0], sparse_count=2)
    x["key"][0, 1, 0, :2] = torch.tensor([0.0, 1.0])
    x["weights"] = torch.tensor([[[1.0, 1.0 + 2**-12]]])
    for dtype in (torch.bfloat16, torch.float16):
        low = x | dict(query=x["query"].to(dtype), key=x["key"].to(dtype))
        assert index(**low).flatten().tolist() == [1, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_are_summed_in_float32(dtype):
    # 256 + 1 is 256 in bf16, 2048 + 1 is 2048 in fp16: summed in the dtype, both keys tie
    big = 256.0 if dtype is torch.bfloat16 else 2048.0
    query, key = torch.ones(1, 1, 1, 16, dtype=dtype), torch.zeros(1, 2, 1, 16, dtype=dtype)
    key[0, :, 0, 0] = big
    key[0, 1, 0, 1:5] = 0.25
    x = dict(query=query, key=key, weights=torch.ones(1, 1, 1, dtype=dtype), layout_key="BSND")
    assert index(**x, sparse_count=2).flatten().tolist() == [1, 0]


def test_equal_scores_give_the_lower_position_first():
    x = one_token([1.0, 2.0, 1.0, 2.0, 1.0, 2.0], sparse_count=4)
    assert index(**x).flatten().tolist() == [1, 3, 5, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sparse_count", [1, 64, 2048])
def test_constant_scores_select_the_first_positions_in_order(dtype, sparse_count):
    x = indexer_inputs(
        [3], [5000], heads=16, dim=128, block_size=128, dtype=dtype, sparse_count=sparse_count
    )
    x["weights"] = torch.zeros_like(x["weights"])
    got = index(**x)
    assert torch.equal(got[0, :3, 0], torch.arange(sparse_count).int().expand(3, -1))


def test_duplicated_pages_are_ranked_by_position():
    # 37 table entries name one block, as a shared prefix does: every score occurs 37 times
    x = indexer_inputs([2], [37 * 16], sparse_count=100)
    x["block_table"][0, :37] = x["block_table"][0, 5].clone()
    got = index(**x)
    assert (got[0, 1, 0, :37].diff() == 16).all()
    assert_same_selection(got, x)


def test_minus_zero_and_zero_tie():
    # a negative weight times relu = 0 is -0: without care it would rank below the +0 before it
    query, key = torch.zeros(1, 1, 1, 16), torch.zeros(1, 6, 1, 16)
    query[..., 0] = 1
    key[0, ::2, 0, 0] = -1
    x = dict(query=query, key=key, layout_key="BSND", sparse_count=6)
    for weight in (-1.0, 1.0, -0.0, 0.0):
        x["weights"] = torch.full((1, 1, 1), weight)
        assert index(**x).flatten().tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("keys", [5, 100, 6000])
def test_nan_scores_rank_first_the_lower_position_before(keys):
    x = indexer_inputs([1], [keys], layout_key="BSND", sparse_count=8)
    nan = [1, keys - 2]
    x["key"][0, nan, 0, 7] = torch.nan
    got = index(**x)[0, 0, 0].tolist()
    assert got[:2] == nan
    assert_same_selection(index(**x), x)


def test_negative_nan_ranks_first_too():
    x = indexer_inputs([1], [50], layout_key="BSND")
    x["key"][0, 20, 0, 0] = -torch.tensor(torch.nan)
    x["weights"] = -x["weights"].abs()
    assert index(**x)[0, 0, 0, 0] == 20


def test_nan_query_selects_the_first_positions():
    x = indexer_inputs([2], [50])
    x["query"][0, 0, 1, 3] = torch.nan
    assert index(**x)[0, 0, 0].tolist() == list(range(8))


def test_more_nan_than_places_keep_the_lowest_positions():
    x = indexer_inputs([1], [6000], layout_key="BSND", sparse_count=2048)
    x["key"][0, 1::2] = torch.nan
    assert torch.equal(index(**x)[0, 0, 0], torch.arange(1, 4096, 2).int())


def test_infinite_scores_are_first_and_last_and_lose_only_to_nan():
    values = torch.tensor([1.0, 5.0, torch.inf, 0.0, torch.nan])
    x = dict(query=torch.ones(1, 1, 1, 16), weights=torch.ones(1, 1, 1), layout_key="BSND")
    x |= dict(key=values[None, :, None, None].repeat(1, 1, 1, 16), sparse_count=8)
    assert index(**x).flatten().tolist() == [4, 2, 1, 0, 3, -1, -1, -1]
    x["weights"] = -x["weights"]
    assert index(**x).flatten().tolist() == [4, 3, 0, 1, 2, -1, -1, -1]


def test_scores_that_overflow_to_minus_infinity_are_still_selected():
    x = indexer_inputs([1], [6], sparse_count=8, heads=1)
    x["query"], x["key"] = torch.full_like(x["query"], 1e30), torch.full_like(x["key"], 1e30)
    x["weights"] = torch.full_like(x["weights"], -1.0)
    assert index(**x)[0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, -1, -1]


@settings(max_examples=100)
@given(sequences, st.sampled_from(LAYOUTS), st.sampled_from([0, 3]), st.sampled_from([2, 8, 16]))
def test_rows_hold_distinct_visible_positions_then_minus_one(lengths, layouts, mode, K):
    lengths_query, lengths_key = [q for q, _ in lengths], [k for _, k in lengths]
    x = indexer_inputs(
        lengths_query,
        lengths_key,
        layout_query=layouts[0],
        layout_key=layouts[1],
        sparse_count=K,
        sparse_mode=mode,
    )
    got = index(**x)
    assert got.dtype == torch.int32
    assert got.shape == (*x["query"].shape[:-2], 1, K)
    seen = [
        int32([visible_keys(i, n, k, mode) for i in range(n)])[:, None]
        for n, k in zip(lengths_query, lengths_key, strict=True)
    ]
    seen = place(seen, layouts[0], padding=1, fill=0)
    valid = got >= 0
    assert torch.equal(valid.sum(-1), seen.clamp(max=K).long())
    assert (got[~valid] == -1).all()
    assert not (~valid[..., :-1] & valid[..., 1:]).any(), "a valid position after a -1"
    assert (got < seen.clamp(min=1)[..., None]).all()
    for row in got.flatten(0, -2):
        chosen = row[row >= 0]
        assert len(chosen.unique()) == len(chosen)


def test_scores_of_a_row_descend():
    x = indexer_inputs([2], [500], sparse_count=64)
    got = index(**x)
    keys = indexer_inputs([2], [500], sparse_count=64, layout_key="BSND")["key"][0, :, 0]
    for i in range(2):
        scores = x["weights"][0, i] @ torch.relu(x["query"][0, i] @ keys[got[0, i, 0].long()].T)
        assert (scores.diff() <= 1e-5).all()


def test_future_keys_are_never_selected_however_good():
    x = indexer_inputs([4], [40], layout_key="BSND")
    x["weights"], x["query"] = torch.ones_like(x["weights"]), torch.ones_like(x["query"])
    x["key"][0, :40] = torch.arange(40.0)[:, None, None]  # the later the better
    got = index(**x)[0, :4, 0]
    assert got[:, 0].tolist() == [36, 37, 38, 39]
    x["sparse_mode"] = 0
    assert index(**x)[0, :4, 0, 0].tolist() == [39, 39, 39, 39]


def test_first_query_tokens_that_precede_every_key_select_nothing():
    got = index(**indexer_inputs([4], [2]))[0, :4, 0, :3]
    assert got[:2].eq(-1).all()
    assert got[2].tolist() == [0, -1, -1]
    assert sorted(got[3].tolist()) == [-1, 0, 1]


@pytest.mark.parametrize("layout_query, layout_key", LAYOUTS, ids=LAYOUT_IDS)
@pytest.mark.parametrize(
    "lengths_query, lengths_key",
    [
        pytest.param([2, 3], [0, 0], id="no-keys"),
        pytest.param([0, 0], [20, 5], id="no-tokens"),
        pytest.param([0], [0], id="nothing"),
        pytest.param([0, 2, 0], [9, 20, 0], id="holes"),
    ],
)
def test_zero_lengths_give_minus_one(lengths_query, lengths_key, layout_query, layout_key):
    x = indexer_inputs(
        lengths_query, lengths_key, layout_query=layout_query, layout_key=layout_key, integers=True
    )
    got = index(**x)
    assert torch.equal(got, reference.npu_lightning_indexer_pto(**x))
    if max(lengths_key) == 0 or max(lengths_query) == 0:
        assert (got == -1).all()


def test_padded_rows_are_minus_one():
    x = indexer_inputs([1, 3], [40, 40])
    got = index(**x)
    assert (got[0, 1:] == -1).all()
    assert (got[1, 3:] == -1).all()


@pytest.mark.parametrize("layout_query, layout_key", LAYOUTS, ids=LAYOUT_IDS)
def test_width_stays_K_when_there_are_fewer_keys(layout_query, layout_key):
    x = indexer_inputs(
        [2], [5], layout_query=layout_query, layout_key=layout_key, sparse_count=2048
    )
    got = index(**x)
    assert got.size(-1) == 2048
    assert ((got >= 0).sum(-1).flatten()[:2] == torch.tensor([4, 5])).all()


PER_SEQUENCE = [
    "query",
    "weights",
    "actual_seq_lengths_query",
    "actual_seq_lengths_key",
    "block_table",
]


@pytest.mark.parametrize(
    "empty",
    [
        pytest.param(lambda x: x | {k: x[k][:0] for k in PER_SEQUENCE}, id="no-sequences"),
        pytest.param(
            lambda x: x | dict(query=x["query"][:, :0], weights=x["weights"][:, :0]), id="no-tokens"
        ),
        pytest.param(lambda x: x | dict(key=x["key"][:0]), id="no-blocks"),
        pytest.param(lambda x: x | dict(block_table=x["block_table"][:, :0]), id="no-table"),
    ],
)
def test_empty_tensors_give_an_empty_selection(empty):
    x = empty(indexer_inputs([2, 1], [40, 33]))
    got = index(**x)
    assert got.shape == (*x["query"].shape[:2], 1, 8)
    assert (got == -1).all()


@pytest.mark.parametrize("layout_key", ["PA_BSND", "BSND"])
def test_sequences_without_a_token_take_no_memory(layout_key):
    # as many sequences as no memory could list
    sequences = 2**40
    lengths = int32([7]).expand(sequences)
    keys = (2, 16) if layout_key == "PA_BSND" else (sequences, 0)
    x = dict(
        query=torch.zeros(sequences, 0, 2, 16),
        key=torch.zeros(*keys, 1, 16),
        weights=torch.zeros(sequences, 0, 2),
        actual_seq_lengths_query=lengths,
        actual_seq_lengths_key=lengths,
        block_table=int32([[0]]).expand(sequences, 1) if layout_key == "PA_BSND" else None,
    )
    assert index(**x, layout_key=layout_key, sparse_count=8).shape == (sequences, 0, 1, 8)


@pytest.mark.parametrize("layout_query, layout_key", LAYOUTS, ids=LAYOUT_IDS)
@pytest.mark.parametrize("cmp_ratio", [1, 2, 4, 128])
def test_a_token_sees_the_rows_whose_tokens_it_has_all_seen(cmp_ratio, layout_query, layout_key):
    # the last one is of fewer tokens than queries, and of less than a row
    lengths_query, lengths_key = [5, 9, 3], [3 * cmp_ratio + 1, 5 * cmp_ratio - 1, 2]
    x = indexer_inputs(
        lengths_query,
        lengths_key,
        layout_query=layout_query,
        layout_key=layout_key,
        cmp_ratio=cmp_ratio,
        sparse_count=16,
        integers=True,
    )
    seen = []
    for n, tokens in zip(lengths_query, lengths_key, strict=True):
        # position p of token i is tokens - n + i; it has seen p + 1 tokens
        positions = range(tokens - n, tokens)
        seen.append(int32([max(p + 1, 0) // cmp_ratio for p in positions])[:, None])
    seen = place(seen, layout_query, padding=1, fill=0)
    got = index(**x).sort(-1, descending=True).values
    expected = torch.arange(15, -1, -1).int() - 16 + seen[..., None]
    assert torch.equal((got >= 0).sum(-1), seen.long())
    assert torch.equal(got[got >= 0], expected[expected >= 0])
    assert torch.equal(index(**x), reference.npu_lightning_indexer_pto(**x))


def test_every_row_of_compressed_keys_is_seen_without_a_mask():
    x = indexer_inputs([3], [43], cmp_ratio=4, sparse_mode=0, sparse_count=16)
    got = index(**x)[0, :3, 0]
    assert torch.equal((got >= 0).sum(-1), torch.tensor([10, 10, 10]))


def test_compressed_lengths_left_out_mean_every_row():
    x = indexer_inputs([2], [48], layout_key="BSND", cmp_ratio=4, sparse_count=16)
    x |= dict(key=x["key"][:, :12], query=x["query"][:, :2], weights=x["weights"][:, :2])
    without = x | dict(actual_seq_lengths_query=None, actual_seq_lengths_key=None)
    assert torch.equal(index(**without), index(**x))
    assert (index(**x) >= 0).sum(-1).flatten().tolist() == [11, 12]


def test_compressed_keys_are_packed_one_sequence_after_another():
    # 9 tokens have 2 rows, the next sequence begins at the third
    x = indexer_inputs(
        [1, 1], [9, 12], layout_query="TND", layout_key="TND", cmp_ratio=4, integers=True
    )
    assert x["actual_seq_lengths_key"].tolist() == [9, 21]
    x["key"] = torch.arange(len(x["key"])).float()[:, None, None].repeat(1, 1, 32)
    x["query"], x["weights"] = torch.ones_like(x["query"]), torch.ones_like(x["weights"])
    assert index(**x)[:2, 0, :4].tolist() == [[1, 0, -1, -1], [2, 1, 0, -1]]
    x["weights"][1] = -1
    assert index(**x)[:2, 0, :4].tolist() == [[1, 0, -1, -1], [0, 1, 2, -1]]


@settings(max_examples=300)
@given(
    st.sampled_from(LAYOUTS),
    st.lists(extremes, min_size=2, max_size=2),
    st.lists(extremes, min_size=2, max_size=2),
    st.lists(extremes, min_size=6, max_size=6),
    st.sampled_from([0, 3]),
    st.sampled_from([1, 2, 4, 128]),
)
def test_no_length_or_block_id_leads_outside_the_tensors(layouts, len_q, len_k, ids, mode, ratio):
    x = indexer_inputs(
        [3, 2],
        [40 * ratio, 33 * ratio],
        layout_query=layouts[0],
        layout_key=layouts[1],
        sparse_mode=mode,
        cmp_ratio=ratio,
        integers=True,
    )
    x = without_nan(x)  # every row may be reached now
    x |= dict(actual_seq_lengths_query=int32(len_q), actual_seq_lengths_key=int32(len_k))
    if layouts[1] == "PA_BSND":
        x["block_table"] = int32(ids).view(2, 3)
    assert torch.equal(index(**x), reference.npu_lightning_indexer_pto(**x))


@pytest.mark.parametrize("bad", [-1, INT_MIN, INT_MAX, 7], ids=str)
def test_positions_in_a_block_that_does_not_exist_are_not_selected(bad):
    x = indexer_inputs([1], [48], sparse_count=64)
    assert x["key"].size(0) <= 7
    x["block_table"][0, 1] = bad
    got = index(**x)
    assert sorted(got[got >= 0].tolist()) == [*range(16), *range(32, 48)]
    assert_same_selection(got, x)


def test_rows_outside_the_sequences_are_not_read():
    # the makers poison them all: a NaN score would be first
    clean = indexer_inputs([3, 1], [17, 40], integers=True)
    assert clean["key"].isnan().any() and clean["query"].isnan().any()
    assert torch.equal(index(**clean), index(**without_nan(clean)))


@pytest.mark.parametrize("name", ["query", "key", "weights"])
def test_strided_inputs_give_the_same_as_contiguous_ones(name):
    x = indexer_inputs([3, 2], [40, 33], integers=True)
    strided = x | {name: in_a_wider_row(x[name])}
    assert not strided[name].is_contiguous()
    assert torch.equal(index(**strided), index(**x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(dict(lengths_query=[1], lengths_key=[9000]), id="one-token"),
        pytest.param(dict(lengths_query=[1, 2, 1], lengths_key=[3000, 10, 2500]), id="ragged"),
        pytest.param(dict(lengths_query=[37], lengths_key=[2600]), id="prefill"),
    ],
)
def test_result_does_not_depend_on_the_number_of_threads(arguments, dtype):
    x = indexer_inputs(**arguments, heads=8, dim=64, block_size=128, sparse_count=2048, dtype=dtype)
    x["key"][:, ::3] = 0  # a third of the scores tie
    results = []
    for threads in (1, 2, 3, 7, 2):
        torch.set_num_threads(threads)
        results.append(index(**x))
    assert all(torch.equal(results[0], r) for r in results[1:])


def test_a_chunk_selects_what_single_tokens_select():
    x = indexer_inputs([6], [60], integers=True)
    chunk = index(**x)
    for i in range(6):
        step = x | dict(
            query=x["query"][:, i : i + 1],
            weights=x["weights"][:, i : i + 1],
            actual_seq_lengths_query=None,
            actual_seq_lengths_key=int32([60 - 5 + i]),
        )
        assert torch.equal(index(**step), chunk[:, i : i + 1])


def test_selection_has_no_gradient_and_takes_inputs_that_have():
    x = indexer_inputs([2], [40])
    for name in ("query", "key", "weights"):
        x[name] = x[name].nan_to_num().requires_grad_()
    got = index(**x)
    assert not got.requires_grad
    assert_same_selection(got, {k: v.detach() if torch.is_tensor(v) else v for k, v in x.items()})


@pytest.mark.parametrize("layout_query, layout_key", LAYOUTS, ids=LAYOUT_IDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_op_is_registered_as_torch_expects(layout_query, layout_key, dtype):
    x = indexer_inputs(
        [2, 3], [20, 33], layout_query=layout_query, layout_key=layout_key, dtype=dtype
    )
    x = without_nan(x)
    arguments = [x.pop(name) for name in ("query", "key", "weights")]
    torch.library.opcheck(
        torch.ops.custom_pypto.npu_lightning_indexer_pto.default, tuple(arguments), x
    )


@pytest.mark.parametrize("layout_query, layout_key", LAYOUTS, ids=LAYOUT_IDS)
@pytest.mark.parametrize("sparse_count", [1, 16, 2048, 3072])
def test_meta_gives_the_shape_and_dtype_of_the_result(layout_query, layout_key, sparse_count):
    x = indexer_inputs(
        [2, 3],
        [20, 33],
        layout_query=layout_query,
        layout_key=layout_key,
        sparse_count=sparse_count,
    )
    real, meta = index(**x), index(**on_meta(x))
    assert (meta.shape, meta.stride(), meta.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize("layout_query, layout_key", LAYOUTS, ids=LAYOUT_IDS)
def test_five_shapes_compile_at_most_twice_and_equal_eager(layout_query, layout_key):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(index, backend=counter, dynamic=True, fullgraph=True)
    for lengths_query, lengths_key in FIVE_SHAPES:
        # heads, dims and K that no other size equals: equal sizes would share a symbol
        x = indexer_inputs(
            lengths_query,
            lengths_key,
            layout_query=layout_query,
            layout_key=layout_key,
            heads=11,
            dim=48,
            sparse_count=27,
            integers=True,
        )
        assert torch.equal(compiled(**x), index(**x))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("sparse_count", [1, 2, 2047, 2048, 3072, 4096, 5120, 6144, 7168, 8192])
def test_takes_every_allowed_sparse_count(sparse_count):
    x = indexer_inputs([1], [9], sparse_count=sparse_count)
    got = index(**x)[0, 0, 0]
    assert len(got) == sparse_count
    assert_same_selection(index(**x), x)
