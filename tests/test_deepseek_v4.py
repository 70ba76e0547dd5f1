"""DeepSeek-V4 on the ops: upstream's results, in a cache that hardly grows.

Upstream counts left padding as tokens of the compressed windows; a padded sequence is therefore
compared with the sequence alone.
"""

import copy
import ctypes
import math

import accelerate
import pytest
import torch
import transformers
from model_harness import (
    PADS,
    WRONG,
    after_a_change,
    continued,
    feed,
    left_padded,
    no_grad_and_one_thread,  # noqa: F401
    paged_cache,
    trace,
)
from test_models_compile import CountingBackend, decode
from test_resources import in_a_process, peak_of
from tiny import V4_LAYERS, clear_case, tiny_v4, token_ids
from transformers import DynamicCache

from custom_pypto import models
from custom_pypto.models import compressed_attention, compression, deepseek_v4
from custom_pypto.requirements import numbers

# float32, 4 layers, logits up to about 10
TOLERANCE = 5e-4
SLIDING, SPARSE, HEAVY, _ = V4_LAYERS
PR_SET_THP_DISABLE = 41  # of prctl
# the real dims of attention and indexer, the window and both ratios
REAL = dict(
    head_dim=512,
    partial_rotary_factor=0.125,
    num_attention_heads=8,
    o_groups=4,
    sliding_window=128,
    index_n_heads=64,
    index_head_dim=128,
    index_topk=8,
    compress_rates={SPARSE: 4, HEAVY: 128},
)


def upstream_and_patched(**changes):
    return tiny_v4(**changes), models.use_custom_pypto(tiny_v4(**changes), block_size=16)


def alone(model, ids, pads):
    """Upstream's logits of the real tokens, each sequence without its padding."""
    rows = [row[None, n:] for row, n in zip(ids, pads, strict=True)]
    return torch.cat([model(row, use_cache=False).logits[0] for row in rows])


def both(upstream, patched, pads, chunks):
    """The logits that upstream and patched model give the same tokens, pads left out."""
    seed, want = clear_case(
        lambda seed: alone(upstream, left_padded(pads, sum(chunks), seed)[0], pads)
    )
    ids, mask, positions = left_padded(pads, sum(chunks), seed)
    cache = paged_cache(patched, len(pads), sum(chunks))
    got = feed(patched, cache, ids, mask, positions, chunks)
    return want, got[mask.bool()]


def furthest(upstream, patched, chunks=(46, 1, 1)):
    want, got = both(upstream, patched, [0, 9], list(chunks))
    return (got - want).abs().max()


# ---- the same logits ------------------------------------------------------------------------


@pytest.mark.parametrize("pads", [[0], PADS], ids=["batch-1", "left-padded"])
@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param([70], id="prefill"),
        pytest.param([47] + [1] * 20, id="decode"),
        pytest.param([1] * 40, id="decode-only"),
        pytest.param([40, 3, 3, 1, 3, 5, 7], id="several-tokens-a-step"),
        pytest.param([17, 17, 17, 17], id="chunked-prefill"),
    ],
)
@pytest.mark.parametrize("slice_", [256, 7], ids=["one-slice", "slices-of-7"])
def test_logits_equal_upstream_transformers(slice_, chunks, pads, monkeypatch):
    monkeypatch.setattr(deepseek_v4, "SLICE", slice_)
    want, got = both(*upstream_and_patched(), pads, chunks)
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("chunks", [[300], [261, 1, 1, 4]], ids=["prefill", "decode"])
def test_logits_equal_upstream_transformers_at_the_real_dims(chunks):
    want, got = both(*upstream_and_patched(**REAL), [0, 5], chunks)
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("index_topk", [1, 2, 16, 64], ids=lambda k: f"{k}-of-17-rows")
def test_logits_equal_upstream_transformers_however_many_rows_are_selected(index_topk):
    assert furthest(*upstream_and_patched(index_topk=index_topk), (66, 1, 3)) <= TOLERANCE


@pytest.mark.parametrize("kind", [SLIDING, SPARSE, HEAVY])
def test_a_model_of_one_type_of_layer(kind):
    changes = dict(layer_types=[kind] * 2, num_hidden_layers=2, mlp_layer_types=["moe"] * 2)
    assert furthest(*upstream_and_patched(**changes), (50, 1, 3)) <= TOLERANCE


def test_positions_count_from_the_first_real_token_if_none_are_given():
    upstream, patched = upstream_and_patched()
    ids, mask, _ = left_padded(PADS, 60)
    got = patched(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    torch.testing.assert_close(got, alone(upstream, ids, PADS), rtol=0, atol=TOLERANCE)


# ---- what would be wrong, and must show -----------------------------------------------------


def each(change, kind=None):
    """Applies ``change`` to the attention of every layer of this type."""

    def apply(monkeypatch, model):
        for layer in model.model.layers:
            if kind in (None, layer.self_attn.layer_type):
                change(layer.self_attn)

    return apply


def one_way(monkeypatch, model):
    cls = deepseek_v4.PagedDeepseekV4Attention
    rope = cls.rope
    forwards = lambda x, cos, sin, **dim: rope(x, cos, sin.abs(), **dim)  # noqa: E731
    monkeypatch.setattr(cls, "rope", staticmethod(forwards))


def ring_shifted(monkeypatch, model):
    window = compressed_attention.window
    monkeypatch.setattr(deepseek_v4, "SLICE", 7)  # a ring that has turned round
    monkeypatch.setattr(
        compressed_attention, "window", lambda part, size, ring: window(part, size, ring - 1)
    )


def rows_of(change):
    """Changes the windows, and so the positions, of the compressed rows."""

    def apply(monkeypatch, model):
        completed = compression.completed
        monkeypatch.setattr(compression, "completed", lambda *args: change(*completed(*args)))

    return apply


TRAPS = {
    "no-sink": each(lambda a: a.sinks.fill_(-1e4)),
    "window-one-shorter": each(lambda a: setattr(a, "sliding_window", a.sliding_window - 1)),
    "window-one-longer": each(lambda a: setattr(a, "sliding_window", a.sliding_window + 1)),
    "window-elsewhere-in-the-ring": ring_shifted,
    "output-not-rotated-back": one_way,
    "no-selection": each(lambda a: setattr(a.compressor.indexer, "index_topk", 64), SPARSE),
    "index-weights-without-sign": each(
        lambda a: a.compressor.indexer.scorer.weights_proj.weight.abs_(), SPARSE
    ),
    "no-position-bias": each(lambda a: a.compressor.position_bias.zero_(), HEAVY),
    "no-index-bias": each(lambda a: a.compressor.indexer.position_bias.zero_(), SPARSE),
    "bias-of-the-window-before": each(lambda a: a.compressor.position_bias[:, :64].zero_(), SPARSE),
    "rows-of-the-window-after": rows_of(lambda rows, w, whole: (rows, w + 1, whole)),
    "rows-not-yet-complete": rows_of(lambda rows, w, whole: (rows, w, torch.ones_like(whole))),
    "rows-of-the-state-lost": rows_of(lambda rows, w, whole: (rows, w, whole & (w != w[:, :1]))),
}


@pytest.mark.parametrize("trap", [t for t in TRAPS if t != "rows-not-yet-complete"])
def test_the_logits_show(trap, monkeypatch):
    upstream, patched = upstream_and_patched()
    assert furthest(upstream, patched, (46, 1, 5)) <= TOLERANCE
    TRAPS[trap](monkeypatch, patched)
    assert not furthest(upstream, patched, (46, 1, 5)) <= WRONG  # nan counts


def test_rows_that_are_not_complete_are_replaced_before_they_are_read(monkeypatch):
    upstream, patched = upstream_and_patched()
    TRAPS["rows-not-yet-complete"](monkeypatch, patched)
    assert furthest(upstream, patched, (46, 1, 5)) <= TOLERANCE


# ---- generate() -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="greedy"),
        pytest.param({"prefill_chunk_size": 16}, id="chunked-prefill"),
        pytest.param({"use_cache": False}, id="without-cache"),
        pytest.param({"num_beams": 3}, id="beams"),
        pytest.param({"num_beams": 3, "num_return_sequences": 2}, id="beams-returned"),
        pytest.param({"do_sample": True}, id="sampling"),
        pytest.param({"do_sample": True, "num_return_sequences": 3}, id="sampling-returned"),
    ],
)
def test_generate_equals_upstream_transformers(options):
    options = {"do_sample": False, "max_new_tokens": 10} | options

    def generate(model, seed, **more):
        torch.manual_seed(5)
        return model.generate(token_ids(2, 40, seed), **options, **more)

    upstream, patched = upstream_and_patched()
    # before 5.23 upstream's own cache mixes up the beams
    mixed = "num_beams" in options and numbers(transformers.__version__) < (5, 23)
    without = {"use_cache": False} if mixed else {}
    seed, want = clear_case(lambda seed: generate(upstream, seed, **without))
    assert torch.equal(generate(patched, seed), want)


def test_left_padded_generation_equals_each_sequence_alone():
    upstream, patched = upstream_and_patched()
    options = dict(max_new_tokens=10, do_sample=False)

    def one_by_one(seed):
        ids, _, _ = left_padded(PADS, 40, seed)
        rows = [row[None, n:] for row, n in zip(ids, PADS, strict=True)]
        return [upstream.generate(row, **options)[0, -10:] for row in rows]

    seed, want = clear_case(one_by_one)
    ids, mask, _ = left_padded(PADS, 40, seed)
    got = patched.generate(ids, attention_mask=mask, **options)[:, -10:]
    assert torch.equal(got, torch.stack(want))


def test_a_cache_kept_between_calls_continues_the_conversation():
    upstream, patched = upstream_and_patched()
    options = dict(max_new_tokens=6, do_sample=False)

    def two_turns(model, seed, **cache):
        first = model.generate(token_ids(2, 40, seed), **options, **cache)
        return model.generate(torch.cat([first, token_ids(2, 9, 2)], 1), **options, **cache)

    seed, want = clear_case(lambda seed: two_turns(upstream, seed))
    cache = models.PagedCache(patched, 2, 96, block_size=16)
    assert torch.equal(two_turns(patched, seed, past_key_values=cache), want)


def test_a_loop_on_the_cache_of_a_forward_grows_it():
    upstream, patched = upstream_and_patched()
    ids = token_ids(2, 90)
    want = upstream(ids, use_cache=False).logits
    output = patched(ids[:, :20])
    logits, cache = [output.logits], output.past_key_values
    before = cache.max_cache_len, cache.nbytes
    for t in range(20, 90):
        logits.append(patched(ids[:, t : t + 1], past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(logits, 1), want, rtol=0, atol=TOLERANCE)
    assert cache.max_cache_len >= 90 and (cache.max_cache_len, cache.nbytes) > before


# ---- the cache ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, rows",
    [
        pytest.param(lambda c: c.crop(-16), [0, 1, 2], id="crop"),
        pytest.param(lambda c: c.crop(-3), [0, 1, 2], id="crop-3"),
        pytest.param(lambda c: c.crop(0), [0, 1, 2], id="crop-nothing"),
        pytest.param(lambda c: c.crop(-60), [0, 1, 2], id="crop-all"),
        pytest.param(lambda c: c.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0], id="reorder"),
        pytest.param(lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2], id="repeat"),
        pytest.param(lambda c: c.batch_select_indices(torch.tensor([2, 0])), [2, 0], id="select"),
        pytest.param(lambda c: c.reset(), [0, 1, 2], id="reset"),
        pytest.param(lambda c: c.reserve(200), [0, 1, 2], id="reserve"),
        pytest.param(copy.deepcopy, [0, 1, 2], id="deepcopy"),
    ],
)
@pytest.mark.parametrize("fed", [57, 60], ids=lambda n: f"{n}-tokens")
def test_a_changed_cache_continues_as_if_its_tokens_had_been_fed(fed, change, rows):
    upstream, patched = upstream_and_patched()
    steps = [4, 1, 1, 7, 17]
    want, got = after_a_change(upstream, patched, change, rows, fed=fed, steps=steps)
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


def test_crop_beyond_what_the_state_holds_is_rejected_and_changes_nothing():
    upstream, patched = upstream_and_patched()
    ids = token_ids(1, 90)
    cache = paged_cache(patched, 1)
    patched(ids[:, :60], past_key_values=cache)
    message = r"must be at least -16 \(.*or at most -60 \(all tokens\), got -17; reset\(\)"
    with pytest.raises(ValueError, match=rf"PagedCache.crop: tokens_to_remove {message}"):
        cache.crop(-17)
    cache.crop(-10)
    with pytest.raises(ValueError, match="must be at least -6 .*got -7"):
        cache.crop(-7)  # the rows of 17 tokens are gone, however often it is cropped
    got = continued(patched, cache, ids, 50, [1] * 10 + [30])
    want = upstream(ids, use_cache=False).logits[:, 50:]
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


def test_a_short_interrupted_forward_leaves_the_cache_as_it_was_and_a_long_one_says_so():
    upstream, patched = upstream_and_patched()
    ids = token_ids(1, 90)
    cache = paged_cache(patched, 1)

    def fail(module, args, output):
        raise KeyboardInterrupt

    def interrupted(start, end):
        hook = patched.model.layers[-1].mlp.register_forward_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            patched(ids[:, start:end], past_key_values=cache)
        hook.remove()

    interrupted(0, 60)  # nothing was cached: nothing to lose
    patched(ids[:, :40], past_key_values=cache)
    interrupted(40, 56)
    got = patched(ids[:, 40:60], past_key_values=cache).logits
    want = upstream(ids, use_cache=False).logits
    torch.testing.assert_close(got, want[:, 40:60], rtol=0, atol=TOLERANCE)
    interrupted(60, 90)
    with pytest.raises(ValueError, match="interrupted forward of 30 tokens has overwritten .*60"):
        patched(ids[:, 60:], past_key_values=cache)
    cache.reset()
    got = patched(ids, past_key_values=cache).logits
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


def test_a_cache_grows_by_a_quarter_and_a_128th_of_the_tokens():
    _, patched = upstream_and_patched(**REAL, dtype=torch.bfloat16)
    patched = patched.bfloat16()
    ring = math.ceil((127 + deepseek_v4.SLICE) / 128) * 128

    def documented(batch, tokens):
        window = 4 * ring * 512  # all four layers
        rows = tokens // 4 * (512 + 128) * 2 + math.ceil(tokens / 128 / 128) * 128 * 512
        state = (7 + 16) * 4 * (512 + 128) * 2 + (127 + 16) * 2 * 512
        nobody = 128 * (4 * 512 + 2 * 128) + state  # block 0 of every pool
        return 2 * (batch * (window + rows + state) + nobody)

    for batch, tokens in (1, 4096), (3, 65536):
        assert models.PagedCache(patched, batch, tokens).nbytes == documented(batch, tokens)


# ---- memory ---------------------------------------------------------------------------------


def peak_of_prefill(tokens):
    ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)  # huge pages come where some are free
    torch.set_num_threads(1)
    patched = models.use_custom_pypto(tiny_v4(index_topk=8, moe_intermediate_size=16))
    ids = token_ids(1, tokens)
    with torch.no_grad():
        patched(ids[:, :300], logits_to_keep=1)
        return peak_of(lambda: patched(ids, logits_to_keep=1))


def test_the_memory_of_a_prefill_is_linear_in_its_tokens():
    once, twice = (in_a_process(peak_of_prefill, tokens) for tokens in (8192, 16384))
    # a mask [S, S / 4], in bytes, would add 33 MB; the scores of an indexer 128 times as much
    assert twice - 2 * once < 16e6


@pytest.mark.parametrize("name", ["index_dtype", "kv_dtype"])
def test_caches_in_int8_are_rejected_by_name(name):
    expected = f"{name} must be None for model_type deepseek_v4, which has no caches in int8, got"
    with pytest.raises(ValueError, match=f"^use_custom_pypto: {expected} torch.int8$"):
        models.use_custom_pypto(tiny_v4(), **{name: torch.int8})
    patched = models.use_custom_pypto(tiny_v4())
    with pytest.raises(ValueError, match=f"^PagedCache: {expected} torch.int8$"):
        models.PagedCache(patched, 1, 64, **{name: torch.int8})


# ---- graphs ---------------------------------------------------------------------------------


def test_decode_is_one_graph_for_all_positions_and_equals_eager():
    model, backend = models.use_custom_pypto(tiny_v4(), block_size=16), CountingBackend()
    step = torch.compile(model.forward, backend=backend, fullgraph=True, dynamic=False)
    ids = token_ids(2, 60)

    def after_prefill():
        cache = models.PagedCache(model, 2, 64, block_size=16)
        model(ids[:, :29], past_key_values=cache)
        return cache

    want = decode(model, model, after_prefill(), ids, 29, [1] * 20)
    got = decode(step, model, after_prefill(), ids, 29, [1] * 20)  # completes rows of both ratios
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert len(backend.graphs) == 1
    assert backend.ops() == {"npu_lightning_indexer_pto": 2, "npu_sparse_flash_attention_pto": 4}
    want = decode(model, model, after_prefill(), ids, 29, [3, 3, 3])
    got = decode(step, model, after_prefill(), ids, 29, [3, 3, 3])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert len(backend.graphs) == 2


# ---- the patch ------------------------------------------------------------------------------


def test_use_transformers_undoes_the_patch_to_the_bit():
    model, ids = tiny_v4(), token_ids(2, 40)
    want = trace(model), model(ids).logits, model.generate(ids, max_new_tokens=6)
    assert models.use_custom_pypto(model) is model
    model.generate(ids, max_new_tokens=6)
    assert trace(model) != want[0]
    assert models.use_transformers(model) is model
    got = trace(model), model(ids).logits, model.generate(ids, max_new_tokens=6)
    assert got[0] == want[0]
    assert torch.equal(got[1], want[1]) and torch.equal(got[2], want[2])


def test_training_mode_gives_upstream_gradients():
    upstream, patched = upstream_and_patched()
    ids = token_ids(1, 40)
    gradients = []
    with torch.enable_grad():
        for model in upstream, patched:
            model.train()
            model(ids, labels=ids).loss.backward()
            gradients.append({n: p.grad for n, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=0)


@pytest.mark.parametrize(
    "name, cls",
    [
        ("1.self_attn.compressor", "DeepseekV4CSACompressor"),
        ("1.self_attn.compressor.indexer", "DeepseekV4Indexer"),
        ("1.self_attn.compressor.indexer.scorer", "DeepseekV4IndexerScorer"),
        ("2.self_attn.compressor", "DeepseekV4HCACompressor"),
    ],
)
def test_additions_that_the_ops_would_bypass_are_rejected(name, cls):
    _, patched = upstream_and_patched()
    patched.model.layers.get_submodule(name).register_forward_hook(lambda *args: None)
    with pytest.raises(TypeError, match=f"of layer {name[0]} must be a plain {cls} .*forward hook"):
        patched(token_ids(1, 4))


@pytest.mark.parametrize("name", ["q_a_proj", "kv_proj", "o_b_proj", "compressor.kv_proj"])
def test_hooks_of_other_modules_are_called(name):
    _, patched = upstream_and_patched()
    module = patched.model.layers[1].self_attn.get_submodule(name)
    before = patched(token_ids(1, 40)).logits
    module.register_forward_hook(lambda module, args, output: output.roll(1, -1))
    assert (patched(token_ids(1, 40)).logits - before).abs().max() > WRONG


def test_bf16_is_as_close_to_float32_as_upstream_bf16():
    upstream, patched = upstream_and_patched(index_topk=64)  # all rows: a selection is a choice
    ids = token_ids(2, 60)
    want = upstream(ids, use_cache=False).logits
    theirs = (upstream.bfloat16()(ids, use_cache=False).logits.float() - want).pow(2).mean()
    mine = (patched.bfloat16()(ids, use_cache=False).logits.float() - want).pow(2).mean()
    assert mine <= 1.2**2 * theirs


@pytest.mark.parametrize("first", ["patch", "offload"])
def test_offloaded_weights_are_brought_in(first):
    upstream, patched = upstream_and_patched()
    if first == "offload":
        patched = models.use_transformers(patched)
    accelerate.cpu_offload(patched, execution_device="cpu")
    patched = models.use_custom_pypto(patched)
    ids = token_ids(1, 50)
    want = upstream(ids, use_cache=False).logits
    got = patched(ids, use_cache=False).logits
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


def test_a_cache_of_another_window_is_rejected():
    _, patched = upstream_and_patched()
    cache = models.PagedCache(upstream_and_patched(sliding_window=32)[1], 1, 32)
    with pytest.raises(ValueError, match="made for|created for .*sliding_window=32, got one with"):
        patched(token_ids(1, 4), past_key_values=cache)


def test_upstream_rejects_the_cache():
    upstream, patched = upstream_and_patched()
    with pytest.raises(TypeError, match="PagedCache: model must be patched"):
        upstream(token_ids(1, 4), past_key_values=models.PagedCache(patched, 1, 32))


def test_the_reference_of_the_tests_is_upstreams_own_cache():
    upstream, _ = upstream_and_patched()
    ids, mask, positions = left_padded([0], 60)
    got = feed(
        upstream, DynamicCache(config=upstream.config), ids, mask, positions, [40] + [1] * 20
    )
    torch.testing.assert_close(got[0], alone(upstream, ids, [0]), rtol=0, atol=TOLERANCE)
