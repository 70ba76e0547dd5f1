"""The decode step of patched models, and the step that checks drafts, compiled by torchair in its
three modes, on the host simulator of CANN: one graph whatever the position, the answers of eager,
and no copy of the cache."""

import functools

import ge_graphs
import pytest
import torch
from cases.npu_sparse_attention_pto import fused_inputs
from ge_graphs import MODES, ONE_GRAPH, backend, watched
from mtp_harness import upstream_drafting
from npu_models import (
    BLOCK,
    CHECKPOINT,
    FIRST,
    LAST,
    LOOKUP,
    after_the_text,
    decode,
    eager,
    lookup_model,
    new_cache,
    pools,
)
from tiny import tiny_model, token_ids
from transformers import CompileConfig, DeepseekV4ForCausalLM

from custom_pypto import models, rows
from custom_pypto.models.mtp import decoding

pytestmark = [pytest.mark.ascend_host, pytest.mark.usefixtures("for_compiled_models")]

FIRST_MODE = [MODES[0], *(pytest.param(mode, marks=pytest.mark.slow) for mode in MODES[1:])]
OF_CAPTURES = [MODES[2], pytest.param(MODES[1], marks=pytest.mark.slow)]


# ---- the trained model ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_decode_is_one_graph_for_all_positions_and_answers_as_eager(mode):
    ids, labels = LOOKUP()
    step = torch.compile(
        lookup_model().forward, backend=backend(mode), fullgraph=True, dynamic=False
    )
    with watched() as seen:
        cache = after_the_text()
        logits = decode(step, cache, ids.npu(), FIRST, LAST)
        assert seen.counts() == ONE_GRAPH[mode]
        # another cache needs no other graph, but is elsewhere, so it is captured again
        decode(step, after_the_text(), ids.npu(), FIRST, FIRST + 1)
        ge, fx, captures = ONE_GRAPH[mode]
        assert seen.counts() == (ge, fx, 2 * captures)
    expected, expected_cache = eager()
    torch.testing.assert_close(logits, expected, rtol=0, atol=2**-6)
    answers, right = logits.argmax(-1).cpu(), labels[:, FIRST + 1 : LAST + 1]
    assert torch.equal(answers, expected.argmax(-1).cpu())
    asked = right >= 0
    assert asked.sum() == 3 and torch.equal(answers[asked], right[asked])
    # what was written is in the cache itself
    assert cache.lengths.tolist() == [LAST] and cache.seen.item() == LAST
    for pool, other in zip(pools(cache), pools(expected_cache), strict=True):
        # block 0 is nobody's, and after the last token there is nothing yet
        rows, others = (p[1:].flatten(0, 1)[:LAST] for p in (pool, other))
        torch.testing.assert_close(rows, others, rtol=0, atol=2**-6)


@functools.cache
def deepseek_v4():
    path = CHECKPOINT.with_name("lookup_v4")
    model = DeepseekV4ForCausalLM.from_pretrained(path, experts_implementation="batched_mm")
    return models.use_custom_pypto(model).to("npu")


def decoded_v4(forward):
    model = deepseek_v4()
    ids = token_ids(1, 44) % model.config.vocab_size
    cache = models.PagedCache(model, 1, 96, block_size=BLOCK)
    model(ids[:, :40].npu(), cache=cache)
    return decode(forward, cache, ids.npu(), 40, 44)  # completes a row of 4 tokens


@functools.cache
def eager_v4():
    return decoded_v4(deepseek_v4())


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_decode_of_deepseek_v4_is_one_graph(mode):
    forward = deepseek_v4().forward
    step = torch.compile(forward, backend=backend(mode), fullgraph=True, dynamic=False)
    with watched() as seen:
        logits = decoded_v4(step)
    assert seen.counts() == ONE_GRAPH[mode]
    torch.testing.assert_close(logits, eager_v4(), rtol=0, atol=2**-6 * eager_v4().abs().max())


@pytest.mark.parametrize("mode", OF_CAPTURES)
def test_captured_graph_writes_the_pools_in_place(mode):
    step = torch.compile(
        lookup_model().forward, backend=backend(mode), fullgraph=True, dynamic=False
    )
    cache = new_cache(1024)
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.memory_allocated()
    with watched() as seen:
        decode(step, cache, LOOKUP()[0].npu(), FIRST, FIRST + 1)
    # all that a replay uses was allocated; a copy would need room
    assert torch.npu.max_memory_allocated() - before < min(pool.nbytes for pool in pools(cache))
    (graph,) = seen.fx
    written = [
        node.args[0].op
        for node in graph.nodes
        if node.target is torch.ops.npu.npu_scatter_nd_update_.default
    ]
    assert written == ["placeholder"] * 6


def write_through_a_view(pool, slots, rows):
    width = pool.size(-1)
    slots = slots[:, :1] * pool.size(1) + slots[:, 1:]
    flat = pool.view(-1, width)
    torch.ops.npu.npu_scatter_nd_update_(flat, slots, rows.reshape(-1, width))


@pytest.mark.parametrize("through_a_view", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ge_graph_writes_the_pools_in_place(through_a_view, monkeypatch):
    if through_a_view:  # what this test must see
        monkeypatch.setattr(rows.latents, "write", write_through_a_view)
        monkeypatch.setattr(rows.index, "write", write_through_a_view)
    step = torch.compile(
        lookup_model().forward, backend=backend("max-autotune"), fullgraph=True, dynamic=False
    )
    cache = new_cache()
    with watched() as seen:
        decode(step, cache, LOOKUP()[0].npu(), FIRST, FIRST + 1)
    (graph,) = seen.ge
    assert ge_graphs.differences_from_prototype(graph) == []
    shapes = [list(pool.shape) for pool in pools(cache)]
    data = [
        f"{node.name}:0"
        for node in graph.op
        if node.type == "Data" and list(node.output_desc[0].shape.dim) in shapes
    ]
    assert len(data) == len(shapes) == 6
    users = [
        (node.type, list(node.input).index(source))
        for source in data
        for node in graph.op
        if source in node.input
    ]
    in_place = users == [("ScatterNdUpdate", 0)] * 6
    copies = sum(
        node.type in ("TensorMove", "Assign", "ViewCopy", "AsStrided") for node in graph.op
    )
    written_back = len(graph.attr["_output_dtypes"].list.i) - 1  # besides the logits
    assert (in_place, copies > 0, written_back) == (
        (False, True, 8) if through_a_view else (True, False, 2)  # lengths and seen
    )


@pytest.mark.parametrize("mode", OF_CAPTURES)
def test_captured_fused_op_writes_its_caches_in_place(mode):
    inputs = fused_inputs(
        [20, 5], 1, hidden=48, q_rank=32, index_dim=128, sparse_count=8, dtype=torch.bfloat16
    )
    count = inputs.pop("sparse_count")
    given, expected = ({name: x.npu() for name, x in inputs.items()} for _ in range(2))
    op = torch.ops.custom_pypto.npu_sparse_attention_pto.default

    def call(tensors):
        return op(**tensors, sparse_count=count)

    with watched() as seen:
        result = torch.compile(call, backend=backend(mode), fullgraph=True, dynamic=False)(given)
    assert torch.equal(result.cpu(), call(expected).cpu())
    for name in ("kv_cache", "kr_cache", "index_k_cache"):
        torch.testing.assert_close(given[name], expected[name], rtol=0, atol=0, equal_nan=True)
    (graph,) = seen.fx
    node, *copies = [node for node in graph.nodes if node.op == "call_function"]
    assert node.target is op and all(x.op == "placeholder" for x in node.args)
    # the older mode leaves copies of the caches onto themselves
    assert all(n.target is torch.ops.aten.copy_.default and n.args[0] is n.args[1] for n in copies)
    assert len(copies) == (3 if mode == "reduce-overhead" else 0)


# ---- experts, shared indexers, padding -----------------------------------------------------------


@functools.cache
def glm():
    """Two layers, of which the second shares the first one's indexer and is sparse."""
    model = tiny_model(
        "glm_moe_dsa",
        num_hidden_layers=2,
        indexer_types=["full", "shared"],
        index_head_dim=128,
        experts_implementation="batched_mm",
    )
    return models.use_custom_pypto(model.to("npu", torch.bfloat16), block_size=BLOCK)


def decoded(forward):
    """The logits after a padded prompt; the second sequence enters another block."""
    model, ids, mask = glm(), token_ids(2, 34).npu(), torch.ones(2, 30, dtype=torch.int64)
    mask[0, :7] = 0
    cache = models.PagedCache(model, 2, 64, block_size=BLOCK)
    model(ids[:, :30], attention_mask=mask.npu(), cache=cache)
    return decode(forward, cache, ids, 30, 34)


def generated(**options):
    return glm().generate(token_ids(2, 12).npu(), max_new_tokens=5, do_sample=False, **options)


@functools.cache
def eager_glm():
    return decoded(glm()), generated()


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_padded_batch_through_experts_and_shared_indexers(mode):
    step = torch.compile(glm().forward, backend=backend(mode), fullgraph=True, dynamic=False)
    with watched() as seen:
        logits = decoded(step)
    assert seen.counts() == ONE_GRAPH[mode]
    torch.testing.assert_close(logits, eager_glm()[0], rtol=0, atol=2**-6)


def compile_config(mode):
    compiled = CompileConfig(backend=backend(mode), fullgraph=True, dynamic=False, mode=None)
    compiled._compile_all_devices = True  # transformers compiles on its own list of devices only
    return compiled


@pytest.mark.parametrize("mode", FIRST_MODE)
def test_generate_compiles_its_decode_step(mode):
    with watched() as seen:
        tokens = generated(compile_config=compile_config(mode))
    assert seen.counts() == ONE_GRAPH[mode]
    assert torch.equal(tokens, eager_glm()[1])


# ---- drafts --------------------------------------------------------------------------------------


@functools.cache
def drafting(right):
    """A layer of DeepSeek-V3.2, and its MTP layer."""
    sizes = dict(num_hidden_layers=1, index_head_dim=128, experts_implementation="batched_mm")
    torch.manual_seed(0)
    model = upstream_drafting(right=right, **sizes).to("npu", torch.bfloat16)
    return models.use_custom_pypto(model, block_size=BLOCK)


def drafted(model, ids, new_tokens, mask=None, **options):
    """The text; of each step the tokens of a sequence, and those that the cache has of each."""
    steps, inputs_of = [], decoding.inputs_of

    def noted(model, kwargs, ids, cached, fed):
        steps.append((fed.size(1), list(cached)))
        return inputs_of(model, kwargs, ids, cached, fed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "inputs_of", noted)
        options |= dict(attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
        text = model.generate(ids, use_mtp=True, num_assistant_tokens=3, **options)
    return text, steps


def assert_a_graph_of_each(calls, mode, seen):
    """Of each number of tokens in the steps of some calls; captured for the cache of each call."""
    ge, fx, captures = ONE_GRAPH[mode]
    sizes, of_each = set().union(*calls), sum(len(set(call)) for call in calls)
    assert seen.counts() == (ge * len(sizes), fx * len(sizes), captures * of_each)


@pytest.mark.parametrize(
    "mode", [MODES[2], *(pytest.param(mode, marks=pytest.mark.slow) for mode in MODES[:2])]
)
def test_sequences_ahead_by_drafts_keep_the_logits_of_a_compiled_step(mode):
    """The next replay of a captured graph writes others in their place."""
    model, ids = drafting(right=True), token_ids(2, 9, 1).npu()
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with watched() as seen:
        text, steps = drafted(model, ids, 8, mask, compile_config=compile_config(mode))
    sizes = [size for size, _ in steps]
    assert any(len(set(cached)) > 1 for _, cached in steps) and sizes.count(4) > 1
    assert_a_graph_of_each([sizes], mode, seen)
    plain = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert torch.equal(text, plain)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_checks_drafts_is_a_graph_for_each_number_of_them(mode):
    """Whatever the position: drafts of random layers are wrong, most of them, so that a step gives
    a token or two."""
    model, compiled = drafting(right=False), compile_config(mode)
    calls = []
    with watched() as seen:
        for length in (8, 9):
            ids = token_ids(1, length, 1).npu()
            text, steps = drafted(model, ids, 6, compile_config=compiled)
            calls.append([size for size, _ in steps])
            assert torch.equal(text, model.generate(ids, max_new_tokens=6, do_sample=False))
    assert set().union(*calls) == {1, 2, 3, 4}
    assert all(sizes.count(4) > 1 for sizes in calls)
    assert_a_graph_of_each(calls, mode, seen)
