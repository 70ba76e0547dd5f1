import pytest
import torch
from cases import DTYPES, INT_MAX, INT_MIN, LAYOUT_IDS, LAYOUTS, int32, place
from cases.npu_lightning_indexer_pto import inputs as indexer_inputs
from numerics import assert_same_selection, exact_scores, reference

import custom_pypto

index = custom_pypto.npu_lightning_indexer_pto


def one_token(scores: list[float], **keywords) -> dict:
    """A call in which key ``j`` scores exactly ``scores[j]``: ``±1 * relu(|scores[j]|)``."""
    query = torch.zeros(1, 1, 2, 16)
    query[..., 0, 0], query[..., 1, 1] = 1, 1  # head 0 reads dim 0, head 1 reads dim 1
    key = torch.zeros(1, len(scores), 1, 16)
    key[0, :, 0, 0] = torch.tensor(scores).clamp(min=0)
    key[0, :, 0, 1] = (-torch.tensor(scores)).clamp(min=0)
    weights = torch.tensor([[[1.0, -1.0]]])
    return dict(query=query, key=key, weights=weights, layout_key="BSND", sparse_count=8) | keywords


def test_positions_beyond_65535_are_selected():
    x = indexer_inputs([1], [70_000], heads=2, dim=16, block_size=1024, sparse_count=3072)
    got = index(**x)
    assert (got > 65_535).any()
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


def test_scores_of_a_row_descend():
    x = indexer_inputs([2], [500], sparse_count=64)
    got = index(**x)
    keys = indexer_inputs([2], [500], sparse_count=64, layout_key="BSND")["key"][0, :, 0]
    for i in range(2):
        selected = keys[got[0, i, 0].long()]
        scores, rounding, _ = exact_scores(x["query"][0, i], selected, x["weights"][0, i])
        assert (scores.diff() <= rounding).all()


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


@pytest.mark.parametrize("bad", [-1, INT_MIN, INT_MAX, 7], ids=str)
def test_positions_in_a_block_that_does_not_exist_are_not_selected(bad):
    x = indexer_inputs([1], [48], sparse_count=64)
    assert x["key"].size(0) <= 7
    x["block_table"][0, 1] = bad
    got = index(**x)
    assert sorted(got[got >= 0].tolist()) == [*range(16), *range(32, 48)]
    assert_same_selection(got, x)
