"""What the ops on sequences of keys have in common: layouts, lengths and block tables."""

import pytest
import torch
from cases import INT_MAX, INT_MIN, LAYOUT_IDS, LAYOUTS, inputs_of, int32, place, without_nan
from cases.rejections import each, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import assert_attends_as_the_reference, assert_close_to_rows, reference
from torch import Tensor

import custom_pypto
from custom_pypto.descriptions import OPS

ATTENTION = "npu_sparse_flash_attention_pto"
OF_SEQUENCES = [op for op in OPS if "layout_query" in inputs_of(op)]
INDEXERS = [op for op in OF_SEQUENCES if "indexer" in op]
EMPTY = {op: -1 if op in INDEXERS else 0 for op in OF_SEQUENCES}  # fills rows that see no key
HOSTILE = {op: {} if op in INDEXERS else dict(hostile=True) for op in OF_SEQUENCES}
LENGTHS = {
    op: "actual_seq_lengths_key" if op in INDEXERS else "actual_seq_lengths_kv"
    for op in OF_SEQUENCES
}
TOKENS = ["query", "query_rope", "query_dequant_scale", "weights", "sparse_indices"]
KEYS = ["key", "key_rope", "key_dequant_scale"]

each_op = pytest.mark.parametrize("op", OF_SEQUENCES)
each_layout = pytest.mark.parametrize("layouts", LAYOUTS, ids=LAYOUT_IDS)


def call(op: str, lengths_query, lengths_key, layouts=LAYOUTS[0], **arguments) -> dict:
    """Of an indexer: one with exact scores, many of which tie."""
    names = ("layout_query", "layout_key" if op in INDEXERS else "layout_kv")
    layouts = dict(zip(names, layouts, strict=True))
    more = dict(integers=True) if op in INDEXERS else {}
    if op == ATTENTION:
        more = dict(latent=64, rope=32)  # fills tile registers, where a CPU has them
    return inputs_of(op, lengths_query, lengths_key, **layouts, **more | arguments)


def run(op: str, x: dict) -> Tensor:
    return getattr(custom_pypto, op)(**x)


def of(names: list[str], x: dict) -> list[str]:
    return [name for name in tensors(x) if name in names]


def assert_same(got: Tensor, expected: Tensor) -> None:
    if got.dtype == torch.int32:
        assert torch.equal(got, expected)
    else:
        assert_close_to_rows(got, expected)


def assert_equals_reference(op: str, x: dict) -> Tensor:
    if op == ATTENTION:
        return assert_attends_as_the_reference(x)
    got = run(op, x)
    assert_same(got, getattr(reference, op)(**x))
    return got


def with_numbers(x: dict) -> dict:
    """The same with a number for each NaN, in the bytes of a quantized cache as well."""
    x = without_nan(x)
    if "rope_head_dim" in x:
        key = x["key"].clone()
        for part, dtype in ((slice(128, 160), torch.bfloat16), (slice(160, 164), torch.float32)):
            key[..., part] = key[..., part].contiguous().view(dtype).nan_to_num(1).view(torch.int8)
        x["key"] = key
    return x


@each_layout
@each_op
def test_every_layout_gives_the_same(op, layouts):
    lengths = [2, 4, 1], [40, 33, 70]
    x, bsnd = call(op, *lengths, layouts), call(op, *lengths, ("BSND", "BSND"))

    def placed(rows: Tensor, fill: int) -> Tensor:
        rows = [r[:n] for r, n in zip(rows, lengths[0], strict=True)]
        return place(rows, layouts[0], padding=1, fill=fill)

    # query and keys are the same rows in every layout, the makers' indices are not
    for name in of(["sparse_indices"], x):
        x[name] = placed(bsnd[name], -1)
    assert_same(run(op, x), placed(run(op, bsnd), EMPTY[op]))


@each_op
def test_lengths_left_out_mean_every_token_and_key(op):
    x = call(op, [3, 3], [40, 40], ("BSND", "BSND"))
    x |= each(x, of(TOKENS, x), lambda t: t[:, :3]) | each(x, of(KEYS, x), lambda t: t[:, :40])
    got = run(op, x)
    assert torch.equal(run(op, x | {"actual_seq_lengths_query": None, LENGTHS[op]: None}), got)
    assert op not in INDEXERS or (got >= 0).all()


@each_op
def test_defaults_are_paged_keys_2048_wide_and_causal(op):
    wide = dict(sparse_count=2048) if op in INDEXERS else HOSTILE[op]
    x = call(op, [3, 2], [40, 33], **wide)
    names = ("layout_query", "layout_key", "layout_kv", "sparse_count", "sparse_mode", "cmp_ratio")
    got = run(op, {name: value for name, value in x.items() if name not in names})
    assert op not in INDEXERS or got.shape == (2, 4, 1, 2048)
    assert torch.equal(got, run(op, x))


ZERO = {
    "no-keys": ([2, 3], [0, 0]),
    "no-tokens": ([0, 0], [20, 5]),
    "nothing": ([0], [0]),
    "holes": ([0, 2, 0], [9, 20, 0]),
    "fewer-keys-than-tokens": ([4], [2]),
}


@pytest.mark.parametrize("lengths", ZERO.values(), ids=ZERO)
@each_layout
@each_op
def test_zero_lengths_give_empty_rows(op, layouts, lengths):
    got = assert_equals_reference(op, call(op, *lengths, layouts, **HOSTILE[op]))
    if 0 in map(max, lengths):
        assert (got == EMPTY[op]).all()


@each_op
def test_padded_rows_are_empty(op):
    x = call(op, [1, 3], [40, 40])
    x |= each(x, of(["sparse_indices"], x), torch.zeros_like)  # position 0 exists
    got = run(op, x)
    assert (got[0, 1:] == EMPTY[op]).all() and (got[1, 3:] == EMPTY[op]).all()
    assert (got[0, 0] != EMPTY[op]).any()


REMOVED = {
    "sequences": lambda x: each(x, [n for n in tensors(x) if n not in KEYS], lambda t: t[:0]),
    "tokens": lambda x: each(x, of(TOKENS, x), lambda t: t[:, :0]),
    "blocks": lambda x: each(x, of(KEYS, x), lambda t: t[:0]),
    "table": lambda x: each(x, ["block_table"], lambda t: t[:, :0]),
    "indices": lambda x: each(x, ["sparse_indices"], lambda t: t[..., :0]),
}


@pytest.mark.parametrize(
    "op, what",
    [(op, r) for op in OF_SEQUENCES for r in REMOVED if op not in INDEXERS or r != "indices"],
)
def test_empty_tensors_give_empty_rows(op, what):
    x = call(op, [2, 1], [40, 33])
    got = assert_equals_reference(op, x | REMOVED[what](x))
    assert (got == EMPTY[op]).all()


@pytest.mark.parametrize("layout", ["PA_BSND", "BSND"])
@each_op
def test_sequences_without_a_token_take_no_memory(op, layout):
    x = call(op, [1], [16], ("BSND", layout))
    for name in tensors(x):
        if name in TOKENS or (name in KEYS and layout == "BSND"):
            x[name] = x[name][:, :0]
        if name not in KEYS or layout == "BSND":  # as many sequences as no memory could list
            x[name] = x[name].expand(2**40, *x[name].shape[1:])
    assert run(op, x).shape[:2] == (2**40, 0)


@each_op
def test_a_chunk_gives_what_single_tokens_give(op):
    x = call(op, [6], [60], **{} if op in INDEXERS else dict(heads=2, sparse_count=32))
    chunk = run(op, x)
    for i in range(6):
        token = each(x, of(TOKENS, x), lambda t, i=i: t[:, i : i + 1])
        lengths = {"actual_seq_lengths_query": None, LENGTHS[op]: int32([60 - 5 + i])}
        assert_same(run(op, x | token | lengths), chunk[:, i : i + 1])


@each_op
def test_rows_outside_the_sequences_are_not_read(op):
    # the makers poison them all: the score of a NaN would be first, and a sum with it is NaN
    x = call(op, [3, 1], [17, 40], **HOSTILE[op], sparse_count=8 if op in INDEXERS else 64)
    clean = with_numbers(x)
    for names in (TOKENS, KEYS):
        assert not all(torch.equal(x[name], clean[name]) for name in of(names, x))
    assert torch.equal(run(op, clean), run(op, x))


extremes = st.one_of(
    st.sampled_from([INT_MIN, INT_MIN + 1, -1, 0, 1, 10**6, INT_MAX - 1, INT_MAX]),
    st.integers(-5, 60),
)


@settings(max_examples=300)
@given(
    st.data(), st.sampled_from(LAYOUTS), st.sampled_from([0, 3]), st.sampled_from([1, 2, 4, 128])
)
@each_op
def test_no_length_index_or_block_id_leads_outside_the_tensors(op, data, layouts, mode, ratio):
    compressed = dict(cmp_ratio=ratio) if "cmp_ratio" in inputs_of(op) else {}
    tokens = [n * compressed.get("cmp_ratio", 1) for n in (40, 33)]
    x = call(op, [3, 2], tokens, layouts, sparse_mode=mode, **compressed)
    x = with_numbers(x)  # every row may be reached now
    for name in ("actual_seq_lengths_query", LENGTHS[op], "block_table", "sparse_indices"):
        if x.get(name) is not None:
            shape = x[name].shape[-1:] if name == "sparse_indices" else x[name].shape
            values = data.draw(st.lists(extremes, min_size=shape.numel(), max_size=shape.numel()))
            x[name] = int32(values).view(shape).expand_as(x[name])
    assert_equals_reference(op, x)
