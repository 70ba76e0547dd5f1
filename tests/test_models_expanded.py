"""Prompts over few keys attend to keys and values of every head, not to latents."""

import math
from contextlib import contextmanager

import pytest
import torch
from cases import INT_MAX, INT_MIN
from float8_rows import FP8, Float8LatentRows
from model_harness import (
    assert_close,
    both,
    feed,
    left_padded,
    no_grad_and_one_thread,  # noqa: F401
    patched_model,
    upstream_and_patched,
)
from tiny import SHARED, tiny_model

from custom_pypto import models, npu, reference, rows, simulation
from custom_pypto.models.absorbed import absorbed_query
from custom_pypto.rows import expanded
from custom_pypto.rows.expanded import Heads

WITH_SINKS = ("hy_v4",)
CHUNKS = {"prompt": [96], "chunks": [70, 64], "decode-between": [64, 1, 64], "long": [300]}


@contextmanager
def with_products_of_bfloat16(value: bool):
    """Inside, this CPU has fast ones, or has not."""
    with torch.library._scoped_library("custom_pypto", "IMPL") as library:
        key = "CompositeImplicitAutograd"
        library.impl("multiplies_bf16", lambda: value, key, allow_override=True)
        yield


BY_THE_OP = pytest.mark.skipif(
    not torch.ops.custom_pypto.multiplies_bf16(), reason="this CPU multiplies bfloat16 as float32"
)


@pytest.fixture(params=[False, pytest.param(True, marks=BY_THE_OP)], ids=["float32", "bfloat16"])
def multiplied(request):
    """Rows in bfloat16 are expanded in float32, or by the op where this CPU has it."""
    with with_products_of_bfloat16(request.param):
        yield


@pytest.fixture
def calls(monkeypatch):
    """The new tokens of each call."""
    found = []

    def counted(heads, *arguments):
        found.append(heads.q_nope.size(1))
        return expanded_attention(heads, *arguments)

    expanded_attention = expanded.expanded_attention
    monkeypatch.setattr(expanded, "expanded_attention", counted)
    return found


@pytest.mark.parametrize("pads", [[0], [0, 9, 33]], ids=["batch-1", "left-padded"])
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("kind", SHARED)
def test_logits_equal_upstream_transformers(kind, chunks, pads, calls):
    model = upstream_and_patched(kind, index_topk=256, max_position_embeddings=512)
    want, got = both(*model, pads, chunks)
    assert_close(got, want)
    assert set(calls) == (set() if kind in WITH_SINKS else {size for size in chunks if size > 1})


# ---- as the op --------------------------------------------------------------------------------


def heads_of(tokens, heads, nope, value, latent, rope):
    return Heads(
        torch.randn(2, tokens, heads, nope),
        torch.randn(2, tokens, heads, rope) if rope else None,
        torch.randn(heads, nope + value, latent) / math.sqrt(latent),
        (nope + rope) ** -0.5,
        None,
    )


def by_the_op(heads, indices, lengths, latent, k_rope):
    nope = heads.q_nope.size(-1)
    output = reference.npu_sparse_flash_attention_pto(
        absorbed_query(heads.q_nope, heads.weight),
        latent.unsqueeze(2),
        None,
        indices,
        heads.scaling,
        query_rope=heads.q_rope,
        key_rope=None if k_rope is None else k_rope.unsqueeze(2),
        actual_seq_lengths_kv=lengths,
        layout_kv="BSND",
    )
    return torch.einsum("bshl,hvl->bshv", output, heads.weight[:, nope:])


SHAPES = pytest.mark.parametrize("rope, value", [(16, 32), (16, 64), (0, 40)])
SIZES = pytest.mark.parametrize("tokens, keys", [(300, 300), (70, 300), (80, 60)])


@SHAPES
@SIZES
def test_any_indices_mean_what_they_mean_to_the_op(tokens, keys, rope, value):
    torch.manual_seed(0)
    heads = heads_of(tokens, 20, 32, value, 64, rope)
    latent, k_rope = torch.randn(2, keys, 64), torch.randn(2, keys, rope) if rope else None
    lengths = torch.tensor([keys, keys // 3], dtype=torch.int32)
    # duplicates, what is invisible or negative, ends of rows, and rows of nothing
    indices = torch.randint(-3, keys + 3, (2, tokens, 1, 40), dtype=torch.int32)
    indices[:, 5, :, 0] = -1
    indices[:, 6] = 2**31 - 1
    indices[:, 7] = -(2**31)
    ends = lengths[:, None] + torch.arange(1 - tokens, 1)
    got = expanded.expanded_attention(heads, indices, ends, latent, k_rope)
    want = by_the_op(heads, indices, lengths, latent, k_rope)
    torch.testing.assert_close(got, want, rtol=0, atol=5e-5)  # 100 terms, 5 in all
    assert (got[:, 5:8] == 0).all()


@BY_THE_OP
@SHAPES
@SIZES
@pytest.mark.parametrize("nope", [32, 48])
def test_the_op_equals_attention_in_float32(tokens, keys, rope, value, nope):
    torch.manual_seed(0)
    heads = heads_of(tokens, 3, nope, value, 64, rope)
    latent, k_rope = torch.randn(2, keys, 64), torch.randn(2, keys, rope) if rope else None
    halves = [None if x is None else x.bfloat16() for x in (*heads[:3], latent, k_rope)]
    floats = [None if x is None else x.float() for x in halves]
    lengths = torch.tensor([keys, keys // 3])
    # what is invisible or negative, ends of rows, and rows of nothing
    orders = [torch.randperm(keys + 8)[:40] - 4 for _ in range(2 * tokens)]
    indices = torch.stack(orders).view(2, tokens, 1, 40).int()
    indices[indices == -1] = INT_MIN
    indices[:, 5, :, 20] = -1
    indices[:, 6] = -1
    indices[:, 7] = INT_MAX
    ends = lengths[:, None] + torch.arange(1 - tokens, 1)
    got = expanded.expanded_attention(
        Heads(*halves[:3], heads.scaling, None), indices, ends, *halves[3:]
    ).float()
    want = expanded.in_float32(
        Heads(*floats[:3], heads.scaling, None), indices.squeeze(2), ends, *floats[3:]
    )
    # Of a value v_j: its rounding, that of its weight p_j, and of the result, 2**-9 each. Of a
    # logit, the rounding of the key, 2**-9 |q| |k| scale: p_j changes by twice that at most, since
    # the others change, too. Norms of the float32 side bound each.
    k = torch.einsum("bnl,hdl->bhnd", latent, heads.weight[:, :nope])
    logit = 2**-9 * heads.scaling * heads.q_nope.norm(dim=-1) * k.norm(dim=-1).amax(-1)[:, None]
    v = torch.einsum("bnl,hdl->bhnd", latent, heads.weight[:, nope:]).abs().amax((-2, -1))
    allowed = (3 * 2**-9 + 2 * logit) * v[:, None] * 1.1
    assert ((got - want).abs() <= allowed[..., None]).all()
    assert (got[:, 6:8] == 0).all()


def test_the_op_leaves_a_key_that_is_named_twice_to_absorption(multiplied):
    heads = heads_of(64, 1, 32, 32, 64, 16)
    heads = Heads(*(x.bfloat16() for x in heads[:3]), heads.scaling, None)
    latent, k_rope = torch.randn(2, 64, 64).bfloat16(), torch.randn(2, 64, 16).bfloat16()
    indices = torch.arange(64).int().expand(2, 64, 1, 64).clone()
    ends = torch.arange(1, 65).expand(2, -1)
    assert expanded.expanded_attention(heads, indices, ends, latent, k_rope) is not None
    indices[1, 40, 0, 7] = 8
    got = expanded.expanded_attention(heads, indices, ends, latent, k_rope)
    assert (got is None) == torch.ops.custom_pypto.multiplies_bf16()


def arguments() -> dict:
    x = torch.zeros(1, 3, 2, 32).bfloat16()
    rows = torch.zeros(1, 5, 64).bfloat16()
    return dict(
        q_nope=x,
        q_rope=x[..., :16],
        latent=rows,
        k_rope=rows[..., :16],
        weight=torch.zeros(2, 48, 64).bfloat16(),
        indices=torch.arange(4).int().expand(1, 3, 4),
        ends=torch.ones(1, 3).long(),
        scale=1.0,
    )


@BY_THE_OP
def test_the_op_passes_opcheck():
    op = torch.ops.custom_pypto.expanded_attention.default
    torch.library.opcheck(op, tuple(arguments().values()))


REJECTED = {
    "q_nope.dtype must be bfloat16, got float32": dict(q_nope=torch.zeros(1, 3, 2, 32)),
    "latent.size(2) must be a multiple of 32 (L), got 48": dict(
        latent=torch.zeros(1, 5, 48).bfloat16(), weight=torch.zeros(2, 48, 48).bfloat16()
    ),
    "weight.size(1) must be more than nope of q_nope, got 32": dict(
        weight=torch.zeros(2, 32, 64).bfloat16()
    ),
    "k_rope must be given if q_rope is, and only then, got None": dict(k_rope=None),
    "indices.size(1) must be 3 (S of q_nope), got 4": dict(indices=torch.zeros(1, 4, 4).int()),
    "ends.dtype must be int64, got int32": dict(ends=torch.ones(1, 3).int()),
    "scale must be positive, got 0": dict(scale=0.0),
}


@pytest.mark.parametrize("message", REJECTED)
def test_the_op_rejects(message):
    with pytest.raises(RuntimeError) as error:
        torch.ops.custom_pypto.expanded_attention(**arguments() | REJECTED[message])
    assert f"expanded_attention: {message}" in str(error.value)


def test_bfloat16_is_nearer_to_float32_than_absorption(multiplied, monkeypatch):
    torch.manual_seed(0)
    model = patched_model(index_topk=256, max_position_embeddings=512)
    ids, mask, _ = left_padded([0], 200)
    exact = model(ids).logits
    model = model.bfloat16()
    errors = []
    for value in (False, True):
        monkeypatch.setattr(npu, "on_cpu", value)  # absorbs
        errors.append((model(ids).logits.float() - exact).norm() / exact.norm())
    assert errors[0] < 1.05 * errors[1] < 0.2, errors


# ---- where it is taken ------------------------------------------------------------------------


def prefill(model, tokens, **dtypes):
    cache = models.PagedCache(model, 2, 128, block_size=16, **dtypes)
    ids, mask, positions = left_padded([0, 9], tokens)
    return feed(model, cache, ids, mask, positions, [tokens])[mask.bool()]


@pytest.mark.parametrize("dtype", [torch.int8, FP8], ids=str)
def test_caches_of_other_formats_are_read_as_by_their_op(dtype, calls, monkeypatch, multiplied):
    monkeypatch.setitem(rows.LATENT_FORMATS, FP8, Float8LatentRows)
    sizes = dict(index_topk=128, num_hidden_layers=1)  # experts would be others after rounding
    if dtype == torch.int8:
        sizes |= dict(kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128)
    model = models.use_custom_pypto(tiny_model(**sizes).bfloat16())
    got = prefill(model, 100, kv_dtype=dtype)
    assert calls == [100]
    monkeypatch.setattr(npu, "on_cpu", True)  # absorbs
    want = prefill(model, 100, kv_dtype=dtype)
    assert calls == [100]
    assert (got.float() - want.float()).norm() < 0.02 * want.float().norm()


def test_few_tokens_long_contexts_and_gradients_absorb(calls):
    model = patched_model(index_topk=8)
    prefill(model, 100)
    model.model.layers[0].self_attn.indexer.index_topk = 128
    prefill(model, 63)
    assert calls == []
    prefill(model, 100)
    assert calls == [100]  # the only layer that selects as many


def test_a_nan_reaches_no_token_that_does_not_select_it(calls):
    model = patched_model(index_topk=128, num_hidden_layers=1)
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = torch.nan
    ids = torch.randint(10, 190, (1, 100))
    ids[0, 50] = 7
    got = model(ids).logits.isnan().any(-1)[0]
    assert calls == [] and got[50:].all() and not got[:50].any()


def test_the_npu_programs_absorb():
    heads = heads_of(64, 1, 32, 32, 64, 16)
    indices = torch.zeros(2, 64, 1, 64, dtype=torch.int32)
    assert expanded.is_cheaper(heads, indices, 64)
    with simulation.on_cpu():
        assert not expanded.is_cheaper(heads, indices, 64)
    assert expanded.is_cheaper(heads, indices, 64)


def test_the_cheaper_one_by_products_of_deepseek_v32():
    heads = Heads(
        torch.empty(1, 2048, 128, 128, device="meta"),
        torch.empty(1, 2048, 128, 64, device="meta"),
        torch.empty(128, 256, 512, device="meta"),
        1.0,
        None,
    )
    indices = torch.empty(1, 2048, 1, 2048, device="meta")
    keys = (2048, 4096, 6144, 7168)
    assert [expanded.is_cheaper(heads, indices, n) for n in keys] == [True, True, False, False]
    halves = heads._replace(q_nope=heads.q_nope.bfloat16(), weight=heads.weight.bfloat16())
    with with_products_of_bfloat16(True):
        cheaper = [expanded.is_cheaper(halves, indices, n) for n in keys]
    assert cheaper == [True, True, True, False]
