"""The checkpoint of two steps: which of its layers may share a selection, and which may not.

An answer is found by a fact that another one names: layers 0 and 1 look for the first, 2 and 3 for
the second.
"""

import functools

import pytest
import torch
from test_lookup import CHECKPOINTS  # and examples, importable
from transformers import AutoModelForCausalLM

from custom_pypto import models
from custom_pypto.models.index_overlap import propose_pattern

import train_lookup_hops  # isort: skip

CHECKPOINT = CHECKPOINTS / "lookup_hops"
LENGTHS = [128, 256, 512]  # of docs/shared_selections.md


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)  # tensors this small only wait for a second one


@functools.cache
def patched_model():
    return models.load(CHECKPOINT, dtype=torch.float32)


def accuracy(length, pattern):
    model = models.use_custom_pypto(patched_model(), index_topk_pattern=pattern)
    cache = functools.partial(models.PagedCache, model, 1, length)
    return train_lookup_hops.lookup_accuracy(model, length, new_cache=cache)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_patched_model_is_as_accurate_as_upstream(length):
    upstream = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    expected = train_lookup_hops.lookup_accuracy(upstream, length)
    assert expected > 0.95
    assert abs(accuracy(length, "FFFF") - expected) <= 0.02


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("pattern", ["FFFS", "FSFF", "FSFS"])
def test_a_layer_may_share_with_one_that_looks_for_the_same(pattern, length):
    assert accuracy(length, pattern) > 0.95


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("pattern", ["FFSF", "FFSS", "FSSF", "FSSS"])
def test_a_layer_may_not_share_with_one_that_looks_for_what_leads_to_its_fact(pattern, length):
    """Also in the patterns of index_topk_freq 2 and 4, FFSF and FFSS."""
    # 4 keys hold the right one of 32 facts by luck at times, and a guess is right in 1 of 8
    assert accuracy(length, pattern) < 0.5


@torch.no_grad()
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("share, pattern", [(0.75, "FFFS"), (0.5, "FSFS")])
def test_the_pattern_that_overlaps_propose_shares_nothing_across_the_step(share, pattern, length):
    model = models.use_custom_pypto(patched_model())
    with models.record_indices(model) as record:
        model(train_lookup_hops.lookup_batch(4, length, seed=0)[0], use_cache=False)
    assert propose_pattern(model, record, share) == pattern


def test_texts_are_of_the_length_that_was_asked_and_the_second_fact_is_that_of_the_first():
    input_ids, labels = train_lookup_hops.lookup_batch(2, 200, questions=9, seed=3)
    assert input_ids.shape == labels.shape == (2, 200)
    for row, label in zip(input_ids.tolist(), labels.tolist(), strict=True):
        words = [train_lookup_hops.VOCABULARY[i] for i in row]
        colours = dict(word.split("=") for word in words if "=" in word)
        animals = dict(word.split(">") for word in words if ">" in word)
        assert len(colours) == len(animals) == 16
        asked, answers, stops = (words[200 - 27 + i :: 3] for i in range(3))
        assert answers == [colours[animals[question.removesuffix("?")]] for question in asked]
        assert stops == ["."] * 9 and label[200 - 27 :: 3] == [-100] * 9
        assert label[200 - 26 :: 3] == row[200 - 26 :: 3]
    with pytest.raises(ValueError, match="length must be at least 32 [+] 3 [*] questions"):
        train_lookup_hops.lookup_batch(1, 50)
