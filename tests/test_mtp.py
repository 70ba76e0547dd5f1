"""``generate(use_mtp=True)``: the text of a model is what it is without drafts, whatever is
drafted, accepted, or in the way."""

import copy
import time

import pytest
import torch
from model_harness import no_grad_and_one_thread, whole_graph  # noqa: F401
from mtp_harness import (
    APART,
    DICT,
    GREEDY,
    MTP_KINDS,
    NEW,
    OF_ONE,
    alone,
    drafting_model,
    generated,
    mtp_rows,
    padded,
)
from tiny import clear_case, representatives, token_ids
from transformers import GenerationConfig, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from custom_pypto import models
from custom_pypto.models import CACHE
from custom_pypto.models.mtp import layer as mtp
from custom_pypto.models.mtp.gain import ENOUGH, PAUSE, PLAIN
from custom_pypto.models.patched import text_model

OPTIONS = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.3},
    "sampled-from-few": {"do_sample": True, "top_k": 5, "temperature": 0.3},
    "penalised": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "returned-twice": {"do_sample": True, "temperature": 0.1, "num_return_sequences": 2},
    "chunked-prefill": {"prefill_chunk_size": 7},
}


def without_and_with_drafts(model, inputs_of, drafts=3, **options):
    """The output with drafts, compared with the text without."""
    seed, want = clear_case(lambda seed: generated(model, inputs_of(seed), **options))
    options |= DICT | {"use_mtp": True, "num_assistant_tokens": drafts}
    got = generated(model, inputs_of(seed), **options)
    assert torch.equal(got.sequences, want)
    return got


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    "kind, drafts", [(kind, 1 + 3 * (i % 2)) for i, kind in enumerate(MTP_KINDS)]
)
def test_drafts_do_not_change_the_text(kind, drafts, options):
    model = drafting_model(kind)
    counts = without_and_with_drafts(model, alone, drafts, **options).drafts
    # else nothing is tested: some drafts were right and some were not
    assert len(counts.drafted) == drafts and 0 < counts.accepted[0] < counts.drafted[0]
    assert 0 < counts.share < 1


# of two sequences beside two, few seeds are clear
PADDED = [
    pytest.param(it, id=name, marks=pytest.mark.slow if "num_return_sequences" in it else ())
    for name, it in OPTIONS.items()
]
# the last one's states are put back for all sequences at once
OF_BATCHES = [*representatives(kind for kind in MTP_KINDS if kind != "glm5_next"), "glm5_next"]


@pytest.mark.parametrize("options", PADDED)
@pytest.mark.parametrize("kind", OF_BATCHES)
def test_rows_of_a_padded_batch_that_accept_different_numbers_are_as_without(kind, options):
    got = without_and_with_drafts(drafting_model(kind), padded, **options)
    if "num_return_sequences" in options and kind not in APART:
        return  # of four sequences no draft is accepted in all
    assert 0 < got.drafts.share < 1 and got.drafts.forwards < NEW


@pytest.mark.parametrize("kind", representatives(MTP_KINDS))
def test_a_text_ends_at_every_place_of_a_step_as_without_drafts(kind):
    model = drafting_model(kind)
    seed, want = clear_case(lambda seed: generated(model, alone(seed)))
    ids, begin = want[:, :40], 40
    options = {"use_mtp": True, "num_assistant_tokens": 3}
    for length in range(1, 9):  # two steps
        end = want[0, begin + length - 1].item()
        got = model.generate(ids, **GREEDY | {"max_new_tokens": length}, **options)
        assert torch.equal(got, want[:, : begin + length])
        ended = want[0, begin:].tolist().index(end) + 1  # the first one
        for stop in ({"eos_token_id": end}, {"stopping_criteria": [EndsWith(end)]}):
            got = model.generate(ids, pad_token_id=0, **stop, **GREEDY, **options, **DICT)
            assert torch.equal(got.sequences, want[:, : begin + ended])
            assert got[CACHE].get_seq_length() == begin + ended - 1


class EndsWith(StoppingCriteria):
    """As stop strings do, without a tokenizer."""

    def __init__(self, token):
        self.token = token

    def __call__(self, ids, scores, **_):
        return ids[:, -1] == self.token


@pytest.mark.parametrize("kind", representatives(MTP_KINDS))
def test_finished_rows_of_a_batch_are_padded_as_without_drafts(kind):
    model = drafting_model(kind)
    seed, want = clear_case(lambda seed: generated(model, padded(seed)))
    ends = want[:1, 40 + 9].tolist()  # of one of both sequences
    without_and_with_drafts(model, lambda _: padded(seed), eos_token_id=ends, pad_token_id=0)


@pytest.mark.parametrize("kind", representatives(MTP_KINDS))
def test_drafts_of_a_sequence_that_has_ended_hold_no_other_up(kind):
    model = drafting_model(kind)

    drafts = {"use_mtp": True, "num_assistant_tokens": 3, **DICT}

    def run(seed):  # of the batch the first sequence ends at once
        ids = token_ids(2, 40, seed)
        end = generated(model, {"input_ids": ids[:1]}, max_new_tokens=1)[0, -1:].tolist()
        ends = {"eos_token_id": end, "pad_token_id": 0}
        want = generated(model, {"input_ids": ids}, **ends)
        both = (generated(model, {"input_ids": x}, **ends, **drafts) for x in (ids, ids[1:]))
        return want, *both

    _, (want, got, alone) = clear_case(run)
    assert torch.equal(got.sequences, want) and not want[0, 41:].any()
    assert got.drafts == alone.drafts and got.drafts.accepted[0] > 0


@pytest.mark.parametrize("kind", representatives(MTP_KINDS))
def test_a_forward_without_a_cache_does_not_feed_the_layer(kind, monkeypatch):
    model, ids, calls = drafting_model(kind), token_ids(2, 20), []
    run = mtp.run
    monkeypatch.setattr(mtp, "run", lambda *args: calls.append(1) or run(*args))
    model(ids, use_cache=False)
    assert not calls
    model(ids)
    assert calls


@pytest.mark.parametrize("kind", representatives(MTP_KINDS))
def test_a_prompt_and_a_text_fill_a_cache_to_the_token(kind):
    model = drafting_model(kind)

    def fill(seed):
        return model.generate(token_ids(1, 40, seed), max_length=64, do_sample=False)

    seed, want = clear_case(fill)
    cache = models.PagedCache(model, 1, 64, block_size=16)
    options = {"use_mtp": True, "num_assistant_tokens": 5, CACHE: cache, "do_sample": False}
    assert torch.equal(model.generate(token_ids(1, 40, seed), max_length=64, **options), want)


class Streamed(BaseStreamer):
    def __init__(self):
        self.texts, self.ended = [], False

    def put(self, value):
        self.texts.append(value)

    def end(self):
        self.ended = True


@pytest.mark.parametrize("kind", OF_ONE)
def test_a_streamer_gets_the_tokens_of_the_text_and_no_others(kind):
    streamer = Streamed()
    got = without_and_with_drafts(drafting_model(kind), alone)
    ids = got.sequences[:, :40]
    drafting_model(kind).generate(ids, use_mtp=True, streamer=streamer, **GREEDY)
    prompt, *tokens = streamer.texts
    assert torch.equal(prompt, ids) and streamer.ended
    assert torch.equal(torch.cat(tokens)[None], got.sequences[:, 40:])


@pytest.mark.parametrize("kind", representatives(MTP_KINDS))
def test_scores_and_logits_are_those_of_the_text(kind):
    model = drafting_model(kind)
    options = {"output_scores": True, "output_logits": True, "repetition_penalty": 1.3}
    got = without_and_with_drafts(model, alone, **options)
    want = generated(model, {"input_ids": got.sequences[:, :40]}, **options, **DICT)
    for name in ("scores", "logits"):
        assert len(got[name]) == NEW
        torch.testing.assert_close(got[name], want[name], rtol=0, atol=1.5e-4)


@pytest.mark.parametrize("kind", representatives(APART))
def test_a_sequence_goes_on_while_others_catch_up(kind):
    model = drafting_model(kind)
    options = {"use_mtp": True, "num_assistant_tokens": 3, "max_new_tokens": 60, **DICT}
    seed, want = clear_case(
        lambda seed: generated(model, {"input_ids": token_ids(3, 40, seed)}, max_new_tokens=60)
    )
    got = generated(model, {"input_ids": want[:, :40]}, **options)
    assert torch.equal(got.sequences, want)
    alone = [generated(model, {"input_ids": want[i : i + 1, :40]}, **options) for i in range(3)]
    slowest = max(one.drafts.forwards for one in alone)
    # the last tokens of all are together
    assert slowest <= got.drafts.forwards <= slowest + 4
    with models.record_indices(model):  # whose columns are of all sequences
        got = generated(model, {"input_ids": want[:, :40]}, **options)
    assert torch.equal(got.sequences, want) and got.drafts.forwards > slowest + 4


@pytest.mark.parametrize("kind", representatives(MTP_KINDS))
def test_a_recorded_selection_has_the_tokens_of_the_text(kind):
    model = drafting_model(kind)
    seed, want = clear_case(lambda seed: generated(model, alone(seed)))
    records = []
    for options in ({}, {"use_mtp": True, "num_assistant_tokens": 3}):
        with models.record_indices(model, experts=True) as record:
            model.generate(want[:, :40], **GREEDY, **options)
        records.append(record)
    plain, drafted = records
    number = mtp.mtp_layer(text_model(model)).self_attn.layer_idx
    assert drafted.indices.keys() == plain.indices.keys() and number not in drafted.indices
    for layer, indices in plain.indices.items():
        assert torch.equal(drafted.indices[layer].sort(-1)[0], indices.sort(-1)[0])
    for layer, experts in plain.experts.items():
        assert torch.equal(drafted.experts[layer], experts)


# ---- options ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", representatives(MTP_KINDS))
def test_compiled_forwards_draft(kind):
    model = drafting_model(kind)
    seed, want = clear_case(lambda seed: generated(model, alone(seed), max_new_tokens=8))
    compiled = {"compile_config": whole_graph("eager"), "max_new_tokens": 8}
    options = {"use_mtp": True, "num_assistant_tokens": 3, **DICT}
    got = generated(model, alone(seed), **compiled, **options)
    assert torch.equal(got.sequences, want) and got.drafts.accepted[0] > 0
    # without drafts the graph has the layer, which is fed each token
    got = generated(model, alone(seed), **compiled, **DICT)
    assert torch.equal(got.sequences, want)
    cache = models.PagedCache(model, 1, 64, block_size=16)
    model(want[:, :-1], **{CACHE: cache})
    torch.testing.assert_close(
        mtp_rows(model, got[CACHE], 0), mtp_rows(model, cache, 0), rtol=0, atol=1.5e-4
    )


@pytest.mark.parametrize("kind", OF_ONE)
def test_a_config_may_ask_for_drafts(kind):
    model = drafting_model(kind)
    config = GenerationConfig(use_mtp=True, num_assistant_tokens=2, **DICT, **GREEDY)
    got = model.generate(token_ids(1, 40), generation_config=config)
    assert len(got.drafts.drafted) == 2 and config.use_mtp
    model.generation_config.use_mtp = True
    assert model.generate(token_ids(1, 40), **DICT, **GREEDY).drafts.drafted
    assert "drafts" not in model.generate(token_ids(1, 40), use_mtp=False, **DICT, **GREEDY)


REJECTED = {
    "beams": ({"num_beams": 2}, "num_beams must be 1 with use_mtp, got 2"),
    "prompt-lookup": ({"prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens must be None"),
    "early-exit": ({"assistant_early_exit": 1}, "assistant_early_exit must be None"),
    "without-cache": ({"use_cache": False}, "use_cache must be True with use_mtp, got False"),
    "hidden-states": ({"output_hidden_states": True}, "output_hidden_states must be False"),
    "own-loop": ({"custom_generate": print}, "custom_generate must be None with use_mtp, got a"),
    "no-draft": ({"num_assistant_tokens": 0}, "num_assistant_tokens must be at least 1, got 0"),
    "half-a-draft": ({"num_assistant_tokens": 0.5}, "num_assistant_tokens must be an int"),
    "schedule": (
        {"num_assistant_tokens_schedule": "heuristic_transient"},
        "num_assistant_tokens_schedule must be 'constant' or 'heuristic' with use_mtp",
    ),
}


@pytest.mark.parametrize("options, message", REJECTED.values(), ids=REJECTED)
def test_what_drafts_cannot_do_is_rejected_by_name(options, message):
    model = drafting_model()
    calls = model.register_forward_pre_hook(lambda *_: pytest.fail("has begun"))
    with pytest.raises((TypeError, ValueError), match=f"generate: {message}"):
        model.generate(token_ids(1, 20), **GREEDY | {"use_mtp": True} | options)
    calls.remove()


def test_a_model_is_as_it_was_without_the_patch():
    model, ids = drafting_model("glm_moe_dsa"), token_ids(1, 30)
    want = model.generate(ids, **GREEDY)
    twin = copy.deepcopy(model)
    assert torch.equal(twin.generate(ids, use_mtp=True, **GREEDY), want)
    models.use_transformers(model)
    assert "generate" not in vars(model) and torch.equal(model.generate(ids, **GREEDY), want)
    with pytest.raises(ValueError, match="Could not find `num_mtp_layers`"):
        model.generate(ids, use_mtp=True, **GREEDY)
    models.use_custom_pypto(model, block_size=16)
    assert torch.equal(model.generate(ids, use_mtp=True, **GREEDY), want)


# ---- whether it pays ----------------------------------------------------------------------------


def test_drafts_are_turned_off_while_they_lose_and_said_so_once(caplog):
    model = drafting_model(right=False)  # of which nothing is accepted
    options = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "heuristic"}
    got = generated(model, alone(1), use_mtp=True, max_new_tokens=110, **options, **DICT)
    assert got.drafts.drafted[0] == 2 * (1 + ENOUGH) and got.drafts.accepted == [0, 0, 0]
    assert got.drafts.plain > PLAIN + PAUSE
    [said] = [one.getMessage() for one in caplog.records if "drafts" in one.getMessage()]
    assert "turned off" in said


def test_drafts_stay_while_they_pay(monkeypatch):
    model, clock = drafting_model(), iter(range(10**6))
    # a forward takes a unit of time with and without drafts
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    options = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "heuristic"}
    counts = generated(model, alone(1), use_mtp=True, max_new_tokens=80, **options, **DICT).drafts
    assert counts.plain <= PLAIN + 1 and counts.share > 0
