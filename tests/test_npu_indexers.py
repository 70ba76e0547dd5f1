"""Both indexers against the reference, at every size."""

import pytest
import torch
from cases import DTYPES, LAYOUT_IDS, LAYOUTS, inputs_of, int32, place, visible_keys
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import assert_same_selection, reference

import custom_pypto

INDEXER, QUANT_INDEXER = INDEXERS = ["npu_lightning_indexer_pto", "npu_quant_lightning_indexer_pto"]
SEQUENCES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 70)), min_size=1, max_size=3)
ARGUMENTS = dict(
    heads=st.sampled_from([1, 2, 3, 4, 7, 16, 33, 64, 80]),
    dim=st.sampled_from([16, 32, 48, 96, 128, 160]),
    block_size=st.sampled_from([16, 32, 48, 128, 1024]),
    dtype=st.sampled_from(DTYPES),
    sparse_count=st.sampled_from([1, 2, 7, 8, 16, 64, 2048]),
    sparse_mode=st.sampled_from([0, 3]),
    strided=st.booleans(),
    seed=st.integers(0, 2**31),
)
MORE = {
    INDEXER: dict(
        weights_dtype=st.sampled_from([None, torch.float32]),
        cmp_ratio=st.sampled_from([1, 1, 2, 4, 7]),
    ),
    QUANT_INDEXER: dict(scale_dtype=st.sampled_from([torch.float16, torch.float32])),
}

each_op = pytest.mark.parametrize("op", INDEXERS)
# the dtype of the int8 indexer is that of its weights only
each_kind = pytest.mark.parametrize(
    "op, dtype", [*((INDEXER, dtype) for dtype in DTYPES), (QUANT_INDEXER, torch.float32)], ids=str
)
each_layout = pytest.mark.parametrize("layout_query, layout_key", LAYOUTS, ids=LAYOUT_IDS)


def select(op: str, x: dict) -> torch.Tensor:
    return getattr(custom_pypto, op)(**x)


def drawn(data, op: str, **fixed) -> dict:
    lengths = zip(*data.draw(SEQUENCES), strict=True)
    layout_query, layout_key = data.draw(st.sampled_from(LAYOUTS))
    arguments = data.draw(st.fixed_dictionaries(ARGUMENTS | MORE[op])) | fixed
    return inputs_of(op, *lengths, layout_query=layout_query, layout_key=layout_key, **arguments)


@settings(max_examples=200)
@given(st.data())
@each_op
def test_selects_what_the_reference_selects(op, data):
    x = drawn(data, op)
    assert_same_selection(select(op, x), x)


@settings(max_examples=200)
@given(st.data())
@each_op
def test_equals_the_reference_exactly_where_arithmetic_is_exact(op, data):
    # small integers: no rounding, many ties, so order and choice are determined
    x = drawn(data, op, integers=True)
    assert torch.equal(select(op, x), getattr(reference, op)(**x))


@pytest.mark.parametrize("block_size", [16, 48, 128, 1024])
@each_kind
def test_selects_what_the_reference_selects_at_every_tail(op, dtype, block_size):
    """Numbers of heads that fill panels and those that do not, keys that fill tiles and not, and
    as many places as keys, one less and one more."""
    for heads in range(1, 66):
        for rest in range(16):
            # each number of heads meets each rest in one of the four block sizes
            if (heads + rest) % 4 != (16, 48, 128, 1024).index(block_size):
                continue
            keys = 16 * (heads % 3) + rest
            sizes = dict(heads=heads, dim=16, block_size=block_size, dtype=dtype)
            count = max(1, keys + heads % 3 - 1)
            x = inputs_of(op, [2], [keys], **sizes, sparse_count=count, integers=True, seed=heads)
            expected = getattr(reference, op)(**x)
            assert torch.equal(select(op, x), expected), f"{heads} heads, {keys} keys"


REAL = dict(dim=128, block_size=128, sparse_count=2048)
CALLS = {
    "decode-20k-keys": ([1], [20_000], dict(heads=64)),
    "one-key-too-many": ([2], [2049], dict(heads=4)),
    "as-many-keys-as-K": ([1], [2048], dict(heads=16)),
    "ragged": ([1, 2, 3], [5000, 17, 2500], dict(heads=40)),
    "1-head": ([3], [4100], dict(heads=1)),
    "128-heads": ([2], [3000], dict(heads=128)),
    "prefill-chunk": ([150], [2600], dict(heads=16)),
    "prefill": ([300], [300], dict(heads=64)),
    "blocks-of-1024": ([2], [6000], dict(heads=4, dim=64, block_size=1024)),
    "most-dims": ([2], [3000], dict(heads=4, dim=1024)),
    "K-1": ([1], [9000], dict(heads=2, sparse_count=1)),
    "K-8192": ([2], [9001], dict(heads=4, sparse_count=8192)),
}


@pytest.mark.parametrize("integers", [False, True], ids=["random", "ties"])
@pytest.mark.parametrize("lengths_query, lengths_key, arguments", CALLS.values(), ids=CALLS)
@each_kind
def test_selects_what_the_reference_selects_at_real_sizes(
    op, dtype, lengths_query, lengths_key, arguments, integers
):
    arguments = REAL | dict(dtype=dtype, integers=integers) | arguments
    x = inputs_of(op, lengths_query, lengths_key, **arguments)
    got = select(op, x)
    if integers:
        assert torch.equal(got, getattr(reference, op)(**x))
    else:
        assert_same_selection(got, x)


@pytest.mark.parametrize("integers", [False, True], ids=["random", "ties"])
@pytest.mark.parametrize("keys", [131_073, 262_144, 2**20])
def test_selects_what_the_reference_selects_beyond_128k_keys(keys, integers):
    sizes = dict(heads=2, dim=16, block_size=128, sparse_count=2048, integers=integers)
    for op, dtype in [(INDEXER, torch.bfloat16), (QUANT_INDEXER, torch.float32)]:
        x = inputs_of(op, [2], [keys], **sizes, dtype=dtype)
        got = select(op, x)
        assert_same_selection(got, x)
        if integers:
            assert torch.equal(got, getattr(reference, op)(**x))


@settings(max_examples=100)
@given(SEQUENCES, st.sampled_from(LAYOUTS), st.sampled_from([0, 3]), st.sampled_from([2, 8, 16]))
@each_op
def test_rows_hold_distinct_visible_positions_then_minus_one(op, lengths, layouts, mode, K):
    named = dict(zip(("layout_query", "layout_key"), layouts, strict=True))
    x = inputs_of(op, *zip(*lengths, strict=True), **named, sparse_count=K, sparse_mode=mode)
    got = select(op, x)
    assert got.dtype == torch.int32
    assert got.shape == (*x["query"].shape[:-2], 1, K)
    seen = [int32([visible_keys(i, n, k, mode) for i in range(n)])[:, None] for n, k in lengths]
    seen = place(seen, layouts[0], padding=1, fill=0)
    valid = got >= 0
    assert torch.equal(valid.sum(-1), seen.clamp(max=K).long())
    assert (got[~valid] == -1).all()
    assert not (~valid[..., :-1] & valid[..., 1:]).any(), "a valid position after a -1"
    assert (got < seen.clamp(min=1)[..., None]).all()
    for row in got.flatten(0, -2):
        chosen = row[row >= 0]
        assert len(chosen.unique()) == len(chosen)


@each_layout
@each_op
def test_width_stays_K_when_there_are_fewer_keys(op, layout_query, layout_key):
    layouts = dict(layout_query=layout_query, layout_key=layout_key)
    got = select(op, inputs_of(op, [2], [5], **layouts, sparse_count=2048))
    assert got.size(-1) == 2048
    assert ((got >= 0).sum(-1).flatten()[:2] == torch.tensor([4, 5])).all()


@pytest.mark.parametrize("sparse_count", [1, 2, 2047, 2048, 3072, 4096, 5120, 6144, 7168, 8192])
@each_op
def test_takes_every_allowed_sparse_count(op, sparse_count):
    x = inputs_of(op, [1], [9], sparse_count=sparse_count)
    got = select(op, x)
    assert got.size(-1) == sparse_count
    assert_same_selection(got, x)
