"""The trained MTP layer of a DeepSeek-V4: its drafts of answers to questions that were asked before
are accepted, and not with a pitfall in the way.

The layer finds an answer by one look back, at the colour behind the same animal: it knows that
animal from the streams of the token before the colour alone.
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

from train_lookup_v4_mtp import CHECKPOINT, drafted_answers  # noqa: E402


@functools.cache
def loaded(dtype=torch.float32, weights=None):
    return models.load(CHECKPOINT, dtype=dtype, weights=weights, mtp=True)


@pytest.mark.parametrize("length", [512, pytest.param(2048, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "dtype, weights",
    [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "int8")],
    ids=["float32", "bfloat16", "int8"],
)
def test_more_than_nine_of_ten_drafts_are_accepted(dtype, weights, length):
    counts = drafted_answers(loaded(dtype, weights), length).drafts
    assert len(counts.drafted) == 2 and sum(counts.drafted) >= 30
    assert counts.share > 0.9


def exchanged_projections(monkeypatch):
    layer = mtp.mtp_layer(loaded().model)
    of_token, of_streams = layer.e_proj.weight, layer.h_proj.weight
    both = of_token.data, of_streams.data
    monkeypatch.setattr(of_token, "data", both[1])
    monkeypatch.setattr(of_streams, "data", both[0])


def without_streams(monkeypatch):
    joined = mtp.joined
    zero = lambda layer, x, streams: joined(layer, x, torch.zeros_like(streams))  # noqa: E731
    monkeypatch.setattr(mtp, "joined", zero)


PITFALLS = [exchanged_projections, without_streams, tokens_one_earlier, without_the_prompt]


@pytest.mark.parametrize("pitfall", PITFALLS)
def test_a_pitfall_costs_drafts_and_no_answer(pitfall, monkeypatch):
    want = drafted_answers(loaded(), 512)
    pitfall(monkeypatch)
    got = drafted_answers(loaded(), 512)
    assert torch.equal(got.sequences, want.sequences)
    assert got.drafts.share < want.drafts.share - 0.25
