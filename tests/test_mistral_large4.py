"""Mistral Large 4 on the ops: upstream's results, of layers with and without RoPE, and of layers
that attend to the latents of an earlier one."""

import copy

import pytest
import torch
from model_harness import (
    PADS,
    WRONG,
    after_a_change,
    both,
    furthest,
    left_padded,
    no_grad_and_one_thread,  # noqa: F401
    prompt,
    trace,
)
from tiny import clear_case, tiny_mistral, token_ids

from custom_pypto import models

TOLERANCE = 5e-5


def upstream_and_patched(**changes):
    return tiny_mistral(**changes), models.use_custom_pypto(tiny_mistral(**changes), block_size=16)


def attentions(model):
    return [layer.self_attn for layer in model.model.language_model.layers]


@pytest.mark.parametrize("pads", [[0], PADS], ids=["batch-1", "left-padded"])
@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param([60], id="prefill"),
        pytest.param([47, 1, 1, 1, 1, 1], id="decode"),
        pytest.param([40, 3, 3, 1, 3], id="several-tokens-a-step"),
        pytest.param([17, 17, 17], id="chunked-prefill"),
    ],
)
def test_logits_equal_upstream_transformers(chunks, pads):
    want, got = both(*upstream_and_patched(), pads, chunks)
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(dict(no_rope_layers=[0] * 4), id="no-rope"),
        pytest.param(dict(no_rope_layers=[1] * 4), id="rope-everywhere"),
        pytest.param(dict(kv_source_layers=[0, 0, 2, 2], no_rope_layers=[1, 1, 0, 0]), id="pairs"),
        pytest.param(dict(kv_source_layers=[0, 1, 2, 3]), id="own-latents"),
        pytest.param(dict(indexer_types=["full"] * 4), id="an-indexer-in-every-layer"),
    ],
)
def test_logits_equal_upstream_transformers_of_other_layers(changes):
    assert furthest(*upstream_and_patched(**changes)) <= TOLERANCE


def test_positions_count_from_the_first_real_token_if_none_are_given():
    upstream, patched = upstream_and_patched()
    ids, mask, positions = left_padded(PADS, 40)
    want = upstream(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    got = patched(input_ids=ids, attention_mask=mask, use_cache=True).logits
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=0, atol=TOLERANCE)
    assert got.isfinite().all()  # of padding, too, although its position has no logarithm


def no_query_scaling(monkeypatch, model):
    for attention in attentions(model):
        attention.softmax_scaling.scale.zero_()


def no_index_query_scaling(monkeypatch, model):
    for attention in attentions(model):
        if attention.indexer is not None:
            attention.indexer.softmax_scaling.scale.copy_(torch.linspace(-3, 3, 32))


def no_index_norm(monkeypatch, model):
    for attention in attentions(model):
        if attention.indexer is not None:
            attention.indexer.q_input_norm.weight.copy_(torch.linspace(-1, 1, 96))


def own_latents_only(monkeypatch, model):
    monkeypatch.setattr(attentions(model)[3].config, "kv_source_layers", [0, 1, 2, 1])


def index_rotated_without_rope(monkeypatch, model):
    monkeypatch.setattr(attentions(model)[2], "use_rope", 1)


@pytest.mark.parametrize(
    "trap",
    [
        no_query_scaling,
        no_index_query_scaling,
        no_index_norm,
        own_latents_only,
        index_rotated_without_rope,
    ],
)
def test_the_logits_show(trap, monkeypatch):
    upstream, patched = upstream_and_patched()
    trap(monkeypatch, patched)
    assert not furthest(upstream, patched) <= WRONG  # nan counts


def test_rows_are_kept_where_a_layer_has_them():
    _, patched = upstream_and_patched()
    layers = models.PagedCache(patched, 1, 32, block_size=16).layers
    assert [layer.rope is not None for layer in layers] == [True, True, False, True]
    assert [layer.index is not None for layer in layers] == [True, False, True, True]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="greedy"),
        pytest.param({"num_beams": 3}, id="beams"),
        pytest.param({"do_sample": True, "num_return_sequences": 2}, id="sampling-returned"),
    ],
)
def test_generate_equals_upstream_transformers(options):
    options = {"do_sample": False, "max_new_tokens": 8} | options

    def generate(model, seed):
        torch.manual_seed(5)
        return model.generate(**prompt(seed, [0, 7]), **options)

    upstream, patched = upstream_and_patched()
    seed, want = clear_case(lambda seed: generate(upstream, seed))
    assert torch.equal(generate(patched, seed), want)


@pytest.mark.parametrize(
    "change, rows",
    [
        pytest.param(lambda c: c.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0], id="reorder"),
        pytest.param(lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2], id="repeat"),
        pytest.param(lambda c: c.crop(-13), [0, 1, 2], id="crop"),
        pytest.param(lambda c: c.reserve(200), [0, 1, 2], id="reserve"),
        pytest.param(copy.deepcopy, [0, 1, 2], id="deepcopy"),
    ],
)
def test_a_changed_cache_continues_as_if_its_tokens_had_been_fed(change, rows):
    upstream, patched = upstream_and_patched()
    want, got = after_a_change(upstream, patched, change, rows)
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


def test_a_decode_step_is_one_graph_and_equals_eager():
    _, patched = upstream_and_patched()
    ids, caches = token_ids(2, 40), []
    for _ in range(2):
        caches.append(models.PagedCache(patched, 2, 64, block_size=16))
        patched(input_ids=ids, past_key_values=caches[-1])
    compiled = torch.compile(patched, fullgraph=True, backend="eager")
    want = patched(input_ids=ids[:, :1], past_key_values=caches[0]).logits
    assert torch.equal(compiled(input_ids=ids[:, :1], past_key_values=caches[1]).logits, want)


def test_use_transformers_undoes_the_patch_to_the_bit():
    model, ids = tiny_mistral(), token_ids(2, 40)
    want = trace(model), model(input_ids=ids).logits
    models.use_custom_pypto(model)
    model(input_ids=ids)
    assert trace(model) != want[0]
    models.use_transformers(model)
    assert trace(model) == want[0]
    assert torch.equal(model(input_ids=ids).logits, want[1])


def test_additions_that_the_ops_would_bypass_are_rejected():
    _, patched = upstream_and_patched()
    attentions(patched)[0].indexer.register_forward_hook(lambda *args: None)
    message = "indexer of layer 0 must be a plain MistralLarge4TextIndexer"
    with pytest.raises(TypeError, match=message):
        patched(input_ids=token_ids(1, 4))
