"""The decode step of a patched model is one graph, whatever the position."""

import copy

import pytest
import torch
from model_harness import (
    TOLERANCES,
    no_grad_and_one_thread,  # noqa: F401
    patched_model,
    upstream_and_patched,
    whole_graph,
)
from processes import in_a_process, peak_of
from tiny import (
    ALL_KINDS,
    KINDS,
    V4_LAYERS,
    clear_case,
    representatives,
    token_ids,
)
from torch._dynamo.backends.registry import lookup_backend
from transformers import CompileConfig

from custom_pypto import models
from custom_pypto.models import CACHE
from custom_pypto.models.latent_attention import LatentAttention
from custom_pypto.models.patched import patched_attentions, text_model
from custom_pypto.models.regions import Regions, schemas

TWO_LAYERS = {"num_hidden_layers": 2}


class CountingBackend:
    """Keeps the graphs it is given."""

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


def decode(forward, cache, ids, start, sizes):
    logits = []
    for size in sizes:
        positions = torch.arange(start, start + size).expand(len(ids), -1)
        logits.append(
            forward(
                # a copy, as generate() makes: the offset of a view is part of a graph's guards
                ids[:, start : start + size].clone(),
                position_ids=positions,
                use_cache=True,
                **{CACHE: cache},
            ).logits
        )
        start += size
    return torch.cat(logits, 1)


LAYERS = {
    "deepseek_v4": dict(
        layer_types=V4_LAYERS[:3], mlp_layer_types=["moe"] * 3, num_hidden_layers=3
    ),
    "mistral_large4": {},
}
# layers that attend by the op, and those with an indexer; others share, or have a window
ATTENTIONS = {"deepseek_v4": 3, "mistral_large4": 4}
INDEXERS = {"deepseek_v32": 2, "axk2": 2, "mistral_large4": 3}


# "aot_eager" functionalises the writes into the cache; its order of sums is its own
FIRST = ("glm_moe_dsa", "aot_eager", False)
WAYS = [(kind, "aot_eager", False) for kind in [*KINDS, *LAYERS]]
WAYS += [(kind, "eager", True) for kind in KINDS]


@pytest.mark.parametrize(
    "kind, backend, dynamic",
    [pytest.param(*way, marks=[] if way == FIRST else [pytest.mark.slow]) for way in WAYS],
)
def test_decode_is_one_graph_for_all_positions_and_equals_eager(kind, backend, dynamic):
    rounding = 0 if backend == "eager" else TOLERANCES[kind]
    model = patched_model(kind, **LAYERS.get(kind, TWO_LAYERS))
    backend = CountingBackend(backend)
    step = torch.compile(model.forward, backend=backend, fullgraph=True, dynamic=dynamic)
    ids = token_ids(2, 60)

    def after_prefill():
        cache = models.PagedCache(model, 2, 64, block_size=16)
        model(ids[:, :29], cache=cache)
        return cache

    # across a block, and of DeepSeek-V4 enough to complete rows of both ratios
    steps = [1] * (20 if kind == "deepseek_v4" else 6)
    want = decode(model, after_prefill(), ids, 29, steps)
    cache = after_prefill()
    got = decode(step, cache, ids, 29, steps)
    torch.testing.assert_close(got, want, rtol=0, atol=rounding)
    assert cache.lengths.tolist() == [29 + len(steps)] * 2
    assert cache.get_seq_length() == 29 + len(steps)
    assert len(backend.graphs) == 1
    assert backend.ops() == {
        "npu_lightning_indexer_pto": INDEXERS.get(kind, 1),
        "npu_sparse_flash_attention_pto": ATTENTIONS.get(kind, 2),
    }

    # another cache of that shape needs no new graph, nor do crop and reset
    cache.crop(-3)
    cache.reset()
    decode(step, cache, ids, 0, [1, 1])
    decode(step, after_prefill(), ids, 29, [1, 1])
    assert len(backend.graphs) == 1

    # several tokens a step: one graph more
    want = decode(model, after_prefill(), ids, 29, [3, 3, 3])
    got = decode(step, after_prefill(), ids, 29, [3, 3, 3])
    torch.testing.assert_close(got, want, rtol=0, atol=rounding)
    assert len(backend.graphs) == 2


@pytest.mark.slow
def test_a_prompt_read_in_slices_is_one_graph_for_each_number_of_slices(monkeypatch):
    monkeypatch.setattr(LatentAttention, "slice_tokens", 16)
    model, backend = patched_model(num_hidden_layers=1), CountingBackend("eager")
    step = torch.compile(model.forward, backend=backend, fullgraph=True, dynamic=True)
    for tokens, graphs in [(40, 1), (35, 1), (30, 2)]:
        ids = token_ids(2, tokens)
        want = model(ids, cache=models.PagedCache(model, 2, 64, block_size=16)).logits
        got = step(ids, cache=models.PagedCache(model, 2, 64, block_size=16)).logits
        assert torch.equal(got, want)
        assert len(backend.graphs) == graphs
    assert backend.ops()["npu_lightning_indexer_pto"] == 3 + 2  # slices


@pytest.mark.parametrize("kind", representatives(KINDS))
def test_compiled_generate_equals_eager_generate_and_upstream(kind):
    backend = CountingBackend()
    upstream, model = upstream_and_patched(kind, **TWO_LAYERS)

    def generate(model, seed, **options):
        ids = token_ids(2, 29, seed)
        mask = torch.ones_like(ids)
        ids[0, :11] = mask[0, :11] = 0
        options = {"max_new_tokens": 8, "do_sample": False} | options
        return model.generate(ids, attention_mask=mask, **options)

    seed, want = clear_case(lambda seed: generate(upstream, seed))
    eager = generate(model, seed)
    got = generate(model, seed, compile_config=whole_graph(backend))
    assert torch.equal(eager, want) and torch.equal(got, want)
    assert len(backend.graphs) == 1
    # and the model is upstream transformers again afterwards, although its forward was compiled
    assert torch.equal(generate(models.use_transformers(model), seed), want)


# ---- compiled layers ---------------------------------------------------------------------------


def layers_compiled(backend, **options):
    """Options of ``generate()`` that compile the layers of its decode steps."""
    return {"compile_config": CompileConfig(backend=backend, mode=None, fullgraph=True, **options)}


def continued_by(model, tokens, **options):
    return model.generate(
        token_ids(2, 29), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, **options
    )


def kinds_of_layers(model):
    """Layers that differ in their modules, their sizes or their rows."""
    text = text_model(model)
    cache = models.PagedCache(text, 1, 32, block_size=16)
    return {
        (str(text.layers[i]), *((name, x.shape) for name, x in cache.layers[i].pools.items()))
        for i in patched_attentions(text)
    }


SLOW_KINDS = [
    pytest.param(kind, marks=[] if kind == "deepseek_v32" else [pytest.mark.slow])
    for kind in ALL_KINDS
]


@pytest.mark.parametrize("kind", SLOW_KINDS)
def test_generate_compiles_a_graph_for_each_kind_of_layers(kind):
    model = patched_model(kind, **({"num_hidden_layers": 7} if kind == "deepseek_v32" else {}))
    kinds, backend = kinds_of_layers(model), CountingBackend("eager")
    options = layers_compiled(backend)
    assert torch.equal(continued_by(model, 6, **options), continued_by(model, 6))
    assert len(backend.graphs) == len(kinds)
    # caches of other sizes: graphs for all of them, and where a table of few rows has one block
    continued_by(model, 30, **options)
    assert torch.equal(continued_by(model, 80, **options), continued_by(model, 80))
    known = len(backend.graphs)
    assert known <= 3 * len(kinds)
    continued_by(model, 60, **options)
    assert len(backend.graphs) == known


def test_layers_are_compiled_only_where_generate_is_told_to():
    model, backend = patched_model(), CountingBackend("eager")
    options = layers_compiled(backend)
    continued_by(model, 3, disable_compile=True, **options)
    assert not backend.graphs
    continued_by(model, 3, **options)
    known = len(backend.graphs)
    continued_by(model, 3)
    model(token_ids(2, 29))
    assert len(backend.graphs) == known
    copied = copy.deepcopy(model)
    assert torch.equal(continued_by(copied, 3), continued_by(model, 3))
    plain = models.use_transformers(model)
    assert all(layer._compiled_call_impl is None for layer in plain.model.layers)


def test_a_selection_of_a_compiled_layer_is_recorded():
    model, backend = patched_model(), CountingBackend("eager")
    records = []
    for options in ({}, layers_compiled(backend)):
        with models.record_indices(model, experts=True) as record:
            continued_by(model, 4, **options)
        records.append(record.tensors())
    assert all(torch.equal(record, records[0][i]) for i, record in records[1].items())
    assert len(backend.graphs) == 0  # layers that a record follows are not compiled


def test_layers_that_are_compiled_already_stay_as_they_are():
    model, own, backend = patched_model(), CountingBackend("eager"), CountingBackend("eager")
    want = continued_by(model, 4)
    model.model.layers[0].compile(backend=own)
    model.model.layers[1] = torch.compile(model.model.layers[1], backend=own)
    assert torch.equal(continued_by(model, 4, **layers_compiled(backend)), want)
    assert own.graphs and len(backend.graphs) == 1


def doubled(module, args, output):
    return 2 * output


# of a layer, each of which the guards of its graph would find
CHANGES = {
    "a hook": lambda layer: layer.mlp.register_forward_hook(doubled),
    "a weight": lambda layer: setattr(
        layer.self_attn.o_proj, "weight", torch.nn.Parameter(2 * layer.self_attn.o_proj.weight)
    ),
    "a module": lambda layer: setattr(layer, "mlp", torch.nn.Identity()),
    "a class": lambda layer: setattr(layer.input_layernorm, "__class__", torch.nn.Identity),
    "an attribute": lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 4.0),
    "a forward": lambda layer: setattr(layer.mlp, "forward", torch.relu),
}
if torch.__version__.startswith("2.10."):
    del CHANGES["a class"]  # which no guard of its Dynamo finds


class DecodeSteps:
    """Steps of a compiled ``generate()``, those of the same model uncompiled, and how often Dynamo
    looked for the graph of a layer."""

    def __init__(self, monkeypatch):
        self.lookups, found = 0, Regions.__init__

        def counting(regions, *args):
            found(regions, *args)
            compiled = regions.call

            def call(*inputs):
                self.lookups += 1
                return compiled(*inputs)

            regions.call = call

        monkeypatch.setattr(Regions, "__init__", counting)
        self.model = patched_model(**TWO_LAYERS)
        self.eager = copy.deepcopy(self.model)
        self.caches = [models.PagedCache(x, 2, 32, block_size=16) for x in (self.model, self.eager)]
        for model, cache in zip((self.model, self.eager), self.caches, strict=True):
            model(token_ids(2, 9), **{CACHE: cache})
        config = CompileConfig(backend=CountingBackend("eager"), mode=None, fullgraph=True)
        self.call = self.model.get_compiled_call(config)

    def run(self):
        """Of both, the logits of a step; returns how often Dynamo looked for a graph."""
        before, step = self.lookups, dict(use_cache=True)
        got, want = (
            call(token_ids(2, 1, 3), **{CACHE: cache}, **step).logits
            for call, cache in zip((self.call, self.eager), self.caches, strict=True)
        )
        assert torch.equal(got, want)
        return self.lookups - before


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_compiled_layer_takes_effect_in_the_next_step(change, monkeypatch):
    steps = DecodeSteps(monkeypatch)
    assert [steps.run() for _ in range(3)] == [2, 0, 0]
    for model in (steps.model, steps.eager):
        CHANGES[change](model.model.layers[1])
    # a layer with hooks, or whose forward is somebody's, runs as it is
    assert steps.run() == (0 if change == "a hook" else 1)


@pytest.mark.parametrize("state", [torch.enable_grad, torch.inference_mode])
def test_a_step_in_another_state_of_torch_finds_its_graphs_anew(state, monkeypatch):
    steps = DecodeSteps(monkeypatch)
    assert [steps.run() for _ in range(2)] == [2, 0]
    with state():
        assert steps.run() == 2
    assert steps.run() in (0, 2)


def test_graphs_on_the_disk_are_of_the_ops_schemas():
    tags = []

    def backend(graph, inputs):
        tags.append(torch.compiler.config.cache_key_tag)
        return graph

    with torch.compiler.config.patch(cache_key_tag="of a user, "):
        continued_by(patched_model(**TWO_LAYERS), 3, **layers_compiled(backend))
    assert tags and set(tags) == {f"of a user, custom_pypto {schemas()}"}
    assert torch.compiler.config.cache_key_tag == ""


def compiled_by_torch(kind):
    """Tokens of eager and of compiled layers, the peak of these, and the bytes of the largest
    pool."""
    sizes = LAYERS.get(kind, TWO_LAYERS)
    model = patched_model(kind, **sizes, max_position_embeddings=2**22)
    cache = models.PagedCache(model, 2, 2**21, block_size=16)

    def generate(**options):
        cache.reset()
        return continued_by(model, 6, cache=cache, **options)

    def compiled():
        return generate(compile_config=CompileConfig())

    pools = [pool for layer in cache.layers for pool in layer.pools.values()]
    return generate(), compiled(), peak_of(compiled), max(pool.nbytes for pool in pools)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deepseek_v4", "glm_moe_dsa"])
def test_layers_compiled_by_torch_generate_the_same_tokens_and_copy_no_pool(kind):
    # in a process of its own: deterministic algorithms copy what they write to
    eager, compiled, peak, pool = in_a_process(compiled_by_torch, kind)
    assert torch.equal(compiled, eager)
    # memory without a token is there only once it is written
    assert peak < pool / 4


def test_compiled_generate_past_the_cache_is_rejected_by_the_step_that_does_not_fit():
    model = patched_model(**TWO_LAYERS)
    cache = models.PagedCache(model, 1, 32, block_size=16)
    model(token_ids(1, 30), cache=cache)
    # 6 tokens fit the cache, but not behind the 30 that are there
    with pytest.raises(ValueError, match="holds 32 of 32 tokens per sequence, got 1 more"):
        model.generate(
            token_ids(1, 1),
            attention_mask=torch.ones(1, 31),
            cache=cache,
            max_new_tokens=5,
            compile_config=whole_graph("eager"),
        )


def test_a_compiled_step_past_the_cache_harms_no_other_sequence():
    # a graph cannot raise, so what does not fit must go where nothing is read
    model = patched_model(**TWO_LAYERS)
    cache = models.PagedCache(model, 2, 32, block_size=16)
    ids, mask = token_ids(2, 32), torch.ones(2, 32, dtype=torch.int64)
    mask[1, :20] = 0
    model(ids, attention_mask=mask, cache=cache)
    before = [layer.pools["latent"].clone() for layer in cache.layers]
    step = torch.compile(model.forward, backend="eager", fullgraph=True)
    alive = {"indexed_attention": torch.arange(33) != torch.tensor([[33], [32]])}
    step(ids[:, :1], attention_mask=alive, cache=cache)
    assert cache.lengths.tolist() == [33, 12]
    for layer, then in zip(cache.layers, before, strict=True):
        now = layer.pools["latent"]
        torch.testing.assert_close(now[1:], then[1:], rtol=0, atol=0, equal_nan=True)
