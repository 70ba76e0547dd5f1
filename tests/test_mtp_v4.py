"""The MTP layer of DeepSeek-V4: its definition, and what a rejected draft leaves in the caches of
windows, compressed rows and compressors, namely nothing."""

import pytest
import torch
from model_harness import TOLERANCES, no_grad_and_one_thread  # noqa: F401
from mtp_harness import drafting_model, surroundings, upstream_drafting
from published import V4, weights_on_disk
from tiny import clear_case, token_ids

from custom_pypto import models
from custom_pypto.models import CACHE
from custom_pypto.models.mtp import layer as mtp

WINDOW, RATIO, HEAVY_RATIO = 16, 4, 16  # of the tiny model


def rms(x, weight=None, eps=1e-6):
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x if weight is None else x * weight


def defined(model, ids):
    """The states ``[B, S - 1, M, H]`` and the logits of all tokens but the first, by the names of a
    published checkpoint: around transformers' decoder layer, with a window alone."""
    text, layer, streams = model.model, mtp.mtp_layer(model.model), []
    weights = {
        name.removeprefix("mtp.0."): x
        for name, x in weights_on_disk(model).items()
        if name.startswith("mtp.0.")
    }
    hook = text.hc_head.register_forward_pre_hook(lambda _, args: streams.append(args[0]))
    text(ids, use_cache=False)
    hook.remove()
    token = rms(text.embed_tokens(ids[:, 1:]), weights["enorm.weight"]) @ weights["e_proj.weight"].T
    before = rms(streams[0][:, :-1], weights["hnorm.weight"]) @ weights["h_proj.weight"].T
    positions = torch.arange(1, ids.size(1))[None]
    others = surroundings(text, layer, V4, token, positions)
    states = layer(token[:, :, None] + before, position_ids=positions, **others, **{CACHE: None})
    mixes = rms(states.flatten(2)) @ weights["hc_head_fn"].T
    mixes = torch.sigmoid(mixes * weights["hc_head_scale"] + weights["hc_head_base"]) + 1e-6
    joined = (mixes[..., None] * states).sum(2)
    return states, rms(joined, weights["norm.weight"]) @ model.lm_head.weight.T


def test_states_and_drafts_are_those_of_the_definition(monkeypatch):
    model = upstream_drafting(V4, right=False)
    ids = token_ids(2, 40)
    states, logits = defined(model, ids)
    got, plain = [], mtp.run
    monkeypatch.setattr(mtp, "run", lambda *args: got.append(plain(*args)) or got[-1])
    models.use_custom_pypto(model, block_size=16)
    for chunks in ([40], [17, 1, 22]):
        got.clear()
        cache = models.PagedCache(model, 2, 48, block_size=16)
        for part in ids.split(chunks, 1):
            model(part, **{CACHE: cache})
        both = torch.cat(got, 1)[:, 1:]  # the first token has no row
        torch.testing.assert_close(both, states, rtol=0, atol=TOLERANCES[V4])
    hidden = mtp.parts_of(mtp.mtp_layer(model.model)).hidden(mtp.mtp_layer(model.model), both)
    torch.testing.assert_close(model.lm_head(hidden), logits, rtol=0, atol=TOLERANCES[V4])


def seen_rows(cache):
    """What the next tokens can see of each pool, by layer and sequence: the window before them,
    complete rows, and the tokens of the groups that are not complete."""
    for number, layer in enumerate(cache.store.layers):
        lengths = cache.lengths - int(number == cache.made_for["num_hidden_layers"])
        for name, pool in layer.pools.items():
            layout = layer.layouts[name]
            for sequence, length in enumerate(lengths.tolist()):
                ring, rows = layout.ring, length // layout.ratio if layout.ratio else 0
                last = {"kv": WINDOW - 1, "state": HEAVY_RATIO - 1, "index": 0}
                last = last.get(name, 2 * RATIO - 1)  # windows of 4 tokens overlap
                seen = torch.arange(max(0, length - last), length) % max(ring, 1)
                seen = torch.cat([seen, ring + torch.arange(rows)])
                table = layer.tables[layout][sequence].long()
                yield pool[table].flatten(0, 1)[seen]


def assert_equal_to_the_bit(cache, other):
    assert torch.equal(cache.lengths, other.lengths) and cache.seen == other.seen
    rows, wanted = list(seen_rows(cache)), list(seen_rows(other))
    assert len(rows) == len(wanted) > 20
    assert all(torch.equal(*both) for both in zip(rows, wanted, strict=True))


@pytest.mark.parametrize("drafts", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 16))])
def test_rejected_drafts_leave_a_cache_as_if_it_had_never_seen_them(drafts):
    # a batch-invariant model: the rows of a token have the same bits however many come with it
    model = models.use_custom_pypto(drafting_model(V4), block_size=16, batch_invariant=True)
    ids, wrong = token_ids(2, 90), token_ids(2, drafts, seed=7)
    cache, never = (models.PagedCache(model, 2, 128, block_size=16) for _ in range(2))
    for one in (cache, never):
        model(ids[:, :33], **{CACHE: one})
    with mtp.Drafting(model, model.model, cache) as drafting:
        for at in range(33, 80):  # windows, groups of 4 and of 16 end at every place of a step
            drafting.draft(list(ids[:, : at + 1]), torch.arange(at + 1)[None], drafts)
            model(torch.cat([ids[:, at : at + 1], wrong], 1), **{CACHE: cache})
            drafting.keep([drafts, drafts])
            model(ids[:, at : at + 1], **{CACHE: never})
            assert_equal_to_the_bit(cache, never)
            assert torch.equal(cache.sequences.hidden, never.sequences.hidden)
    got, want = (model(ids[:, 80:], **{CACHE: one}).logits for one in (cache, never))
    assert torch.equal(got, want)


def test_a_row_of_a_rejected_draft_would_be_seen():
    # the comparison above can fail: a crop that forgets a token too few
    model = models.use_custom_pypto(drafting_model(V4), block_size=16, batch_invariant=True)
    ids = token_ids(1, 60)
    for length in range(40, 56):
        caches = [models.PagedCache(model, 1, 64, block_size=16) for _ in range(2)]
        for one, last in zip(caches, (ids[:, length : length + 1], ids[:, :1]), strict=True):
            model(torch.cat([ids[:, :length], last], 1), **{CACHE: one})
        with pytest.raises(AssertionError):
            assert_equal_to_the_bit(*caches)


def test_a_step_has_as_many_drafts_as_the_rings_can_forget():
    model, ids = drafting_model(V4), token_ids(1, 40)
    options = {"use_mtp": True, "max_new_tokens": 20, "do_sample": False}
    with pytest.raises(ValueError, match="num_assistant_tokens must be at most 16 .*rings.*got 17"):
        model.generate(ids, num_assistant_tokens=17, **options)
    seed, want = clear_case(
        lambda seed: model.generate(token_ids(1, 40, seed), max_new_tokens=20, do_sample=False)
    )
    got = model.generate(token_ids(1, 40, seed), num_assistant_tokens=16, **options)
    assert torch.equal(got, want)
