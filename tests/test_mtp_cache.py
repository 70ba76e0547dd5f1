"""The rows of the MTP layer in a cache, and what rejected drafts, interruptions and beams leave in
it."""

import pytest
import torch
from model_harness import TOLERANCES, interrupted, no_grad_and_one_thread  # noqa: F401
from mtp_harness import (
    APART,
    DICT,
    GREEDY,
    MTP_KINDS,
    NEW,
    PADS,
    alone,
    drafting_model,
    generated,
    mtp_rows,
    padded,
)
from tiny import clear_case, representatives, token_ids

from custom_pypto import models
from custom_pypto.models import CACHE
from custom_pypto.models.architectures import ARCHITECTURES, attention_class
from custom_pypto.models.mtp import layer as mtp
from custom_pypto.models.patched import text_model

IN_INT8 = [it.folder for name, it in ARCHITECTURES.items() if it.mtp and attention_class(name).int8]


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 7}], ids=["whole", "chunks"])
@pytest.mark.parametrize("kind", MTP_KINDS)
def test_rows_are_those_of_a_forward_over_the_text(kind, options):
    # neither the layer's own hidden states nor rejected drafts stay in them
    model = drafting_model(kind)
    got = generated(model, padded(), use_mtp=True, num_assistant_tokens=3, **options, **DICT)
    assert 0 < got.drafts.share < 1
    cache = models.PagedCache(model, len(PADS), 64, block_size=16)
    mask = torch.cat(
        [padded()["attention_mask"], torch.ones(len(PADS), NEW - 1, dtype=torch.int64)], 1
    )
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # as generate() counts
    ids = got.sequences[:, :-1]
    model(ids, attention_mask=mask, position_ids=positions, **{CACHE: cache})
    assert torch.equal(cache.lengths, got[CACHE].lengths)
    torch.testing.assert_close(
        cache.sequences.hidden, got[CACHE].sequences.hidden, rtol=0, atol=1.5e-4
    )
    assert all(x < 1.5e-4 for x in distances_of_rows(model, got[CACHE], cache))


def distances_of_rows(model, cache, other):
    """Of the rows that the MTP layer has in two caches, the largest for each sequence and pool."""
    for sequence in range(cache.batch_size):
        rows, want = (mtp_rows(model, one, sequence) for one in (cache, other))
        assert len(want["latent" if "latent" in want else "kv"]) == cache.lengths[sequence] - 1
        yield from ((rows[name] - want[name]).abs().max().item() for name in want)


def test_states_after_a_rejected_draft_are_to_the_bit_those_without_it():
    model = drafting_model("glm5_next")
    text, linear = text_model(model), model.model.language_model.layers[0].self_attn
    hidden = torch.randn(2, 5, text.config.hidden_size)
    found = []
    for seen in (5, 3, 2):  # of which two stay
        cache = models.PagedCache(model, 2, 48, block_size=16)
        model(token_ids(2, 20), **{CACHE: cache})
        with mtp.Drafting(model, text, cache):
            linear(hidden[:, :seen], **{CACHE: cache})
            layer = cache.store.layers[0]
            assert len(layer.kept) == seen
            layer.take_back(seen - 2)
        found.append([state.clone() for state in layer.states()])
        assert layer.kept is None and len(layer.states()) == 2
    for states in found[:2]:
        assert all(torch.equal(x, want) for x, want in zip(states, found[2], strict=True))


def test_tokens_go_on_after_a_rejected_draft_as_without_it():
    # a whole forward rounds otherwise for another number of tokens
    model, ids = drafting_model("glm5_next"), token_ids(1, 40)
    for draft in (5, 6):
        cache = models.PagedCache(model, 1, 48, block_size=16)
        model(ids[:, :30], **{CACHE: cache})
        with mtp.Drafting(model, text_model(model), cache) as drafting:
            drafts = torch.cat([ids[:, 30:32], torch.full((1, 2), draft)], 1)
            model(drafts, **{CACHE: cache})
            drafting.keep([drafting.hidden.size(1) - 2])
        got = model(ids[:, 32:], **{CACHE: cache}).logits
        assert cache.lengths.tolist() == [40]
        want = model(ids).logits[:, 32:]
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCES["glm5_next"])
        with pytest.raises(ValueError, match="tokens_to_remove must be at least 0"):
            cache.crop(-1)  # no state is kept any more


def one_off(monkeypatch):
    step_of = mtp.step_of

    def off(cache, tokens):
        places = tokens.start - 1, tokens.lengths - 1, tokens.positions - 1
        names = ("start", "lengths", "positions")
        off = cache.drafting is not None
        return step_of(
            cache, tokens._replace(**dict(zip(names, places, strict=True))) if off else tokens
        )

    monkeypatch.setattr(mtp, "step_of", off)


def own_states_kept(monkeypatch):
    def keep(self, *args):
        plain(self, *args)
        self.unfed = [1] * len(self.unfed)  # rows of accepted drafts stay as they were drafted

    plain = mtp.Drafting.keep
    monkeypatch.setattr(mtp.Drafting, "keep", keep)


@pytest.mark.parametrize("pitfall", [one_off, own_states_kept])
def test_rows_show_a_pitfall_that_leaves_the_text_as_it_is(pitfall, monkeypatch):
    model, ids = drafting_model(), token_ids(1, 40)
    want = generated(model, {"input_ids": ids})
    pitfall(monkeypatch)
    got = generated(model, {"input_ids": ids}, use_mtp=True, num_assistant_tokens=3, **DICT)
    assert torch.equal(got.sequences, want)
    cache = models.PagedCache(model, 1, 64, block_size=16)
    model(want[:, :-1], **{CACHE: cache})
    # NaN: rows that nobody wrote
    assert not all(x <= 0.1 for x in distances_of_rows(model, got[CACHE], cache))


@pytest.mark.parametrize("kind", representatives(MTP_KINDS))
def test_a_second_turn_drafts_with_what_the_first_left(kind, tmp_path):
    model = drafting_model(kind)
    options = {"use_mtp": True, "num_assistant_tokens": 3, **DICT}

    def two_turns(seed, **options):
        ids, cache = token_ids(2, 30, seed), models.PagedCache(model, 2, 128, block_size=16)
        first = model.generate(ids, **real(ids), **{CACHE: cache}, **GREEDY, **options)
        first = first.sequences if options else first
        if options:  # saved and loaded in between
            cache.save(tmp_path / "cache")
            cache = models.PagedCache.load(tmp_path / "cache", model)
        ids = torch.cat([first, token_ids(2, 10, seed + 100)], 1)
        second = model.generate(ids, **real(ids), **{CACHE: cache}, **GREEDY, **options)
        return second, ids

    def real(ids):  # a text may have the token that pads
        return {"attention_mask": torch.ones_like(ids)}

    seed, (want, _) = clear_case(two_turns)
    got, ids = two_turns(seed, **options)
    assert torch.equal(got.sequences, want)
    fresh = model.generate(ids, **real(ids), **GREEDY, **options)
    assert got.drafts == fresh.drafts and 0 < got.drafts.share < 1


@pytest.mark.parametrize("kind", representatives(IN_INT8))
def test_caches_in_int8_draft(kind):
    model = drafting_model(kind, kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128)
    model = models.use_custom_pypto(model.bfloat16(), index_dtype="int8", kv_dtype="int8")
    options = {"use_mtp": True, "num_assistant_tokens": 3, **DICT}
    got = generated(model, alone(1), **options)
    assert got.sequences.size(1) == 40 + NEW and got.drafts.accepted[0] > 0
    assert set(got[CACHE].store.layers[3].pools) == set(got[CACHE].store.layers[2].pools)


@pytest.mark.parametrize("kind", representatives(MTP_KINDS))
def test_an_interrupted_call_leaves_a_usable_cache(kind):
    model = drafting_model(kind)
    layer = mtp.mtp_layer(text_model(model))
    seed, want = clear_case(lambda seed: generated(model, alone(seed)))
    ids = want[:, :40]
    # in a draft, in a verified forward before it counts, and between both
    for module, calls in ((layer.mlp, 5), (text_model(model).layers[1], 4), (model.lm_head, 5)):
        cache = models.PagedCache(model, 1, 80, block_size=16)
        with interrupted(module, after=calls):
            generated(
                model, {"input_ids": ids}, use_mtp=True, num_assistant_tokens=3, **{CACHE: cache}
            )
        assert cache.drafting is None
        if cache.store.recurrent:  # which forget no token
            cache.reset()
        else:
            cache.crop(39 - int(cache.get_seq_length()))  # as PagedCache says
        got = generated(model, {"input_ids": ids}, use_mtp=True, **{CACHE: cache})
        assert torch.equal(got, want)


@pytest.mark.parametrize("kind", representatives(APART))
def test_an_interrupted_batch_ends_with_the_same_columns_of_each_sequence(kind):
    model = drafting_model(kind)
    seed, want = clear_case(lambda seed: generated(model, {"input_ids": token_ids(3, 40, seed)}))
    ids = want[:, :40]
    for calls in range(3, 9):
        cache = models.PagedCache(model, 3, 80, block_size=16)
        with interrupted(text_model(model).layers[1], after=calls):
            generated(
                model, {"input_ids": ids}, use_mtp=True, num_assistant_tokens=3, **{CACHE: cache}
            )
        columns = int(cache.get_seq_length())
        assert cache.lengths.tolist() == [columns] * 3
        model(want[:, columns:-1], **{CACHE: cache})
        fresh = models.PagedCache(model, 3, 80, block_size=16)
        model(want[:, :-1], **{CACHE: fresh})
        logits = [model(want[:, -1:], **{CACHE: one}).logits for one in (cache, fresh)]
        torch.testing.assert_close(*logits, rtol=0, atol=TOLERANCES[kind])


@pytest.mark.parametrize("kind", representatives(MTP_KINDS))
def test_copies_and_beams_of_a_cache_have_rows_of_their_own(kind):
    model, ids = drafting_model(kind), token_ids(2, 20)
    cache = models.PagedCache(model, 2, 32, block_size=16)
    model(ids, **{CACHE: cache})
    hidden = cache.sequences.hidden.clone()
    cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(cache.sequences.hidden, hidden.flip(0))
    cache.batch_select_indices(torch.tensor([0]))
    assert torch.equal(cache.sequences.hidden, hidden[1:])
    if cache.store.recurrent:  # which forget no token
        return
    cache.crop(-1)
    assert not cache.sequences.hidden.any()
