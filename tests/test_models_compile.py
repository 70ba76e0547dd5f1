"""The decode step of a patched model is one graph, whatever the position."""

import pytest
import torch
from tiny import KINDS, clear_case, tiny_model, token_ids
from torch._dynamo.backends.registry import lookup_backend
from transformers import CompileConfig

from custom_pypto import models
from custom_pypto.models.latent_attention import LatentAttention


@pytest.fixture(autouse=True)
def no_grad_and_one_thread():
    torch.set_num_threads(1)  # tensors this small only wait for a second one
    with torch.no_grad():
        yield


def tiny_patched(kind="deepseek_v32"):
    return models.use_custom_pypto(two_layers(kind), block_size=16)


def two_layers(kind="deepseek_v32"):
    return tiny_model(kind, num_hidden_layers=2)


class CountingBackend:
    """Keeps the graphs it is given. aot_eager functionalises the in-place cache writes as well."""

    def __init__(self, backend="aot_eager"):
        self.graphs, self.compile = [], lookup_backend(backend)

    def __call__(self, graph, inputs):
        if len(graph.graph.nodes):  # with dynamic=True dynamo hands over an empty one first
            self.graphs.append(graph)
        return self.compile(graph, inputs)

    def __deepcopy__(self, memo):  # generate() copies its options
        return self

    def ops(self):
        targets = [str(node.target) for graph in self.graphs for node in graph.graph.nodes]
        return {
            name: sum(name in target for target in targets)
            for name in ("npu_lightning_indexer_pto", "npu_sparse_flash_attention_pto")
        }


def decode(forward, model, cache, ids, start, sizes):
    logits = []
    for size in sizes:
        positions = torch.arange(start, start + size).expand(len(ids), -1)
        logits.append(
            forward(
                # a copy, as generate() makes: the offset of a view is part of a graph's guards
                ids[:, start : start + size].clone(),
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            ).logits
        )
        start += size
    return torch.cat(logits, 1)


@pytest.mark.parametrize(
    "kind, dynamic, backend",
    [
        *(pytest.param(kind, False, "aot_eager", id=f"{kind}-static") for kind in KINDS),
        pytest.param(KINDS[0], True, "eager", id=f"{KINDS[0]}-dynamic"),
        *(
            pytest.param(kind, True, "eager", id=f"{kind}-dynamic", marks=pytest.mark.slow)
            for kind in KINDS[1:]
        ),
    ],
)
def test_decode_is_one_graph_for_all_positions_and_equals_eager(kind, dynamic, backend):
    model, backend = tiny_patched(kind), CountingBackend(backend)
    step = torch.compile(model.forward, backend=backend, fullgraph=True, dynamic=dynamic)
    ids = token_ids(2, 60)

    def after_prefill():
        cache = models.PagedCache(model, 2, 64, block_size=16)
        model(ids[:, :29], past_key_values=cache)
        return cache

    want = decode(model, model, after_prefill(), ids, 29, [1] * 6)
    cache = after_prefill()
    got = decode(step, model, cache, ids, 29, [1] * 6)  # positions 29 to 34 cross a block
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    assert cache.lengths.tolist() == [35, 35] and cache.get_seq_length() == 35
    assert len(backend.graphs) == 1
    indexers = 2 if kind in ("deepseek_v32", "axk2") else 1  # others share, or have a window
    assert backend.ops() == {
        "npu_lightning_indexer_pto": indexers,
        "npu_sparse_flash_attention_pto": 2,
    }

    # another cache of that shape needs no new graph, nor do crop and reset
    cache.crop(-3)
    cache.reset()
    decode(step, model, cache, ids, 0, [1, 1])
    decode(step, model, after_prefill(), ids, 29, [1, 1])
    assert len(backend.graphs) == 1

    # several tokens a step: one graph more
    want = decode(model, model, after_prefill(), ids, 29, [3, 3, 3])
    got = decode(step, model, after_prefill(), ids, 29, [3, 3, 3])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    assert len(backend.graphs) == 2


def test_a_prompt_read_in_slices_is_one_graph_for_each_number_of_slices(monkeypatch):
    monkeypatch.setattr(LatentAttention, "slice_tokens", 16)
    model, backend = tiny_patched(), CountingBackend("eager")
    step = torch.compile(model.forward, backend=backend, fullgraph=True, dynamic=True)
    for tokens, graphs in [(40, 1), (45, 1), (35, 1), (30, 2)]:
        ids = token_ids(2, tokens)
        want = model(ids, past_key_values=models.PagedCache(model, 2, 64, block_size=16)).logits
        got = step(ids, past_key_values=models.PagedCache(model, 2, 64, block_size=16)).logits
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
        assert len(backend.graphs) == graphs
    assert backend.ops()["npu_lightning_indexer_pto"] == 2 * (3 + 2)  # layers, slices


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_generate_equals_eager_generate_and_upstream(kind):
    upstream, model, backend = two_layers(kind), tiny_patched(kind), CountingBackend()
    compiled = CompileConfig(backend=backend, fullgraph=True, dynamic=False, mode=None)
    compiled._compile_all_devices = True  # transformers compiles on CPU only when told so

    def generate(model, seed, **options):
        ids = token_ids(2, 29, seed)
        mask = torch.ones_like(ids)
        ids[0, :11] = mask[0, :11] = 0
        options = {"max_new_tokens": 8, "do_sample": False} | options
        return model.generate(ids, attention_mask=mask, **options)

    seed, want = clear_case(lambda seed: generate(upstream, seed))
    eager = generate(model, seed)
    got = generate(model, seed, compile_config=compiled)
    assert torch.equal(eager, want) and torch.equal(got, want)
    assert len(backend.graphs) == 1
    # and the model is upstream transformers again afterwards, although its forward was compiled
    assert torch.equal(generate(models.use_transformers(model), seed), want)


def test_compiled_generate_past_the_cache_is_rejected_by_the_step_that_does_not_fit():
    model = tiny_patched()
    cache = models.PagedCache(model, 1, 32, block_size=16)
    model(token_ids(1, 30), past_key_values=cache)
    compiled = CompileConfig(backend="eager", fullgraph=True, dynamic=False, mode=None)
    compiled._compile_all_devices = True
    # 6 tokens fit the cache, but not behind the 30 that are there
    with pytest.raises(ValueError, match="holds 32 of 32 tokens per sequence, got 1 more"):
        model.generate(
            token_ids(1, 1),
            attention_mask=torch.ones(1, 31),
            past_key_values=cache,
            max_new_tokens=5,
            compile_config=compiled,
        )


def test_a_compiled_step_past_the_cache_harms_no_other_sequence():
    # a graph cannot raise, so what does not fit must go where nothing is read
    model = tiny_patched()
    cache = models.PagedCache(model, 2, 32, block_size=16)
    ids, mask = token_ids(2, 32), torch.ones(2, 32, dtype=torch.int64)
    mask[1, :20] = 0
    model(ids, attention_mask=mask, past_key_values=cache)
    before = [layer.latent.clone() for layer in cache.layers]
    step = torch.compile(model.forward, backend="eager", fullgraph=True)
    alive = {"indexed_attention": torch.tensor([[True], [False]])}
    step(ids[:, :1], attention_mask=alive, past_key_values=cache)
    assert cache.lengths.tolist() == [33, 12]
    for layer, then in zip(cache.layers, before, strict=True):
        torch.testing.assert_close(layer.latent[1:], then[1:], rtol=0, atol=0, equal_nan=True)
