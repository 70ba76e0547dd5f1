"""Patched models with index keys and latents in int8."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from model_harness import (
    feed,
    interrupted,
    left_padded,
    no_grad_and_one_thread,  # noqa: F401
    round_latents,
)
from tiny import tiny_model, token_ids

import custom_pypto
from custom_pypto import models, npu_lightning_indexer_prolog_pto, npu_quant_rows_pto
from custom_pypto.models.latent_attention import LatentAttention
from custom_pypto.rows.index import Int8IndexRows
from custom_pypto.rows.parts import flat

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from train_lookup import lookup_accuracy, lookup_batch  # noqa: E402

CHECKPOINT = Path(__file__).parents[1] / "examples/checkpoints/lookup"
INT8 = torch.int8
INDEX, KV = dict(index_dtype=INT8), dict(kv_dtype=INT8)
BOTH = INDEX | KV
KINDS = ["deepseek_v32", "glm_moe_dsa", "axk2"]
LENGTHS = [512, pytest.param(2048, marks=pytest.mark.slow)]


def lookup(**dtypes):
    return models.use_custom_pypto(models.load(CHECKPOINT, dtype=torch.bfloat16), **dtypes)


def bfloat16(*kind, **changes):
    return tiny_model(*kind, **changes).to(torch.bfloat16)


def tiny(kind, **dtypes):
    return models.use_custom_pypto(bfloat16(kind, kv_lora_rank=128), block_size=16, **dtypes)


def dequantized(latent):
    """``[.., L]`` after quantization in tiles of 128, by the definition."""
    tiles = latent.float().unflatten(-1, (-1, 128))
    largest = tiles.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    rows = (tiles * (torch.tensor(127.0) / largest)).round().clamp(-127, 127)
    return (rows * (largest / 127)).flatten(-2).to(latent.dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_latents_in_int8_are_a_cache_of_dequantized_latents_to_the_bit(kind, monkeypatch):
    def logits(**dtypes):
        model, (ids, mask, positions) = tiny(kind, **dtypes), left_padded([0, 9], 42)
        cache = models.PagedCache(model, 2, 64, block_size=16)
        return feed(model, cache, ids, mask, positions, [40, 1, 1])[mask.bool()]

    got = logits(**KV)
    round_latents(monkeypatch, dequantized)
    assert torch.equal(got, logits())


@pytest.mark.parametrize(
    "dtypes, per_token",
    [
        ({}, 2 * (512 + 64 + 128)),
        (INDEX, 2 * (512 + 64) + 128 + 2),
        (KV, 656 + 2 * 128),
        (BOTH, 786),
    ],
    ids=["bfloat16", "index", "kv", "both"],
)
def test_bytes_of_a_token_and_layer(dtypes, per_token):
    model = lookup(**dtypes)
    cache = models.PagedCache(model, 1, 1024)
    rows = 1024 + 128  # and a block that belongs to no sequence
    assert cache.nbytes == rows * per_token * model.config.num_hidden_layers


def test_shared_layers_have_no_index_keys_and_no_scales():
    cache = models.PagedCache(tiny("glm_moe_dsa", **BOTH), 1, 64)
    names = [set(layer.pools) for layer in cache.layers]
    full, shared = {"latent", "index", "index_scale"}, {"latent"}
    assert names == [full, shared, full]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtypes", [INDEX, KV, BOTH], ids=["index", "kv", "both"])
def test_answers_are_as_right_as_in_bfloat16(dtypes, length):
    def accuracy(**dtypes):
        model = lookup(**dtypes)
        return lookup_accuracy(
            model, length, new_cache=lambda: models.PagedCache(model, 1, length + 128)
        )

    assert accuracy(**dtypes) >= accuracy() - 0.02 > 0.9


def selected(model, ids):
    with models.record_indices(model) as record:
        model(ids, cache=models.PagedCache(model, len(ids), ids.size(1)))
    return record.indices


def recall(got, want):
    """Share of the wanted positions among those got, of tokens that see more than they select."""
    shares = []
    for layer in want:
        for one, other in zip(got[layer][0][64:], want[layer][0][64:], strict=True):
            shares.append(torch.isin(other, one).float().mean())
    return torch.stack(shares).mean().item()


def test_an_int8_index_selects_what_a_bfloat16_index_selects():
    ids, _ = lookup_batch(1, 512, questions=16, seed=5)
    want = selected(lookup(), ids)
    assert recall(selected(lookup(**INDEX), ids), want) >= 0.985


def test_queries_rotated_alone_select_something_else(monkeypatch):
    ids, _ = lookup_batch(1, 512, questions=16, seed=5)
    want = selected(lookup(), ids)
    write = Int8IndexRows.write

    def unrotated(self, *arguments):
        rotation = self.rotation
        self.rotation = torch.eye(len(rotation), dtype=rotation.dtype)
        write(self, *arguments)
        self.rotation = rotation

    monkeypatch.setattr(Int8IndexRows, "write", unrotated)
    assert recall(selected(lookup(**INDEX), ids), want) < 0.3


# ---- what a cache does, with both in int8 ------------------------------------------------------


def questions(count=2):
    ids, _ = lookup_batch(count, 200, questions=2, seed=7)
    return ids


def next_tokens(model, ids, cache, **call):
    return model(ids, cache=cache, **call).logits[:, -1].argmax(-1).tolist()


def test_beams_and_their_copies_continue_like_one_sequence():
    model, ids = lookup(**BOTH), questions(1)
    alone = next_tokens(model, ids, models.PagedCache(model, 1, 256))
    cache = models.PagedCache(model, 1, 256)
    model(ids[:, :-1], cache=cache)
    cache.batch_repeat_interleave(3)
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    assert next_tokens(model, ids[:, -1:].expand(3, 1), cache) == alone * 3
    assert type(cache.layers[0].index_keys) is Int8IndexRows
    beams = model.generate(ids, num_beams=3, max_new_tokens=4, do_sample=False)
    assert beams[0, ids.size(1)].item() == alone[0]


def test_left_padding_crop_and_growth_change_no_answer():
    model, ids = lookup(**BOTH), questions()
    alone = [next_tokens(model, row[None], None)[0] for row in ids]
    padded = torch.cat([torch.zeros(2, 7, dtype=ids.dtype), ids], 1)
    mask = (torch.arange(padded.size(1)) >= 7).long().expand(2, -1)
    cache = models.PagedCache(model, 2, padded.size(1) + 16)
    assert next_tokens(model, padded, cache, attention_mask=mask) == alone
    cache.crop(-1)
    cache.reserve(2 * cache.max_cache_len)
    assert next_tokens(model, ids[:, -1:], cache, attention_mask=mask) == alone


def test_a_forward_that_raises_leaves_the_cache_as_it_was():
    model, ids = lookup(**BOTH), questions(1)
    cache = models.PagedCache(model, 1, 256)
    model(ids[:, :-1], cache=cache)
    with interrupted(model.model.norm):
        model(ids[:, -1:] + 1, cache=cache)
    again = next_tokens(model, ids[:, -1:], cache)
    assert again == next_tokens(model, ids, models.PagedCache(model, 1, 256))


def test_a_decode_step_is_one_graph_and_equals_eager():
    model, ids = lookup(**BOTH), questions(1)
    caches = [models.PagedCache(model, 1, 256) for _ in range(2)]
    for cache in caches:
        model(ids[:, :-1], cache=cache)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    eager = model(ids[:, -1:], cache=caches[0]).logits
    assert torch.equal(compiled(ids[:, -1:], cache=caches[1]).logits, eager)


def test_a_cache_takes_the_dtypes_of_its_model_or_its_own():
    model = lookup(**BOTH)
    assert models.PagedCache(model, 1, 128).layers[0].pools["latent"].dtype == INT8
    own = models.PagedCache(model, 1, 256, index_dtype=model.dtype, kv_dtype=model.dtype)
    assert own.layers[0].pools["latent"].dtype == own.layers[0].pools["index"].dtype == model.dtype
    ids = questions(1)
    assert next_tokens(model, ids, own) == next_tokens(lookup(), ids, None)
    models.use_custom_pypto(model)
    assert models.PagedCache(model, 1, 128).layers[0].pools["latent"].dtype == model.dtype


def test_rows_hold_rotated_keys_of_the_definition():
    model = lookup(**INDEX)
    cache = models.PagedCache(model, 1, 128)
    matrix = cache.layers[0].index_keys.rotation
    assert torch.equal(matrix @ matrix.T * 1.0, matrix.T @ matrix)
    key = torch.randn(1, 3, 1, 128).to(model.dtype)
    cache.layers[0].write_keys(cache.place(1, 3, None).slots, key)
    rows, scales = npu_quant_rows_pto(key.flatten(0, 2), hadamard=matrix)
    assert torch.equal(cache.layers[0].pools["index"][1, :3, 0], rows)
    assert torch.equal(cache.layers[0].pools["index_scale"][1, :3, 0, 0], scales)


def test_the_prolog_op_makes_the_queries_and_keys_of_the_model(monkeypatch):
    selected, quantized, written = [], [], []
    select, quantize = LatentAttention.select, npu_quant_rows_pto
    write = Int8IndexRows.write

    def recorded(self, *arguments):
        selected.append((self, *arguments))
        return select(self, *arguments)

    def recorded_write(self, pools, slots, key):
        written.append(flat(slots, pools["index"]))
        write(self, pools, slots, key)

    def rows(x, **keywords):
        quantized.append(quantize(x, **keywords))
        return quantized[-1]

    monkeypatch.setattr(LatentAttention, "select", recorded)
    monkeypatch.setattr(Int8IndexRows, "write", recorded_write)
    monkeypatch.setattr(custom_pypto, "npu_quant_rows_pto", rows)
    model = models.use_custom_pypto(tiny_model("deepseek_v32"), block_size=16, index_dtype=INT8)
    cache = models.PagedCache(model, 2, 32, block_size=16)
    model(token_ids(2, 9), cache=cache)  # more than index_topk: few tokens need no scores
    assert len(selected) == len(quantized) == model.config.num_hidden_layers
    for (attention, hidden, latent, cos, sin, _, layer), (query, scale), slots in zip(
        selected, quantized, written, strict=True
    ):
        indexer = attention.indexer
        keys, scales = (torch.zeros_like(layer.pools[x]) for x in ("index", "index_scale"))
        got_query, got_scale, _ = npu_lightning_indexer_prolog_pto(
            hidden.flatten(0, 1),
            latent.flatten(0, 1),
            None,
            indexer.wq_b.weight.T,
            None,
            indexer.wk.weight.T,
            indexer.weights_proj.weight.T,
            indexer.k_norm.weight,
            indexer.k_norm.bias,
            cos.expand(2, -1, -1).flatten(0, 1),
            sin.expand(2, -1, -1).flatten(0, 1),
            cache.layers[0].index_keys.rotation,
            cache.layers[0].index_keys.rotation,
            keys,
            scales,
            slots,
            indexer.k_norm.eps,
        )
        for mine, model_s in (
            (got_query, query.flatten(0, 1)),
            (
                keys.view(-1, keys.size(-1))[slots],
                layer.pools["index"].view(-1, keys.size(-1))[slots],
            ),
        ):
            # float32 products in another order may fall on the other side of half a step
            steps = (mine.int() - model_s.int()).abs()
            assert steps.max() <= 1 and (steps > 0).float().mean() < 0.01
        torch.testing.assert_close(got_scale[..., 0], scale.flatten(0, 1), rtol=2**-10, atol=0)


NO_INT8 = "must be None for model_type {}, which has no caches in int8, got torch.int8"
UNSUPPORTED = {
    "fp8": (
        bfloat16,
        dict(kv_dtype=torch.float8_e4m3fn),
        "kv_dtype must be torch.int8 or None (dtype of the model), got torch.float8_e4m3fn; "
        "the ops compute in no other, as Atlas A2 and A3",
    ),
    "float32": (
        tiny_model,
        KV,
        "kv_dtype must be None for a model in torch.float32 (rows have RoPE keys of 2 bytes; "
        "load it in bfloat16), got torch.int8",
    ),
    "latent": (
        partial(bfloat16, kv_lora_rank=64),
        KV,
        "kv_dtype must be None for kv_lora_rank 64, no multiple of 128, got torch.int8",
    ),
    "index": (
        partial(bfloat16, index_head_dim=48),
        INDEX,
        "index_dtype must be None for index_head_dim 48, no power of two, got torch.int8",
    ),
    "hy_v4-index": (partial(bfloat16, "hy_v4"), INDEX, "index_dtype " + NO_INT8.format("hy_v4")),
    "deepseek_v4-index": (
        partial(bfloat16, "deepseek_v4"),
        INDEX,
        "index_dtype " + NO_INT8.format("deepseek_v4"),
    ),
    "deepseek_v4-kv": (
        partial(bfloat16, "deepseek_v4"),
        KV,
        "kv_dtype " + NO_INT8.format("deepseek_v4"),
    ),
}


@pytest.mark.parametrize("make, call, message", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_a_cache_that_cannot_be_is_rejected_by_name(make, call, message):
    model = make()
    with pytest.raises(ValueError) as error:
        models.use_custom_pypto(model, **call)
    assert str(error.value) == f"use_custom_pypto: {message}"
    assert not hasattr(model.model, "_custom_pypto")
    models.use_custom_pypto(model)
    with pytest.raises(ValueError) as error:
        models.PagedCache(model, 1, 64, **call)
    assert str(error.value) == f"PagedCache: {message}"


def test_a_model_cast_after_the_patch_is_rejected_by_its_cache():
    model = tiny("deepseek_v32", kv_dtype=INT8).float()
    with pytest.raises(
        ValueError, match="PagedCache: kv_dtype must be None for a model in torch.float32"
    ):
        models.PagedCache(model, 1, 64)
