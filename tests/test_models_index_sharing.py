"""Layers that share the selection of an earlier one (IndexCache), in all architectures."""

import re

import pytest
import torch
from model_harness import (
    PADS,
    TOLERANCES,
    WRONG,
    feed,
    left_padded,
    no_grad_and_one_thread,  # noqa: F401
)
from sharing_harness import KINDS, PATTERNS, indexed, patched, sources
from tiny import ALL_KINDS, tiny_model, token_ids
from training_harness import (
    LEARNING,
    assert_near,
    checkpointed,
    gradients,
    packed,
    padded,
    trained,
)
from transformers import CompileConfig

from custom_pypto import models
from custom_pypto.models import CACHE
from custom_pypto.models.latent_attention import LatentAttention

CHUNKS = [40, 1, 17, 1, 3]


def fed(model, seed=1, chunks=CHUNKS, pads=PADS, **options):
    """Logits of real tokens, and the cache."""
    ids, mask, positions = left_padded(pads, sum(chunks), seed)
    cache = models.PagedCache(model, len(pads), 96, block_size=16, **options)
    return feed(model, cache, ids, mask, positions, chunks)[mask.bool()], cache


def pads_of(kind):
    # upstream's layers of linear attention count padding
    return (0, 0) if kind == "glm5_next" else PADS


# ---- what layers attend to ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_without_sharing_every_bit_stays(kind):
    plain = models.use_custom_pypto(tiny_model(kind), block_size=16)
    want, cache = fed(plain, pads=pads_of(kind))
    one = patched(kind, None, index_topk_pattern=None, index_topk_freq=1)
    got, of_one = fed(one, pads=pads_of(kind))
    assert torch.equal(got, want)
    assert of_one.made_for == cache.made_for and of_one.nbytes == cache.nbytes


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_shared_layers_attend_to_the_selection_of_the_last_full_one(kind, monkeypatch):
    """As the model does whose every layer is told, by a replay, to attend to these positions."""
    monkeypatch.setattr(LatentAttention, "slice_tokens", 16)
    shared, pads = patched(kind), pads_of(kind)
    own = sources(shared)
    with models.record_indices(shared) as record:
        got, _ = fed(shared, pads=pads)
    assert sorted(record.indices) == sorted(set(own.values()))
    assert len(record.indices) < len(own)
    plain = models.use_custom_pypto(tiny_model(kind), block_size=16)
    want, _ = fed(plain, pads=pads)
    assert (got - want).abs().max() > WRONG
    everywhere = models.Record({layer: record.indices[own[layer]] for layer in indexed(kind)})
    with models.replay_indices(plain, everywhere):
        told, _ = fed(plain, pads=pads)
    assert torch.equal(got, told)
    # and a replay reaches the layers that share, whatever the indexers would select
    for name, weight in shared.named_parameters():
        if name.endswith(".weights_proj.weight"):
            weight.neg_()
    assert (fed(shared, pads=pads)[0] - got).abs().max() > WRONG
    with models.replay_indices(shared, record):
        assert torch.equal(fed(shared, pads=pads)[0], got)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_prompt_its_chunks_and_single_tokens_agree(kind):
    model, pads = patched(kind), pads_of(kind)
    want, _ = fed(model, pads=pads, chunks=[62])
    for chunks in (CHUNKS, [31] + [1] * 31):
        got, _ = fed(model, pads=pads, chunks=chunks)
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCES[kind])
    prompt = token_ids(2, 30)
    tokens = model.generate(prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    logits = model(tokens[:, :-1]).logits
    assert torch.equal(logits[:, 29:].argmax(-1), tokens[:, 30:])


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_shared_layers_have_no_rows_for_index_keys(kind):
    model, plain = patched(kind), models.use_custom_pypto(tiny_model(kind), block_size=16)
    cache, of_plain = (models.PagedCache(one, 2, 96, block_size=16) for one in (model, plain))
    shares = [i for i, source in sources(model).items() if source != i]
    saved = 0
    for i, (layer, other) in enumerate(zip(cache.layers, of_plain.layers, strict=True)):
        lacking = {"index", "index_state"} & other.pools.keys() if i in shares else set()
        assert layer.pools.keys() == other.pools.keys() - lacking
        saved += sum(other.pools[name].nbytes for name in lacking)
    assert saved and cache.nbytes == of_plain.nbytes - saved


@pytest.mark.parametrize("kind", KINDS)
def test_a_selection_does_not_outlive_its_forward(kind):
    model = patched(kind)
    _, cache = fed(model, pads=pads_of(kind))
    assert cache.store.selection.indices is None


# ---- caches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_saved_caches_continue_and_those_of_other_patterns_are_rejected(kind, tmp_path):
    model, path = patched(kind), tmp_path / "cache"
    ids = token_ids(2, 50)
    cache = models.PagedCache(model, 2, 96, block_size=16)
    model(ids[:, :40], **{CACHE: cache})
    cache.save(path)
    want = model(ids[:, 40:], **{CACHE: cache}).logits
    loaded = models.PagedCache.load(path, model)
    assert torch.equal(model(ids[:, 40:], **{CACHE: loaded}).logits, want)
    models.use_custom_pypto(model, block_size=16)  # without the pattern
    message = f"index_topk_pattern={PATTERNS[kind]}, got one with index_topk_pattern=None"
    with pytest.raises(ValueError, match=message):
        models.PagedCache.load(path, model)
    with pytest.raises(ValueError, match=message):
        model(ids[:, :1], **{CACHE: loaded})


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa", "axk2"])
def test_caches_in_int8_share_alike(kind):
    model = patched(kind, model=tiny_model(kind, kv_lora_rank=128).bfloat16(), index_dtype="int8")
    with models.record_indices(model) as record:
        got, cache = fed(model)
    assert {layer.pools["index"].dtype for layer in cache.layers if "index" in layer.pools} == {
        torch.int8
    }
    own, plain = sources(model), tiny_model(kind, kv_lora_rank=128).bfloat16()
    models.use_custom_pypto(plain, block_size=16, index_dtype="int8")
    indices = {layer: record.indices[own[layer]] for layer in indexed(kind)}
    with models.replay_indices(plain, models.Record(indices)):
        told, _ = fed(plain)
    assert torch.equal(got, told)


# ---- compiled -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",  # one of them by default: each compiles a whole graph
    [pytest.param(x, marks=[] if x == "glm_moe_dsa" else pytest.mark.slow) for x in ALL_KINDS],
)
def test_compiled_layers_and_whole_graphs_share_alike(kind):
    model = patched(kind)
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    want = model.generate(token_ids(2, 30), **options)
    config = CompileConfig(backend="aot_eager", mode=None, fullgraph=True)
    assert torch.equal(model.generate(token_ids(2, 30), compile_config=config, **options), want)
    if kind in ("glm5_next", "hy_v4_vl"):
        return  # their forwards branch by the values of tensors, in upstream code
    caches = [models.PagedCache(model, 2, 48, block_size=16) for _ in range(2)]
    step = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    for forward, cache in zip((model, step), caches, strict=True):
        model(token_ids(2, 30), **{CACHE: cache})
        logits = [forward(token_ids(2, 1, i), **{CACHE: cache}).logits for i in range(3)]
        want = torch.cat(logits) if forward is model else want
    torch.testing.assert_close(torch.cat(logits), want, rtol=0, atol=TOLERANCES[kind])


def test_layers_that_share_with_different_ones_are_one_graph():
    """Of seven: a dense layer that lends, layers that share, two more that lend, one that does not;
    all but the first have experts."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = patched("deepseek_v32", "FSFSFSF", tiny_model(num_hidden_layers=7))
    config = CompileConfig(backend=backend, mode=None, fullgraph=True)
    model.generate(token_ids(2, 30), max_new_tokens=4, do_sample=False, compile_config=config)
    assert len(graphs) == 4


# ---- training -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL_KINDS)
@torch.enable_grad()
def test_training_shares_on_either_path_and_in_repeated_layers(kind):
    """Activation checkpointing calls layers again, after later ones have selected."""
    batch, found = padded(right=(7, 0)), {}
    for path in ("ops", "upstream"):
        for again in (False, True):
            model = patched(kind, model=tiny_model(kind).train(), training=path)
            if again:
                checkpointed(model)
            found[path, again] = trained(model, batch)
    loss, grads = found["ops", False]
    for other, others in found.values():
        torch.testing.assert_close(other, loss, rtol=0, atol=TOLERANCES[kind])
        assert_near(others, grads, kind)
    plain = models.use_custom_pypto(tiny_model(kind).train(), training="ops")
    assert (trained(plain, batch)[0] - loss).abs() > 1e-4


@pytest.mark.parametrize("kind", LEARNING)
@torch.enable_grad()
def test_the_loss_of_the_indexers_is_of_those_that_select(kind):
    model = patched(kind, model=tiny_model(kind).train(), indexer_loss="sparse")
    full = {i for i, source in sources(model).items() if source == i}
    _, grads = trained(model, padded(right=(7, 0)))
    learned = {name for name in grads if ".indexer." in name}
    assert {int(re.search(r"layers[.](\d+)[.]", name)[1]) for name in learned} == full
    dense = patched(kind, model=tiny_model(kind).train(), indexer_loss="dense")
    whole = models.use_custom_pypto(tiny_model(kind).train(), indexer_loss="dense")
    # warming up, all layers attend to all positions
    batch = padded(right=(7, 0))
    torch.testing.assert_close(dense(**batch).logits, whole(**batch).logits, rtol=0, atol=0)


# of the others upstream counts groups, states or axes across packed sequences
PACKED = ["deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "dots3_note", "mistral_large4"]


@pytest.mark.parametrize("kind", [kind for kind in PACKED if kind in ALL_KINDS])
def test_packed_rows_in_evaluation_take_upstreams_path_and_share(kind):
    model, batch = patched(kind), packed()
    got = model(**batch, use_cache=False).logits
    first = slice(0, 13)  # a sequence of the row
    alone = model(batch["input_ids"][:1, first]).logits
    torch.testing.assert_close(got[:1, first], alone, rtol=0, atol=TOLERANCES[kind])


@torch.enable_grad()
def test_a_replay_on_upstreams_path_reaches_the_layers_that_share():
    model, batch = patched("deepseek_v32", model=tiny_model().train(), training="ops"), padded()
    with models.record_indices(model) as record:
        want = trained(model, batch)
    patched("deepseek_v32", model=model, training="upstream")
    for layer in model.model.layers:
        layer.self_attn.indexer.weights_proj.weight.data.neg_()
    with models.replay_indices(model, record):
        got = trained(model, batch)
    torch.testing.assert_close(got[0], want[0], rtol=0, atol=TOLERANCES["deepseek_v32"])
    assert_near(got[1], want[1])


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
@torch.enable_grad()
def test_transforms_of_torch_func_share_alike(kind):
    """They take upstream's path."""
    model, ids = patched(kind), token_ids(1, 30)
    weights = dict(model.named_parameters())

    def loss(weights):
        call = torch.func.functional_call
        return call(model, weights, (ids,), {"use_cache": False}).logits.square().mean()

    want = gradients(model, model(ids, use_cache=False).logits.square().mean())
    found = torch.func.grad(loss)(weights)
    assert_near({name: found[name].detach() for name in want}, want)
