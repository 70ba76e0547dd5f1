"""The trained MTP layer: its drafts of answers are accepted, and not with a pitfall in the way.

A value follows from a fact far back in the text, so the layer must have the right rows of the whole
text, and select them by its own indexer.
"""

import functools
import sys
from pathlib import Path

import pytest
import torch
from mtp_harness import tokens_one_earlier, without_the_prompt

from custom_pypto import models
from custom_pypto.models.mtp import layer as mtp

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.append(str(EXAMPLES))

from train_lookup_mtp import drafted_answers  # noqa: E402

LOOKUP, WITH_MTP = (EXAMPLES / f"checkpoints/{name}" for name in ("lookup", "lookup_mtp"))


@functools.cache
def loaded(dtype=torch.float32, weights=None):
    return models.load(WITH_MTP, dtype=dtype, weights=weights, mtp=True)


@pytest.mark.parametrize("length", [512, pytest.param(2048, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "dtype, weights",
    [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "int8")],
    ids=["float32", "bfloat16", "int8"],
)
def test_more_than_nine_of_ten_drafts_are_accepted(dtype, weights, length):
    counts = drafted_answers(loaded(dtype, weights), length).drafts
    assert len(counts.drafted) == 2 and sum(counts.drafted) >= 60
    assert counts.share > 0.9


def test_the_model_is_that_of_the_lookup_checkpoint():
    want, got = models.load(LOOKUP).state_dict(), models.load(WITH_MTP).state_dict()
    assert want.keys() == got.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


def hidden_first(monkeypatch):
    joined = mtp.joined
    monkeypatch.setattr(mtp, "joined", lambda layer, x, h: joined(layer, h, x))


def without_an_indexer(monkeypatch):
    weights = loaded().model.layers[2].self_attn.indexer.weights_proj.weight
    monkeypatch.setattr(weights, "data", -weights.data)


PITFALLS = [hidden_first, tokens_one_earlier, without_the_prompt, without_an_indexer]


@pytest.mark.parametrize("pitfall", PITFALLS)
def test_a_pitfall_costs_drafts_and_no_answer(pitfall, monkeypatch):
    want = drafted_answers(loaded(), 512)
    pitfall(monkeypatch)
    got = drafted_answers(loaded(), 512)
    assert torch.equal(got.sequences, want.sequences)
    assert got.drafts.share < want.drafts.share - 0.3
