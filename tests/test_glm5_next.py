"""GLM-5.3-Flash on the ops: upstream's results, groups of tokens selected as upstream selects them,
and upstream's linear attention beside the paged layers."""

import copy

import pytest
import torch
from model_harness import (
    PADS,
    WRONG,
    after_a_change,
    alone,
    feed,
    left_padded,
    no_grad_and_one_thread,  # noqa: F401
    paged_cache,
    trace,
)
from tiny import clear_case, tiny_glm5, token_ids

from custom_pypto import models
from custom_pypto.models import compression, glm5_next
from custom_pypto.models.latent_attention import LatentAttention

TOLERANCE = 1e-4


def upstream_and_patched(**changes):
    return tiny_glm5(**changes), models.use_custom_pypto(tiny_glm5(**changes), block_size=16)


def both(upstream, patched, pads, chunks):
    tokens = sum(chunks)
    seed, want = clear_case(lambda seed: alone(upstream, left_padded(pads, tokens, seed)[0], pads))
    ids, mask, positions = left_padded(pads, tokens, seed)
    got = feed(patched, paged_cache(patched, len(pads)), ids, mask, positions, chunks)
    return want, got[mask.bool()]


def furthest(upstream, patched):
    want, got = both(upstream, patched, [0, 9], [46, 1, 5])
    return (got - want).abs().max()


@pytest.mark.parametrize("pads", [[0], PADS], ids=["batch-1", "left-padded"])
@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param([60], id="prefill"),
        pytest.param([47, 1, 1, 1, 1, 1], id="decode"),
        pytest.param([40, 3, 3, 1, 3, 5], id="several-tokens-a-step"),
        pytest.param([23, 17, 17], id="chunked-prefill"),
    ],
)
def test_logits_equal_upstream_transformers(chunks, pads):
    want, got = both(*upstream_and_patched(), pads, chunks)
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(dict(index_topk=4), id="one-group"),
        pytest.param(dict(index_topk=64), id="every-group"),
        pytest.param(dict(index_kpool=16, index_topk=32), id="groups-of-16"),
        pytest.param(dict(index_kpool_always_select_tail=False), id="without-the-tail"),
        pytest.param(dict(indexer_types=["full"] * 6), id="an-indexer-beside-an-indexer"),
    ],
)
def test_logits_equal_upstream_transformers_of_other_groups(changes):
    assert furthest(*upstream_and_patched(**changes)) <= TOLERANCE


def no_tail(monkeypatch, model):
    for layer in model.model.language_model.layers:
        if getattr(layer.self_attn, "indexer", None) is not None:
            layer.self_attn.indexer.index_kpool_always_select_tail = False


def no_position_bias(monkeypatch, model):
    for name, parameter in model.named_parameters():
        if "compress_ape" in name:
            parameter.zero_()


def neighbouring_groups(monkeypatch, model):
    select = LatentAttention.select
    wrong = lambda self, *args: select(self, *args) - 1  # noqa: E731
    monkeypatch.setattr(LatentAttention, "select", wrong)


def one_space_too_small(monkeypatch, model):
    completed = compression.completed

    def wrong(*args):
        sums, groups, whole = completed(*args)
        return sums, groups + 1, whole

    monkeypatch.setattr(compression, "completed", wrong)


@pytest.mark.parametrize(
    "trap", [no_tail, no_position_bias, neighbouring_groups, one_space_too_small]
)
def test_the_logits_show(trap, monkeypatch):
    upstream, patched = upstream_and_patched()
    trap(monkeypatch, patched)
    assert not furthest(upstream, patched) <= WRONG  # nan counts


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="greedy"),
        pytest.param({"use_cache": False}, id="without-cache"),
        pytest.param({"num_beams": 3}, id="beams"),
        pytest.param({"do_sample": True, "num_return_sequences": 2}, id="sampling-returned"),
    ],
)
def test_generate_equals_upstream_transformers(options):
    options = {"do_sample": False, "max_new_tokens": 8} | options

    def generate(model, seed):
        torch.manual_seed(5)
        return model.generate(token_ids(2, 40, seed), **options)

    upstream, patched = upstream_and_patched()
    seed, want = clear_case(lambda seed: generate(upstream, seed))
    assert torch.equal(generate(patched, seed), want)


@pytest.mark.parametrize(
    "change, rows",
    [
        pytest.param(lambda c: c.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0], id="reorder"),
        pytest.param(lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2], id="repeat"),
        pytest.param(lambda c: c.batch_select_indices(torch.tensor([2, 0])), [2, 0], id="select"),
        pytest.param(lambda c: c.crop(0), [0, 1, 2], id="crop-nothing"),
        pytest.param(lambda c: c.crop(-50), [0, 1, 2], id="crop-all"),
        pytest.param(lambda c: c.reset(), [0, 1, 2], id="reset"),
        pytest.param(lambda c: c.reserve(200), [0, 1, 2], id="reserve"),
        pytest.param(copy.deepcopy, [0, 1, 2], id="deepcopy"),
    ],
)
def test_a_changed_cache_continues_as_if_its_tokens_had_been_fed(change, rows):
    upstream, patched = upstream_and_patched()
    want, got = after_a_change(upstream, patched, change, rows)
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


def test_a_cache_may_be_shorter_than_a_group():
    upstream, patched = upstream_and_patched(index_kpool=32, index_topk=32)
    ids = token_ids(1, 12)
    got = patched(input_ids=ids, past_key_values=paged_cache(patched, 1, 16)).logits
    want = upstream(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


def test_a_recurrent_state_cannot_be_taken_back():
    _, patched = upstream_and_patched()
    cache = paged_cache(patched, 1)
    patched(input_ids=token_ids(1, 50), past_key_values=cache)
    with pytest.raises(ValueError, match="must be at least 0 .*or at most -50 .*got -1"):
        cache.crop(-1)


def test_use_transformers_undoes_the_patch_to_the_bit():
    model, ids = tiny_glm5(), token_ids(2, 40)
    want = trace(model), model(input_ids=ids).logits
    models.use_custom_pypto(model)
    model(input_ids=ids)
    assert trace(model) != want[0]
    models.use_transformers(model)
    assert trace(model) == want[0]
    assert torch.equal(model(input_ids=ids).logits, want[1])


def test_additions_that_the_ops_would_bypass_are_rejected():
    _, patched = upstream_and_patched()
    indexer = patched.model.language_model.layers[1].self_attn.indexer
    indexer.register_forward_hook(lambda *args: None)
    message = f"indexer of layer 1 must be a plain {glm5_next.Glm5NextTextIndexer.__name__}"
    with pytest.raises(TypeError, match=message):
        patched(input_ids=token_ids(1, 4))
