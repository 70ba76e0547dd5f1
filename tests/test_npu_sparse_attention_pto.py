from functools import partial

import pytest
import torch
from cases import DTYPES, INT_MAX, INT_MIN, copied, int32, without_nan
from cases.npu_sparse_attention_pto import CACHES
from cases.npu_sparse_attention_pto import fused_inputs as inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import assert_close_to_rows, reference

import custom_pypto
from custom_pypto.reference import MODULES

fused = custom_pypto.npu_sparse_attention_pto
# fills tile registers, where a CPU has them
fused_inputs = partial(inputs, latent=64, rope=32, index_dim=64)
reference_module = MODULES["npu_sparse_attention_pto"]


@pytest.fixture(autouse=True)
def one_norm(monkeypatch):
    """The op's RMSNorm in the reference, too: it sums in another order than torch, so a latent that
    is rounded may differ by a unit, and scores that nearly tie rank otherwise. tests/test_one_op.py
    compares the norms."""
    monkeypatch.setattr(reference_module, "rms_norm", torch.ops.custom_pypto.rms_norm)


def run(op, x: dict) -> dict:
    """Output and caches of a call on copies."""
    x = copied(x)
    return dict(out=op(**x)) | {name: x[name] for name in CACHES}


def assert_same(got: dict, expected: dict) -> None:
    for name in ("out", *CACHES):
        assert_close_to_rows(got[name], expected[name])


def assert_equals_reference(x: dict) -> dict:
    """The output, and the caches everywhere: what no token writes keeps its bits."""
    got = run(fused, x)
    assert_same(got, run(reference.npu_sparse_attention_pto, x))
    for name in CACHES:
        untouched = torch.ones(x[name].shape[:2], dtype=torch.bool).flatten()
        written = x["cache_index"].flatten().long()
        untouched[written[(written >= 0) & (written < len(untouched))]] = False
        before, after = (c[name].flatten(0, 2)[untouched] for c in (x, got))
        torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
    return got


def largest_difference(a: dict, b: dict, name: str) -> float:
    """In units of the largest magnitude of the tensor."""
    a, b = a[name].float(), b[name].float()
    return ((a - b).abs().nan_to_num().max() / b.abs().nan_to_num().max()).item()


@settings(max_examples=100)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=3),
    st.integers(1, 5),
    st.fixed_dictionaries(
        dict(
            heads=st.sampled_from([1, 2, 3, 5, 16]),
            nope=st.sampled_from([8, 16, 24]),
            latent=st.sampled_from([16, 32, 64]),
            rope=st.sampled_from([16, 32]),
            index_heads=st.sampled_from([1, 3, 4, 16]),
            index_dim=st.sampled_from([32, 48, 64]),
            block_size=st.sampled_from([16, 32, 48, 128]),
            dtype=st.sampled_from(DTYPES),
            strided=st.booleans(),
            sparse_count=st.sampled_from([2, 8, 16, 2048]),
            softmax_scale=st.sampled_from([None, 0.1, 0.5]),
            seed=st.integers(0, 2**31),
        )
    ),
)
def test_equals_the_reference_caches_included(lengths, S1, arguments):
    assert_equals_reference(fused_inputs(lengths, S1, **arguments))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "lengths, S1, K",
    [
        pytest.param([3000], 1, 2048, id="decode"),
        pytest.param([700, 90], 4, 64, id="mtp"),
        pytest.param([40], 40, 16, id="prefill"),
    ],
)
def test_equals_the_reference_at_the_sizes_of_deepseek_v3_2(lengths, S1, K, dtype):
    sizes = dict(hidden=128, q_rank=64, heads=8, nope=128, latent=512, rope=64)
    index = dict(index_heads=64, index_dim=128, block_size=128)
    assert_equals_reference(
        fused_inputs(lengths, S1, **sizes, **index, dtype=dtype, sparse_count=K)
    )


def test_defaults_are_2048_keys_and_the_scale_of_the_head_dim():
    x = fused_inputs([40, 21], 2)
    explicit = x | dict(sparse_count=2048, softmax_scale=(16 + 32) ** -0.5, eps=1e-6)
    assert_same(run(fused, x), run(fused, explicit))
    assert_equals_reference(x)


def test_sin_and_cos_may_be_float32():
    x = fused_inputs([40], 2, dtype=torch.bfloat16, sparse_count=8)
    precise = fused_inputs([40], 2, sparse_count=8)
    assert_equals_reference(x | dict(sin=precise["sin"], cos=precise["cos"]))


def test_slots_may_be_int64():
    x = fused_inputs([40, 33], 2, sparse_count=8)
    assert_same(run(fused, x | dict(cache_index=x["cache_index"].long())), run(fused, x))


half_split, interleaved = reference_module.rope_half_split, reference_module.rope_interleaved
layer_norm = torch.nn.functional.layer_norm


def first_interleaved(x, sin, cos):
    first, rest = x.tensor_split([sin.size(-1)], -1)
    return torch.cat([interleaved(first, sin, cos), rest], -1)


def last_half_split(x, sin, cos):
    rest, last = x.tensor_split([-sin.size(-1)], -1)
    return torch.cat([rest, half_split(last, sin, cos)], -1)


def rms_norm(x, shape, weight, bias, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def no_bias(x, shape, weight, bias, eps):
    return layer_norm(x, shape, weight, None, eps)


def default_eps(x, shape, weight, bias, eps):
    return layer_norm(x, shape, weight, bias, 1e-5)


# id -> function of the reference, a wrong one, the cache that shows it, whether the output does too
WRONG = {
    "interleaved-rope-in-the-indexer": (
        "rope_half_split",
        first_interleaved,
        "index_k_cache",
        True,
    ),
    "rope-on-the-last-dims-in-the-indexer": (
        "rope_half_split",
        last_half_split,
        "index_k_cache",
        True,
    ),
    "half-split-rope-in-mla": ("rope_interleaved", half_split, "kr_cache", True),
    "rms-norm-on-the-index-key": ("layer_norm", rms_norm, "index_k_cache", False),
    "layer-norm-without-its-bias": ("layer_norm", no_bias, "index_k_cache", False),
    "layer-norm-with-the-default-eps": ("layer_norm", default_eps, "index_k_cache", False),
    "no-norm-on-the-latents": ("rms_norm", lambda x, gamma, eps: x * gamma, "kv_cache", True),
}


@pytest.mark.parametrize("function, wrong, cache, decides", WRONG.values(), ids=WRONG)
def test_known_wrong_prolog_gives_another_result(monkeypatch, function, wrong, cache, decides):
    x = fused_inputs([70, 50], 2, sparse_count=4)
    x["w_idx_k"] = x["w_idx_k"] * 3e-3  # variance near the eps of the LayerNorm
    right = assert_equals_reference(x)
    monkeypatch.setattr(reference_module, function, wrong)
    other = run(reference.npu_sparse_attention_pto, x)
    assert largest_difference(right, other, cache) > 1e-2
    if decides:
        assert largest_difference(right, other, "out") > 1e-2


def test_index_query_comes_from_the_normed_latent():
    # the norm changes each token's query by a positive factor only: gamma tells it from none
    x = fused_inputs([70], 2, sparse_count=4)
    expected = run(fused, x)["out"]
    x["w_idx_qb"] = x["w_idx_qb"] / x["gamma_cq"][:, None]
    x["gamma_cq"] = x["gamma_cq"] * torch.linspace(-2, 2, len(x["gamma_cq"]))
    x["w_uq_qr"] = x["w_uq_qr"] * 0  # attention is now the mean of what is selected
    assert_equals_reference(x)
    assert (run(fused, x)["out"] - expected).abs().max() > 1e-2


def test_eps_is_that_of_the_rms_norms():
    x = fused_inputs([40], 2, sparse_count=8)
    small = x | dict(x=x["x"] * 1e-3)
    got = assert_equals_reference(small | dict(eps=1e-2))
    assert largest_difference(got, run(fused, small), "kv_cache") > 0.1


@pytest.mark.parametrize("wrong", [32**-0.5 / 2, (32 + 16) ** -0.5], ids=["half", "latent-dim"])
def test_softmax_scale_is_that_of_the_expanded_head(wrong):
    x = fused_inputs([40], 1, latent=32, nope=16, rope=16)
    default = run(fused, x)
    assert_same(run(fused, x | dict(softmax_scale=(16 + 16) ** -0.5)), default)
    other = assert_equals_reference(x | dict(softmax_scale=wrong))
    assert largest_difference(default, other, "out") > 1e-2


@pytest.mark.parametrize("chunks", [[1] * 12, [5, 7], [11, 1], [4, 1, 1, 6]], ids=str)
def test_prefill_in_chunks_gives_what_one_call_gives(chunks):
    x = fused_inputs([12], 12, sparse_count=4)
    once = run(fused, x)
    stepped, outs, done = copied(x), [], 0
    for n in chunks:
        now = slice(done, done + n)
        done += n
        step = {k: stepped[k][:, now] for k in ("x", "sin", "cos", "cache_index")}
        outs.append(fused(**stepped | step | dict(act_seqs=int32([done]))))
    assert_same(dict(out=torch.cat(outs, 1)) | {k: stepped[k] for k in CACHES}, once)


def test_tokens_without_a_slot_are_not_written():
    x = fused_inputs([40, 33], 3, sparse_count=8)
    x["cache_index"][0, 0] = -1
    x["cache_index"][1, 2] = x["kv_cache"].size(0) * 16  # one past the last
    x["x"][0, 0] = 1e3
    got = run(fused, x)
    for name in CACHES:
        changed = (got[name] != x[name]) & ~(got[name].isnan() & x[name].isnan())
        assert changed.any(-1).sum() == 4
    x = without_nan(x)  # the slots left unwritten
    assert_equals_reference(x)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_no_slot_leads_outside_the_caches(dtype):
    x = fused_inputs([40, 33], 3, sparse_count=8)
    x = without_nan(x)
    extremes = [INT_MIN, -1, INT_MAX, 10**6, 0, 5]
    if dtype is torch.int64:
        extremes[:2] = [-(2**63), 2**63 - 1]
    x["cache_index"] = torch.tensor(extremes, dtype=dtype).view(2, 3)
    assert_equals_reference(x)


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([INT_MIN, -1, 0, 1, 2, 17, 96, 97, INT_MAX]), min_size=2, max_size=2),
    st.lists(st.sampled_from([INT_MIN, -1, 0, 1, 2, 3, 7, 100, INT_MAX]), min_size=8, max_size=8),
)
def test_no_length_or_block_id_leads_outside_the_caches(lengths, ids):
    x = fused_inputs([40, 33], 3, sparse_count=8)
    x = without_nan(x)
    assert_equals_reference(x | dict(act_seqs=int32(lengths), block_table=int32(ids).view(2, 4)))


def test_slot_written_twice_keeps_the_later_token():
    x = fused_inputs([40], 3, sparse_count=8)
    x["cache_index"][0, :2] = x["cache_index"][0, 2]
    x = without_nan(x)
    assert_equals_reference(x)


def test_sequence_shorter_than_S1_gives_zeros_for_its_padding():
    x = fused_inputs([2, 0, 40], 4, sparse_count=8)
    got = assert_equals_reference(x)
    assert (got["out"][0, :2] == 0).all()
    assert (got["out"][1] == 0).all()
    assert (got["out"][0, 2:] != 0).any(-1).all()


def test_caches_may_be_parts_of_one_row():
    strided = fused_inputs([40, 33], 3, strided=True, sparse_count=8)
    assert not strided["kr_cache"].is_contiguous()
    dense = fused_inputs([40, 33], 3, sparse_count=8)
    out = fused(**strided)  # not on copies: the three share their memory
    expected = run(fused, dense)
    assert_same(dict(out=out) | {name: strided[name] for name in CACHES}, expected)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", ["x", "sin", "w_idx_k", "in_gamma_k", "w_idx_proj"])
def test_arguments_are_read_before_the_caches_are_written(name, cache):
    x = without_nan(fused_inputs([20], 3, hidden=16))
    x["cache_index"][0] = torch.arange(3)
    strides = torch.empty_like(x[name], device="meta").stride()
    x[name] = x[cache].as_strided(x[name].shape, strides)  # begins in the first slot
    expected = run(fused, x)  # copies share no memory
    assert_same(dict(out=fused(**x)) | {name: x[name] for name in CACHES}, expected)


def compiled(function):
    return torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)


@pytest.mark.parametrize("strided", [False, True], ids=["own-caches", "one-row"])
def test_compiled_call_writes_the_callers_caches(strided):
    x = without_nan(fused_inputs([40, 33], 3, sparse_count=8))
    expected = run(fused, x)
    if strided:
        row = torch.cat([x[name] for name in CACHES], -1)
        x |= dict(zip(CACHES, row.split([x[n].size(-1) for n in CACHES], -1), strict=True))
    out = compiled(fused)(**x)
    assert_same(dict(out=out) | {name: x[name] for name in CACHES}, expected)


def test_compiled_call_on_clones_writes_the_clones_only():
    x = without_nan(fused_inputs([40, 33], 3, sparse_count=8))
    expected = run(fused, x)

    def on_clones(**x):
        x |= {name: x[name].clone() for name in CACHES}
        return fused(**x), *(x[name] for name in CACHES)

    before = copied(x)
    got = compiled(on_clones)(**x)
    assert_same(dict(zip(("out", *CACHES), got, strict=True)), expected)
    for name in CACHES:
        assert torch.equal(x[name], before[name])


def test_compiled_reads_see_the_writes_before_them_and_no_others():
    x = without_nan(fused_inputs([40], 1, sparse_count=8))

    def read_write_read(**x):
        before = [x[name].clone() for name in CACHES]
        fused(**x)  # only its writes are used
        between = [x[name].clone() for name in CACHES]
        out = fused(**x | dict(x=-x["x"]))
        return before, between, out, [x[name].clone() for name in CACHES]

    inputs = copied(x)
    eager, got = read_write_read(**copied(x)), compiled(read_write_read)(**inputs)
    for e, g in zip(eager, got, strict=True):
        torch.testing.assert_close(g, e)
    for i, name in enumerate(CACHES):
        assert torch.equal(got[0][i], x[name])
        assert not torch.equal(got[1][i], got[0][i])
        assert not torch.equal(got[3][i], got[1][i])
        assert torch.equal(inputs[name], got[3][i])
