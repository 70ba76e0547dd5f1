"""Layers that share the selection of an earlier one (IndexCache), in all architectures."""

import re

import pytest
import torch
from model_harness import (
    PADS,
    TOLERANCES,
    WRONG,
    feed,
    left_padded,
    no_grad_and_one_thread,  # noqa: F401
    trace,
)
from tiny import ALL_KINDS, marks_of, tiny_model, token_ids
from training_harness import LEARNING, assert_near, checkpointed, packed, padded, trained
from transformers import CompileConfig

from custom_pypto import models
from custom_pypto.index_sharing import Asked, pattern_of, sources_of
from custom_pypto.models import CACHE
from custom_pypto.models.latent_attention import LatentAttention
from custom_pypto.models.loading.checkpoint import first_layers
from custom_pypto.models.patched import patched_attentions, text_model

# of the layers that attend to selected positions; those of GLM-5 and its kin that have no indexer
# are S in any case
PATTERNS = {
    "deepseek_v32": "FSS",
    "axk2": "FSF",
    "glm_moe_dsa": "FSS",
    "hy_v4": "FSS",
    "hy_v4_vl": "FSS",
    "dots3_note": "FS",
    "deepseek_v4": "FS",
    "glm5_next": "FSSS",
    "mistral_large4": "FSSF",
}
KINDS = [pytest.param(kind, marks=marks_of(kind)) for kind in ALL_KINDS]
CHUNKS = [40, 1, 17, 1, 3]


def patched(kind, pattern=None, model=None, **options):
    """A model that shares as PATTERNS says, or as ``pattern`` does."""
    options = {"block_size": 16, "index_topk_pattern": pattern or PATTERNS[kind]} | options
    return models.use_custom_pypto(model or tiny_model(kind), **options)


def sources(model):
    """By layer that attends to selected positions: the one that selects them."""
    found = patched_attentions(text_model(model)).items()
    return {
        i: i if x.selects else x.index_source
        for i, x in found
        if x.selects or x.index_source is not None
    }


def indexed(kind):
    """Layers with an indexer."""
    model = models.use_custom_pypto(tiny_model(kind))
    return [i for i, x in patched_attentions(text_model(model)).items() if x.selects]


def fed(model, seed=1, chunks=CHUNKS, pads=PADS, **options):
    """Logits of real tokens, and the cache."""
    ids, mask, positions = left_padded(pads, sum(chunks), seed)
    cache = models.PagedCache(model, len(pads), 96, block_size=16, **options)
    return feed(model, cache, ids, mask, positions, chunks)[mask.bool()], cache


def pads_of(kind):
    # upstream's layers of linear attention count padding
    return (0, 0) if kind == "glm5_next" else PADS


# ---- what layers attend to ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_without_sharing_every_bit_stays(kind):
    plain = models.use_custom_pypto(tiny_model(kind), block_size=16)
    want, cache = fed(plain, pads=pads_of(kind))
    one = patched(kind, None, index_topk_pattern=None, index_topk_freq=1)
    got, of_one = fed(one, pads=pads_of(kind))
    assert torch.equal(got, want)
    assert of_one.made_for == cache.made_for and of_one.nbytes == cache.nbytes


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_shared_layers_attend_to_the_selection_of_the_last_full_one(kind, monkeypatch):
    """As the model does whose every layer is told, by a replay, to attend to these positions."""
    monkeypatch.setattr(LatentAttention, "slice_tokens", 16)
    shared, pads = patched(kind), pads_of(kind)
    own = sources(shared)
    with models.record_indices(shared) as record:
        got, _ = fed(shared, pads=pads)
    assert sorted(record) == sorted(set(own.values())) and len(record) < len(own)
    plain = models.use_custom_pypto(tiny_model(kind), block_size=16)
    want, _ = fed(plain, pads=pads)
    assert (got - want).abs().max() > WRONG
    everywhere = {layer: record[own[layer]] for layer in indexed(kind)}
    with models.replay_indices(plain, everywhere):
        told, _ = fed(plain, pads=pads)
    assert torch.equal(got, told)
    # and a replay reaches the layers that share, whatever the indexers would select
    for name, weight in shared.named_parameters():
        if name.endswith(".weights_proj.weight"):
            weight.neg_()
    assert (fed(shared, pads=pads)[0] - got).abs().max() > WRONG
    with models.replay_indices(shared, record):
        assert torch.equal(fed(shared, pads=pads)[0], got)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_prompt_its_chunks_and_single_tokens_agree(kind):
    model, pads = patched(kind), pads_of(kind)
    want, _ = fed(model, pads=pads, chunks=[62])
    for chunks in (CHUNKS, [31] + [1] * 31):
        got, _ = fed(model, pads=pads, chunks=chunks)
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCES[kind])
    prompt = token_ids(2, 30)
    tokens = model.generate(prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    logits = model(tokens[:, :-1]).logits
    assert torch.equal(logits[:, 29:].argmax(-1), tokens[:, 30:])


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_shared_layers_have_no_rows_for_index_keys(kind):
    model, plain = patched(kind), models.use_custom_pypto(tiny_model(kind), block_size=16)
    cache, of_plain = (models.PagedCache(one, 2, 96, block_size=16) for one in (model, plain))
    shares = [i for i, source in sources(model).items() if source != i]
    saved = 0
    for i, (layer, other) in enumerate(zip(cache.layers, of_plain.layers, strict=True)):
        lacking = {"index", "index_state"} & other.pools.keys() if i in shares else set()
        assert layer.pools.keys() == other.pools.keys() - lacking
        saved += sum(other.pools[name].nbytes for name in lacking)
    assert saved and cache.nbytes == of_plain.nbytes - saved


@pytest.mark.parametrize("kind", KINDS)
def test_a_selection_does_not_outlive_its_forward(kind):
    model = patched(kind)
    _, cache = fed(model, pads=pads_of(kind))
    assert cache.store.selection.indices is None


# ---- caches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_saved_caches_continue_and_those_of_other_patterns_are_rejected(kind, tmp_path):
    model, path = patched(kind), tmp_path / "cache"
    ids = token_ids(2, 50)
    cache = models.PagedCache(model, 2, 96, block_size=16)
    model(ids[:, :40], **{CACHE: cache})
    cache.save(path)
    want = model(ids[:, 40:], **{CACHE: cache}).logits
    loaded = models.PagedCache.load(path, model)
    assert torch.equal(model(ids[:, 40:], **{CACHE: loaded}).logits, want)
    models.use_custom_pypto(model, block_size=16)  # without the pattern
    message = f"index_topk_pattern={PATTERNS[kind]}, got one with index_topk_pattern=None"
    with pytest.raises(ValueError, match=message):
        models.PagedCache.load(path, model)
    with pytest.raises(ValueError, match=message):
        model(ids[:, :1], **{CACHE: loaded})


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa", "axk2"])
def test_caches_in_int8_share_alike(kind):
    model = patched(kind, model=tiny_model(kind, kv_lora_rank=128).bfloat16(), index_dtype="int8")
    with models.record_indices(model) as record:
        got, cache = fed(model)
    assert {layer.pools["index"].dtype for layer in cache.layers if "index" in layer.pools} == {
        torch.int8
    }
    own, plain = sources(model), tiny_model(kind, kv_lora_rank=128).bfloat16()
    models.use_custom_pypto(plain, block_size=16, index_dtype="int8")
    with models.replay_indices(plain, {layer: record[own[layer]] for layer in indexed(kind)}):
        told, _ = fed(plain)
    assert torch.equal(got, told)


# ---- compiled -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_layers_and_whole_graphs_share_alike(kind):
    model = patched(kind)
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    want = model.generate(token_ids(2, 30), **options)
    config = CompileConfig(backend="aot_eager", mode=None, fullgraph=True)
    assert torch.equal(model.generate(token_ids(2, 30), compile_config=config, **options), want)
    if kind in ("glm5_next", "hy_v4_vl"):
        return  # their forwards branch by the values of tensors, in upstream code
    caches = [models.PagedCache(model, 2, 48, block_size=16) for _ in range(2)]
    step = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    for forward, cache in zip((model, step), caches, strict=True):
        model(token_ids(2, 30), **{CACHE: cache})
        logits = [forward(token_ids(2, 1, i), **{CACHE: cache}).logits for i in range(3)]
        want = torch.cat(logits) if forward is model else want
    torch.testing.assert_close(torch.cat(logits), want, rtol=0, atol=TOLERANCES[kind])


# ---- training -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL_KINDS)
@torch.enable_grad()
def test_training_shares_on_either_path_and_in_repeated_layers(kind):
    """Activation checkpointing calls layers again, after later ones have selected."""
    batch, found = padded(right=(7, 0)), {}
    for path in ("ops", "upstream"):
        for again in (False, True):
            model = patched(kind, model=tiny_model(kind).train(), training=path)
            if again:
                checkpointed(model)
            found[path, again] = trained(model, batch)
    loss, grads = found["ops", False]
    for other, others in found.values():
        torch.testing.assert_close(other, loss, rtol=0, atol=TOLERANCES[kind])
        assert_near(others, grads, kind)
    plain = models.use_custom_pypto(tiny_model(kind).train(), training="ops")
    assert (trained(plain, batch)[0] - loss).abs() > 1e-4


@pytest.mark.parametrize("kind", LEARNING)
@torch.enable_grad()
def test_the_loss_of_the_indexers_is_of_those_that_select(kind):
    model = patched(kind, model=tiny_model(kind).train(), indexer_loss="sparse")
    full = {i for i, source in sources(model).items() if source == i}
    _, grads = trained(model, padded(right=(7, 0)))
    learned = {name for name in grads if ".indexer." in name}
    assert {int(re.search(r"layers[.](\d+)[.]", name)[1]) for name in learned} == full
    dense = patched(kind, model=tiny_model(kind).train(), indexer_loss="dense")
    whole = models.use_custom_pypto(tiny_model(kind).train(), indexer_loss="dense")
    # warming up, all layers attend to all positions
    batch = padded(right=(7, 0))
    torch.testing.assert_close(dense(**batch).logits, whole(**batch).logits, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_in_evaluation_take_upstreams_path_and_share(kind):
    if kind in ("deepseek_v4", "glm5_next", "hy_v4_vl"):
        pytest.skip("upstream counts groups, states or axes across sequences")
    model, batch = patched(kind), packed()
    got = model(**batch, use_cache=False).logits
    first = slice(0, 13)  # a sequence of the row
    alone = model(batch["input_ids"][:1, first]).logits
    torch.testing.assert_close(got[:1, first], alone, rtol=0, atol=TOLERANCES[kind])


@torch.enable_grad()
def test_a_replay_on_upstreams_path_reaches_the_layers_that_share():
    model, batch = patched("deepseek_v32", model=tiny_model().train(), training="ops"), padded()
    with models.record_indices(model) as record:
        want = trained(model, batch)
    patched("deepseek_v32", model=model, training="upstream")
    for layer in model.model.layers:
        layer.self_attn.indexer.weights_proj.weight.data.neg_()
    with models.replay_indices(model, record):
        got = trained(model, batch)
    torch.testing.assert_close(got[0], want[0], rtol=0, atol=TOLERANCES["deepseek_v32"])
    assert_near(got[1], want[1])


# ---- options ------------------------------------------------------------------------------------


def test_frequencies_count_as_vllm_does():
    assert pattern_of(4, 2, 11) == "FFSSSFSSSFS"
    assert pattern_of(4, 3, 11) == "FFFSSSFSSSF"  # GLM-5.2
    assert pattern_of(1, 2, 3) == "FFF"
    assert Asked(None, "SFSSF").letters("caller", [1, 3], 5) == "FS"
    assert sources_of("FSSFS", [0, 2, 5, 6, 9]) == {2: 0, 5: 0, 9: 6}


def test_a_frequency_shares_from_the_second_layer_on():
    model = models.use_custom_pypto(tiny_model(num_hidden_layers=7), index_topk_freq=3)
    assert sources(model) == {0: 0, 1: 1, 2: 1, 3: 1, 4: 4, 5: 4, 6: 4}


@pytest.mark.parametrize("kind", ["dots3_note", "deepseek_v4", "glm5_next"])
def test_a_pattern_may_have_a_letter_for_every_layer(kind):
    """Those of layers that attend to no selection mean nothing."""
    letters = {"dots3_note": "FSS", "deepseek_v4": "SFSS", "glm5_next": "SFSFSS"}
    own = sources(patched(kind, letters[kind]))
    assert own == sources(patched(kind))


KEYS = [
    (dict(index_topk_pattern="FSS"), {1: 0, 2: 0}),
    (dict(index_topk_freq=2), {2: 1}),
    (dict(index_topk_freq=2, index_topk_pattern="FSS"), {1: 0, 2: 0}),  # as in vLLM
    (dict(use_index_cache=True, index_topk_freq=2), {2: 1}),
    (dict(use_index_cache=False, index_topk_freq=2), {}),
    (dict(index_topk_freq=1), {}),
    (dict(index_topk_freq=2, index_skip_topk_offset=1), {1: 0}),
]


@pytest.mark.parametrize("keys, want", KEYS)
def test_keys_of_the_config_count_where_no_option_does(keys, want, tmp_path):
    tiny_model(**keys).save_pretrained(tmp_path)
    model = models.load(tmp_path)
    assert text_model(model)._custom_pypto.sharing.sources == want
    models.use_custom_pypto(model, index_topk_freq=1)
    assert text_model(model)._custom_pypto.sharing.sources == {}
    models.use_custom_pypto(model, index_topk_pattern="FFS")
    assert text_model(model)._custom_pypto.sharing.sources == {2: 1}
    # an option is no part of what is saved, the config is
    model.save_pretrained(tmp_path / "again")
    again = models.load(tmp_path / "again")
    assert text_model(again)._custom_pypto.sharing.sources == want
    assert models.load(tmp_path, num_hidden_layers=2)  # a pattern is cut with the layers


def test_a_pattern_is_cut_with_the_layers():
    ratios = [0, 4, 128, 4, 128, 4]
    for pattern, wanted in (("FFS", "FF"), ("FFFSFF", "FFFS")):
        config = dict(num_hidden_layers=6, compress_ratios=ratios, index_topk_pattern=pattern)
        assert first_layers(config, 4)["index_topk_pattern"] == wanted


BAD = {
    "both": (
        dict(index_topk_freq=2, index_topk_pattern="FSS"),
        "index_topk_freq must be None with",
    ),
    "letters": (dict(index_topk_pattern="FXS"), "letter F or S for each of 3 layers, got 'FXS'"),
    "lower case": (dict(index_topk_pattern="fss"), "letter F or S for each of 3 layers"),
    "length": (dict(index_topk_pattern="FS"), "for each of 3 layers, got 'FS' with 2"),
    "empty": (dict(index_topk_pattern=""), "for each of 3 layers, got '' with 0"),
    "first": (dict(index_topk_pattern="SFF"), "index_topk_pattern must let the first layer select"),
    "zero": (dict(index_topk_freq=0), "index_topk_freq must be at least 1, got 0"),
    "negative": (dict(index_topk_freq=-4), "index_topk_freq must be at least 1, got -4"),
    "text": (dict(index_topk_freq="4"), "index_topk_freq must be an int, got str '4'"),
    "float": (dict(index_topk_freq=2.0), "index_topk_freq must be an int, got float 2.0"),
    "list": (
        dict(index_topk_pattern=["F", "S", "S"]),
        "index_topk_pattern must be a str of F and S",
    ),
}


@pytest.mark.parametrize("options, message", BAD.values(), ids=BAD)
def test_what_cannot_be_shared_is_rejected_before_anything_changes(options, message):
    model = tiny_model()
    before = trace(model)
    with pytest.raises((TypeError, ValueError), match=message) as error:
        models.use_custom_pypto(model, **options)
    assert str(error.value).startswith("use_custom_pypto: ") and trace(model) == before
    models.use_custom_pypto(model, index_topk_pattern="FSF")
    before = trace(model)
    with pytest.raises((TypeError, ValueError), match=message):
        models.use_custom_pypto(model, **options)
    assert trace(model) == before and sources(model) == {0: 0, 1: 0, 2: 2}


def test_keys_that_cannot_be_honoured_are_rejected_by_name(tmp_path):
    for keys, message in (
        (dict(index_topk_pattern="FS"), "config.index_topk_pattern must have a letter"),
        (dict(index_topk_freq=0), "config.index_topk_freq must be at least 1, got 0"),
        (
            dict(index_topk_freq=2, index_skip_topk_offset=0),
            "config.index_topk_freq must let the first layer select.* got 2 with index_skip_topk_",
        ),
    ):
        with pytest.raises(ValueError, match=f"use_custom_pypto: {message}"):
            models.use_custom_pypto(tiny_model(**keys))


@pytest.mark.parametrize(
    "kind", ["glm_moe_dsa", "hy_v4", "hy_v4_vl", "mistral_large4", "glm5_next"]
)
def test_layers_without_an_indexer_cannot_be_told_to_select(kind):
    config = {i: x.indexer is None for i, x in enumerate(attentions(kind)) if hasattr(x, "indexer")}
    every, lacking = "F" * len(config), [i for i, none in config.items() if none]
    message = re.escape(f"index_topk_pattern must let layers {lacking} share a selection")
    with pytest.raises(ValueError, match=message):
        patched(kind, every)


def attentions(kind):
    return [layer.self_attn for layer in text_model(tiny_model(kind)).layers]


@pytest.mark.parametrize("kind", KINDS)
def test_another_patch_shares_otherwise_and_the_undone_model_is_upstream(kind):
    upstream = tiny_model(kind)
    model, before = tiny_model(kind), trace(upstream)
    ids = token_ids(2, 30)
    plain = models.use_custom_pypto(model)(ids).logits
    shared = patched(kind, model=model)(ids).logits
    assert (shared - plain).abs().max() > WRONG
    with models.record_indices(model):
        message = "must be called outside of record_indices .* to change which layers select"
        with pytest.raises(ValueError, match=message):
            models.use_custom_pypto(model)
        patched(kind, model=model)  # as before
        assert torch.equal(model(ids).logits, shared)
    assert torch.equal(models.use_custom_pypto(model)(ids).logits, plain)
    patched(kind, model=model)
    assert trace(models.use_transformers(model)) == before
    assert torch.equal(model(ids).logits, upstream(ids).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_is_that_of_transformers(kind, tmp_path):
    """An option of a patch is no part of it, as the other options are none."""
    model = patched(kind)
    model.save_pretrained(tmp_path)
    saved = type(model).from_pretrained(tmp_path)
    config = {name: x for name, x in saved.config.to_dict().items() if "index_topk" in name}
    assert "index_topk_pattern" not in config and "index_topk_freq" not in config
    states = saved.state_dict(), model.state_dict()
    assert states[0].keys() == states[1].keys()
