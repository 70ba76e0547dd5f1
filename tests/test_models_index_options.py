"""Options and keys of a config by which layers share a selection, and what is rejected."""

import re

import pytest
import torch
from model_harness import (
    WRONG,
    no_grad_and_one_thread,  # noqa: F401
    trace,
)
from sharing_harness import KINDS, patched, sources
from tiny import tiny_model, token_ids

from custom_pypto import models
from custom_pypto.index_sharing import Asked, pattern_of, sources_of
from custom_pypto.models.loading.checkpoint import first_layers
from custom_pypto.models.patched import text_model


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
