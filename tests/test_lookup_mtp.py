"""The trained MTP layers: their drafts of answers are accepted, and not with a pitfall in the way.

In the texts of ``lookup`` a value follows from a fact far back, so the layer must have the right
rows of the whole text, and select them by its own indexer. The layer of ``lookup_v4`` finds an
answer by one look back, at the colour behind the same animal: it knows that animal from the streams
of the token before the colour alone.
"""

import functools
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from custom_pypto import models
from custom_pypto.models import generation
from custom_pypto.models.mtp import layer as mtp

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from train_lookup_mtp import CHECKPOINTS, TASKS, answers  # noqa: E402


@functools.cache
def loaded(name, dtype=torch.float32, weights=None):
    return models.load(CHECKPOINTS / name, dtype=dtype, weights=weights, mtp=True)


@functools.cache
def answered(name, length=512, **options):
    return answers(TASKS[name], loaded(name, **options), length)


FORMATS = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "int8": {"dtype": torch.bfloat16, "weights": "int8"},
}


@pytest.mark.parametrize("length", [512, pytest.param(2048, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("name", TASKS)
def test_more_than_nine_of_ten_drafts_are_accepted(name, options, length):
    counts = answered(name, length, **options).drafts
    assert len(counts.drafted) == 2 and sum(counts.drafted) >= 2 * TASKS[name].questions - 4
    assert counts.share > 0.9


@pytest.mark.parametrize("name", TASKS)
def test_transformers_loads_the_model_alone_and_says_nothing_of_the_layer(name):
    path = CHECKPOINTS / name
    upstream, said = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(said.values())
    got, want = loaded(name, dtype=torch.bfloat16).state_dict(), upstream.state_dict()
    assert got.keys() > want.keys() == models.load(path).state_dict().keys()
    assert all(torch.equal(got[weight], tensor) for weight, tensor in want.items())


# ---- pitfalls, which cost drafts ---------------------------------------------------------------


def tokens_one_earlier(monkeypatch, _):
    draft = mtp.Drafting.draft
    monkeypatch.setattr(
        mtp.Drafting,
        "draft",
        lambda self, ends, *rest: draft(self, [end.roll(1) for end in ends], *rest),
    )


def without_the_prompt(monkeypatch, _):
    def follow(text, kwargs, step, states):
        if step.rows.drafting is not None:
            mtp.follow(text, kwargs, step, states)
        for pool in step.rows.store.layers[-1].pools.values():
            pool.nan_to_num_()

    monkeypatch.setattr(generation, "follow", follow)


def hidden_first(monkeypatch, _):
    joined = mtp.joined
    monkeypatch.setattr(mtp, "joined", lambda layer, x, h: joined(layer, h, x))


def without_an_indexer(monkeypatch, layer):
    weights = layer.self_attn.indexer.weights_proj.weight
    monkeypatch.setattr(weights, "data", -weights.data)


def exchanged_projections(monkeypatch, layer):
    of_token, of_streams = layer.e_proj.weight, layer.h_proj.weight
    both = of_token.data, of_streams.data
    monkeypatch.setattr(of_token, "data", both[1])
    monkeypatch.setattr(of_streams, "data", both[0])


def without_streams(monkeypatch, _):
    joined = mtp.joined
    zero = lambda layer, x, streams: joined(layer, x, torch.zeros_like(streams))  # noqa: E731
    monkeypatch.setattr(mtp, "joined", zero)


PITFALLS = [
    *(("lookup", it) for it in (hidden_first, without_an_indexer)),
    *(("lookup_v4", it) for it in (exchanged_projections, without_streams)),
    *((name, it) for it in (tokens_one_earlier, without_the_prompt) for name in TASKS),
]


@pytest.mark.parametrize("name, pitfall", PITFALLS)
def test_a_pitfall_costs_drafts_and_no_answer(name, pitfall, monkeypatch):
    want, model = answered(name), loaded(name)
    pitfall(monkeypatch, mtp.mtp_layer(model.model))
    got = answers(TASKS[name], model, 512)
    assert torch.equal(got.sequences, want.sequences)
    assert got.drafts.share < want.drafts.share - 0.25
