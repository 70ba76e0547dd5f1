"""Patched models compute the results of upstream transformers, and the patch can be undone."""

import copy
import io
import json
import re
from pathlib import Path

import pytest
import torch
from model_harness import (
    PADS,
    WRONG,
    both,
    feed,
    furthest,
    left_padded,
    no_grad_and_one_thread,  # noqa: F401
    paged_cache,
    prompt,
    trace,
)
from tiny import CLASSES, KINDS, NAMES, clear_case, tiny_config, tiny_model, token_ids
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.models.deepseek_v32 import modeling_deepseek_v32

from custom_pypto import models
from custom_pypto.models.architectures import ARCHITECTURES, available
from custom_pypto.models.cache import write
from custom_pypto.models.cache.layout import Pool
from custom_pypto.models.latent_attention import LatentAttention

# float32, 3 layers, logits up to about 7: sums of up to 128 terms in another order
TOLERANCE = 5e-5


def upstream_and_patched(kind="deepseek_v32", **changes):
    patched = models.use_custom_pypto(tiny_model(kind, **changes), block_size=16)
    return tiny_model(kind, **changes), patched


# ---- the same logits ------------------------------------------------------------------------


@pytest.mark.parametrize("pads", [[0], [0, 0], PADS], ids=["batch-1", "batch-2", "left-padded"])
@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param([60], id="prefill"),
        pytest.param([47, 1, 1, 1, 1, 1], id="decode"),
        pytest.param([40, 3, 3, 1, 3], id="three-tokens-a-step"),
        pytest.param([17, 17, 17], id="chunked-prefill"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_upstream_transformers(kind, chunks, pads):
    want, got = both(*upstream_and_patched(kind), pads, chunks)
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("pads", [[0], PADS], ids=["batch-1", "left-padded"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_upstream_transformers_where_a_prompt_is_read_in_slices(
    kind, pads, monkeypatch
):
    monkeypatch.setattr(LatentAttention, "slice_tokens", 7)
    upstream, patched = upstream_and_patched(kind)
    tokens = []
    patched.model.layers[0].self_attn.o_proj.register_forward_hook(
        lambda module, args, output: tokens.append(output.size(1))
    )
    want, got = both(upstream, patched, pads, [47, 8, 1])
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)
    assert tokens == [7] * 6 + [5] + [7, 1] + [1]


@pytest.mark.parametrize("index_topk", [1, 2, 16, 64], ids=lambda k: f"{k}-of-48-keys")
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_upstream_transformers_however_many_keys_are_selected(kind, index_topk):
    assert furthest(*upstream_and_patched(kind, index_topk=index_topk)) <= TOLERANCE


def test_logits_equal_upstream_transformers_without_yarn():
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    assert furthest(*upstream_and_patched(rope_parameters=plain)) <= TOLERANCE


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_without_a_cache_makes_its_own(kind, use_cache):
    upstream, patched = upstream_and_patched(kind)

    def run(model, seed):
        ids = token_ids(2, 33, seed)
        out = model(ids[:, :30], use_cache=use_cache)
        if not use_cache:
            return out.logits, out.past_key_values
        # the positions continue after the cache
        return model(ids[:, 30:], past_key_values=out.past_key_values).logits, out.past_key_values

    seed, (want, _) = clear_case(lambda seed: run(upstream, seed))
    got, cache = run(patched, seed)
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)
    assert isinstance(cache, models.PagedCache if use_cache else type(None))


def test_hidden_states_can_be_asked_for():
    upstream, patched = upstream_and_patched()

    def hidden_states(model, seed):
        return model(token_ids(1, 20, seed), output_hidden_states=True).hidden_states

    seed, want = clear_case(lambda seed: hidden_states(upstream, seed))
    got = hidden_states(patched, seed)
    assert len(got) == len(want) == 4
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


# ---- traps: most of these look healthy until the context exceeds index_topk -------------------


def other_rope(rope):
    interleaved = rope.__name__ == "apply_rotary_pos_emb_interleave"
    name = "apply_rotary_pos_emb" if interleaved else "apply_rotary_pos_emb_interleave"
    return staticmethod(getattr(modeling_deepseek_v32, name))


def half_split_mla(monkeypatch, model):
    cls = type(model.model.layers[0].self_attn)
    monkeypatch.setattr(cls, "rope", other_rope(cls.rope))


def other_index_rope(monkeypatch, model):
    cls = type(model.model.layers[0].self_attn)
    monkeypatch.setattr(cls, "index_rope", other_rope(cls.index_rope))


def other_index_dims(monkeypatch, model):
    cls = type(model.model.layers[0].self_attn)
    monkeypatch.setattr(cls, "index_rope_last", not cls.index_rope_last)


def unnormed_index_query(monkeypatch, model):
    index_query = LatentAttention.index_query

    def wrong(self, q_latent, tokens):
        normed = q_latent[..., : self.q_lora_rank]
        return index_query(self, normed / self.q_a_layernorm.weight, tokens)

    monkeypatch.setattr(LatentAttention, "index_query", wrong)


def for_each(part):
    def mutate(change):
        def apply(monkeypatch, model):
            for layer in model.model.layers:
                if target := getattr(layer.self_attn, part, None) if part else layer.self_attn:
                    change(target)

        return apply

    return mutate


TRAPS = {
    "indexer-rotates-the-other-pairs": other_index_rope,
    "indexer-rotates-the-other-dims": other_index_dims,
    "mla-rotates-half-split-pairs": half_split_mla,
    "index-query-from-the-latent-before-its-norm": unnormed_index_query,
    "index-key-without-norm-bias": for_each("indexer")(lambda m: m.k_norm.bias.zero_()),
    "index-weights-without-sign": for_each("indexer")(lambda m: m.weights_proj.weight.abs_()),
    "softmax-scale-of-latent-plus-rope": for_each(None)(lambda m: setattr(m, "scaling", 80**-0.5)),
    "no-selection": for_each("indexer")(lambda m: setattr(m, "index_topk", 64)),
}


@pytest.mark.parametrize("trap", TRAPS.values(), ids=TRAPS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_show(kind, trap, monkeypatch):
    upstream, patched = upstream_and_patched(kind)
    assert furthest(upstream, patched) <= TOLERANCE
    trap(monkeypatch, patched)
    assert furthest(upstream, patched) > WRONG


@pytest.mark.parametrize("kind", KINDS)
def test_an_indexer_may_rotate_its_first_or_last_dims(kind, monkeypatch):
    # the same indexer with its dims in another order, which no score depends on
    upstream, patched = upstream_and_patched(kind)
    attention, width = patched.model.layers[0].self_attn, patched.config.index_head_dim
    rotated = attention.qk_rope_head_dim
    other_index_dims(monkeypatch, patched)
    if not attention.index_rope_last:
        rotated = -rotated
    for layer in patched.model.layers:
        if (indexer := layer.self_attn.indexer) is not None:
            per_head = indexer.wq_b.weight.unflatten(0, (-1, width))
            for rows in (per_head.mT, indexer.wk.weight.mT, *indexer.k_norm.parameters()):
                rows.copy_(rows.roll(-rotated, -1))
    assert furthest(upstream, patched) <= TOLERANCE


def test_the_logits_show_a_softmax_scale_without_yarns_mscale():
    upstream, patched = upstream_and_patched()
    for layer in patched.model.layers:
        assert layer.self_attn.scaling != layer.self_attn.qk_head_dim**-0.5
        layer.self_attn.scaling = layer.self_attn.qk_head_dim**-0.5
    assert furthest(upstream, patched) > WRONG


def replaced(name, wrong):
    """A trap: the method ``name`` computes ``wrong(right method, self, *args)``."""

    def apply(monkeypatch, model):
        cls = type(model.model.layers[0].self_attn)
        right = getattr(cls, name)
        monkeypatch.setattr(cls, name, lambda *args: wrong(right, *args))

    return apply


def no_gate(project, self, output, gate):
    return project(self, output, torch.full_like(gate, torch.inf))


def wider_gate(project, self, output, gate):
    return project(self, output, 2 * gate)


def normed_latent_twice(compress, self, hidden_states):
    normed = compress(self, hidden_states)[..., : self.q_lora_rank]
    return torch.cat([normed, normed], -1)


def latents_exchanged(project, self, hidden_states, q_latent, tokens):
    return project(self, hidden_states, q_latent.roll(self.q_lora_rank, -1), tokens)


def longer_window(monkeypatch, model):
    model.model.layers[1].self_attn.sliding_window += 1


OWN_TRAPS = {
    "axk2": {
        "no-gate": replaced("project_output", no_gate),
        "wider-gate": replaced("project_output", wider_gate),
        "normed-latent-twice": replaced("compress_query", normed_latent_twice),
        "latents-exchanged": replaced("project_query", latents_exchanged),
    },
    "hy_v4": {
        "no-gate": replaced("project_output", no_gate),
        "no-sinks": for_each(None)(lambda m: m.sinks.fill_(-torch.inf)),
        "sinks-of-other-heads": for_each(None)(lambda m: m.sinks.copy_(m.sinks.roll(1))),
        "sinks-scaled": for_each(None)(lambda m: m.sinks.mul_(m.scaling)),
    },
    "dots3_note": {
        "no-gate": replaced("project_output", no_gate),
        "longer-window": longer_window,
        "query-latent-not-scaled": for_each(None)(lambda m: setattr(m, "q_lora_scale", 1.0)),
        "key-latent-not-scaled": for_each(None)(lambda m: setattr(m, "kv_lora_scale", 1.0)),
        "rope-key-not-normed": for_each("k_rope_only_layernorm")(
            lambda m: setattr(m, "forward", lambda key: key)
        ),
    },
}


@pytest.mark.parametrize(
    "kind, trap",
    [
        pytest.param(kind, trap, id=f"{kind}-{name}")
        for kind, traps in OWN_TRAPS.items()
        for name, trap in traps.items()
    ],
)
def test_the_logits_show_what_is_particular_to(kind, trap, monkeypatch):
    upstream, patched = upstream_and_patched(kind)
    trap(monkeypatch, patched)
    assert furthest(upstream, patched) > WRONG


def test_the_logits_show_a_shared_layer_that_does_not_share(monkeypatch):
    upstream, patched = upstream_and_patched("glm_moe_dsa")
    shared = patched.model.layers[1].self_attn
    attend = shared.attend

    def wrong(hidden_states, position_embeddings, step, indices):
        return attend(hidden_states, position_embeddings, step, indices.clamp(max=3))

    monkeypatch.setattr(shared, "attend", wrong)
    assert furthest(upstream, patched) > WRONG


# ---- generate() -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="greedy-left-padded"),
        pytest.param({"prefill_chunk_size": 16}, id="chunked-prefill"),
        pytest.param({"use_cache": False}, id="without-cache"),
        pytest.param({"num_beams": 3}, id="beams"),
        pytest.param({"num_beams": 3, "num_return_sequences": 2}, id="beams-returned"),
        pytest.param({"do_sample": True}, id="sampling"),
        pytest.param({"do_sample": True, "num_return_sequences": 3}, id="sampling-returned"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_generate_equals_upstream_transformers(kind, options):
    options = {"do_sample": False, "max_new_tokens": 8} | options

    def generate(model, seed):
        torch.manual_seed(5)
        return model.generate(**prompt(seed), **options)

    upstream, patched = upstream_and_patched(kind)
    seed, want = clear_case(lambda seed: generate(upstream, seed))
    assert torch.equal(generate(patched, seed), want)


@pytest.mark.parametrize("kind", KINDS)
def test_generation_past_max_position_embeddings_goes_on_as_in_upstream(kind):
    # rotations are computed for any position; transformers logs a reminder
    upstream, patched = upstream_and_patched(kind, max_position_embeddings=48)

    def generate(model, seed):
        return model.generate(**prompt(seed), max_new_tokens=20, do_sample=False)

    seed, want = clear_case(lambda seed: generate(upstream, seed))
    assert want.size(1) == 60 and torch.equal(generate(patched, seed), want)


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_lookup_equals_upstream_greedy_and_takes_back_wrong_guesses(kind, monkeypatch):
    upstream, patched = upstream_and_patched(kind)
    taken_back, crop = [], models.PagedCache.crop

    def spy(self, tokens):
        taken_back.append(int(tokens))
        crop(self, tokens)

    monkeypatch.setattr(models.PagedCache, "crop", spy)

    def generate(model, seed, **options):
        ids = token_ids(1, 12, seed).repeat(1, 3)  # something to look up
        return model.generate(ids, max_new_tokens=16, do_sample=False, **options)

    seed, want = clear_case(lambda seed: generate(upstream, seed))
    assert torch.equal(generate(patched, seed, prompt_lookup_num_tokens=3), want)
    assert min(taken_back) < 0


def test_a_cache_kept_between_calls_continues_the_conversation():
    upstream, patched = upstream_and_patched()

    def two_turns(model, seed, **cache):
        asked, options = prompt(seed), {"max_new_tokens": 6, "do_sample": False}
        first = model.generate(**asked, **options, **cache)
        ids = torch.cat([first, token_ids(3, 10, seed=2)], 1)
        mask = torch.cat([asked["attention_mask"], torch.ones(3, 16, dtype=torch.int64)], 1)
        return model.generate(ids, attention_mask=mask, **options, **cache)

    seed, want = clear_case(lambda seed: two_turns(upstream, seed))
    cache = models.PagedCache(patched, batch_size=3, max_cache_len=96, block_size=16)
    assert torch.equal(two_turns(patched, seed, past_key_values=cache), want)


# ---- the cache ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, rows",
    [
        pytest.param(lambda c: c.crop(-6), [0, 1, 2], id="crop"),
        pytest.param(lambda c: c.crop(0), [0, 1, 2], id="crop-nothing"),
        pytest.param(lambda c: c.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0], id="reorder"),
        pytest.param(lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2], id="repeat"),
        pytest.param(lambda c: c.batch_select_indices(torch.tensor([2, 0])), [2, 0], id="select"),
        pytest.param(lambda c: c.reset(), [0, 1, 2], id="reset"),
        pytest.param(copy.deepcopy, [0, 1, 2], id="deepcopy"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_cache_continues_like_upstreams(kind, change, rows):
    upstream, patched = upstream_and_patched(kind)

    def run(model, cache, seed):
        ids, mask, positions = left_padded(PADS, 40, seed)
        cache.activate_past_recording()  # else upstream cannot crop a sliding window
        feed(model, cache, ids, mask, positions, [40])
        cache = change(cache) or cache
        past = int(cache.get_seq_length())
        # 12 tokens in steps cross a block boundary, so that two sequences sharing one would show
        ids = token_ids(len(rows), past + 12, seed + 1)
        mask = torch.cat([mask[rows, :past], torch.ones(len(rows), 12, dtype=torch.int64)], 1)
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        return [
            model(
                ids[:, t : t + 4],
                attention_mask=mask[:, : t + 4],
                position_ids=positions[:, t : t + 4],
                past_key_values=cache,
            ).logits
            for t in range(past, past + 12, 4)
        ]

    seed, want = clear_case(lambda seed: run(upstream, DynamicCache(config=upstream.config), seed))
    got = run(patched, paged_cache(patched, 3), seed)
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


def test_crop_takes_real_tokens_of_left_padded_rows():
    upstream, patched = upstream_and_patched()

    def run(seed):
        cache = DynamicCache(config=upstream.config)
        return feed(upstream, cache, *left_padded(PADS, 40, seed), [40])[:, -4:]

    seed, want = clear_case(run)
    ids, mask, positions = left_padded(PADS, 40, seed)
    cache = paged_cache(patched, 3)
    wrong = torch.cat([ids[:, :36], token_ids(3, 4, seed=seed + 1)], 1)
    feed(patched, cache, wrong, mask, positions, [40])
    cache.crop(-4)
    assert cache.lengths.tolist() == [36 - n for n in PADS]
    got = patched(
        ids[:, 36:], attention_mask=mask, position_ids=positions[:, 36:], past_key_values=cache
    ).logits
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


def test_shared_layers_have_no_index_cache():
    _, patched = upstream_and_patched("glm_moe_dsa")
    cache = models.PagedCache(patched, 2, 33, block_size=16)
    assert [layer.index is None for layer in cache.layers] == [False, True, False]
    assert cache.max_cache_len == 48 and cache.block_table.shape == (2, 3)
    rows = 7 * 16  # 2 * 3 blocks, and one for pads
    assert cache.nbytes == rows * (3 * (64 + 16) + 2 * 32) * 4


def test_a_pool_that_an_architecture_adds_goes_where_the_others_go(monkeypatch):
    _, patched = upstream_and_patched()
    plain = models.PagedCache(patched, 2, 32, block_size=16)
    cls = type(patched.model.layers[0].self_attn)
    write_index_keys = cls.write_index_keys

    def and_numbers(self, hidden_states, cos, sin, step):
        write_index_keys(self, hidden_states, cos, sin, step)
        numbers = torch.arange(hidden_states[..., 0].numel())
        layer = step.store.layers[self.layer_idx]
        write(layer.number, step.slots, numbers[:, None].expand(-1, 3))

    monkeypatch.setattr(cls, "write_index_keys", and_numbers)
    monkeypatch.setattr(cls, "pools", cls.pools | {"number": Pool(3, torch.int32)})
    with pytest.raises(ValueError, match=r"pools=\{.*got one with pools=.*'number': torch.int32"):
        patched(token_ids(2, 20), past_key_values=plain)
    cache = paged_cache(patched, 2, 32)
    rows = 5 * 16 * 3  # 2 * 2 blocks, and one for pads
    assert cache.nbytes == rows * (64 + 16 + 32) * 4 + rows * 3 * 4
    patched(token_ids(2, 20), past_key_values=cache)
    cache.batch_select_indices(torch.tensor([1, 0, 1]))
    cache.reserve(64)
    cache.reorder_cache(torch.tensor([1, 0, 0]))
    for layer in cache.layers:
        assert layer.number.dtype == torch.int32
        found = layer.number[cache.block_table].flatten(1, 3)[:, :20]
        want = torch.stack([torch.arange(20) + first for first in (0, 20, 20)])
        assert torch.equal(found, want[..., None].expand(-1, -1, 3).int())


def test_a_cache_is_made_for_a_patched_model():
    with pytest.raises(TypeError, match="must be patched .*got one with a DeepseekV32Attention"):
        models.PagedCache(tiny_model(), 1, 16)


def test_out_of_capacity_is_rejected_before_anything_is_written():
    _, patched = upstream_and_patched()
    cache = models.PagedCache(patched, 1, 32, block_size=16)
    patched(token_ids(1, 30), past_key_values=cache)
    before = copy.deepcopy(cache)
    with pytest.raises(ValueError, match="capacity exceeded: holds 30 of 32 tokens.*got 3 more"):
        patched(token_ids(1, 3), past_key_values=cache)
    assert cache.lengths.tolist() == [30] and cache.get_seq_length() == 30
    for now, then in zip(cache.layers, before.layers, strict=True):
        torch.testing.assert_close(now.latent, then.latent, rtol=0, atol=0, equal_nan=True)
    patched(token_ids(1, 2), past_key_values=cache)  # exactly full


def test_a_block_table_that_is_too_small_is_out_of_capacity():
    _, patched = upstream_and_patched()
    cache = models.PagedCache(patched, 1, 64, block_size=16)
    cache.block_table = cache.block_table[:, :2].clone()
    with pytest.raises(ValueError, match="capacity exceeded: holds 0 of 32 tokens.*got 33 more"):
        patched(token_ids(1, 33), past_key_values=cache)
    assert cache.lengths.tolist() == [0]
    with pytest.raises(ValueError, match="max_cache_len of at least 39, got .*max_cache_len=32"):
        patched.generate(token_ids(1, 20), past_key_values=cache, max_new_tokens=20)


@pytest.mark.parametrize("name, sizes", [("batch_size", (0, 16)), ("max_cache_len", (1, 0))])
def test_a_cache_without_room_for_a_token_is_rejected(name, sizes):
    _, patched = upstream_and_patched()
    with pytest.raises(ValueError, match=f"PagedCache: {name} must be at least 1, got 0"):
        models.PagedCache(patched, *sizes)


@pytest.mark.parametrize(
    "change, difference",
    [
        pytest.param({"kv_lora_rank": 32}, "kv_lora_rank=64, got one with kv_lora_rank=32", id="L"),
        pytest.param({"qk_rope_head_dim": 32}, "qk_rope_head_dim=16, got one with .*=32", id="R"),
        pytest.param({"index_head_dim": 64}, "index_head_dim=32, got one with .*=64", id="D"),
        # a layer less would fit, a layer more would fail half-way
        pytest.param({"num_hidden_layers": 2}, "num_hidden_layers=3, got one with .*=2", id="less"),
        pytest.param({"num_hidden_layers": 4}, "num_hidden_layers=3, got one with .*=4", id="more"),
        pytest.param({"dtype": torch.bfloat16}, "dtype=torch.float32, got .*=torch.b", id="dtype"),
    ],
)
def test_the_cache_of_another_model_is_rejected_before_anything_is_written(change, difference):
    _, patched = upstream_and_patched()
    sizes, dtype = {k: v for k, v in change.items() if k != "dtype"}, change.get("dtype")
    other = models.use_custom_pypto(tiny_model(**sizes).to(dtype), block_size=16)
    cache = models.PagedCache(patched, 1, 64, block_size=16)
    patched(token_ids(1, 20), past_key_values=cache)
    before = copy.deepcopy(cache)
    ids, message = token_ids(1, 24), f"PagedCache: created for a model with {difference}"
    with pytest.raises(ValueError, match=message):
        other(ids[:, 20:], past_key_values=cache)
    with pytest.raises(ValueError, match=message):
        other.generate(ids, past_key_values=cache, max_new_tokens=2)
    assert cache.lengths.tolist() == [20] and cache.get_seq_length() == 20
    for now, then in zip(cache.store.pools(), before.store.pools(), strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)


def test_the_cache_of_a_model_with_other_indexers_is_rejected():
    _, patched = upstream_and_patched("glm_moe_dsa")
    _, other = upstream_and_patched("glm_moe_dsa", indexer_types=["full", "full", "shared"])
    with pytest.raises(ValueError, match="indexer_types=.*'full', 'shared', 'full'.*got one with"):
        other(token_ids(1, 4), past_key_values=models.PagedCache(patched, 1, 16))


def test_layers_of_one_model_may_differ_in_their_rows():
    _, patched = upstream_and_patched("dots3_note")
    cache = models.PagedCache(patched, 1, 16, block_size=16)
    rows = [{name: pool.size(-1) for name, pool in layer.pools().items()} for layer in cache.layers]
    indexed, sliding = {"latent": 64, "rope": 16, "index": 32}, {"latent": 80, "rope": 16}
    assert rows == [indexed, sliding, indexed]
    _, other = upstream_and_patched("dots3_note", swa_kv_lora_rank=96)
    with pytest.raises(ValueError, match=r"kv_lora_rank=\[64, 80, 64\], got .*=\[64, 96, 64\]"):
        other(token_ids(1, 4), past_key_values=cache)


# ---- interruption ---------------------------------------------------------------------------


def interrupted_at(model, forward):
    """Ctrl-C in this forward of the model, when its first layer has written and no other has."""
    calls = []

    def hook(module, args, output):
        calls.append(module)
        if len(calls) == forward + 1:
            raise KeyboardInterrupt  # as SIGINT does, which a shell's background job ignores

    return model.model.layers[0].mlp.register_forward_hook(hook)


@pytest.mark.parametrize("forward", [0, 1, 4], ids=["prefill", "first-token", "later"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_can_be_used_again_after_an_interrupted_generation(kind, forward):
    _, patched = upstream_and_patched(kind)
    options = {"max_new_tokens": 8, "do_sample": False}
    seed, want = clear_case(lambda seed: patched.generate(**prompt(seed), **options))
    asked = prompt(seed)
    tokens = asked["input_ids"].size(1)

    cache = paged_cache(patched, len(PADS))
    hook = interrupted_at(patched, forward)
    with pytest.raises(KeyboardInterrupt):
        patched.generate(**asked, **options, past_key_values=cache)
    hook.remove()
    fed = tokens + forward - 1 if forward else 0  # the forward that was interrupted does not count
    assert int(cache.get_seq_length()) == fed
    assert cache.lengths.tolist() == [fed - n if fed else 0 for n in PADS]

    def continued(known, cache):
        mask = torch.cat([asked["attention_mask"], torch.ones(3, known - tokens)], 1)
        return patched.generate(
            want[:, :known],
            attention_mask=mask,
            max_length=want.size(1),
            do_sample=False,
            past_key_values=cache,
        )

    # with all tokens that had come, a streamer's for instance
    assert torch.equal(continued(tokens + forward, copy.deepcopy(cache)), want)
    # with the prompt alone
    if forward:
        message = r"generate: input_ids must have more than the .*: crop\((-\d+)\) or reset"
        with pytest.raises(ValueError, match=message) as rejected:
            continued(tokens, cache)
        cache.crop(int(re.search(message, str(rejected.value))[1]))
    assert torch.equal(continued(tokens, cache), want)


def test_a_forward_that_raises_leaves_the_cache_as_it_was():
    _, patched = upstream_and_patched()
    ids = token_ids(1, 30)
    cache = paged_cache(patched, 1)
    patched(ids[:, :20], past_key_values=cache)

    def fail(module, args, output):
        raise RuntimeError("out of luck")

    want = patched(ids[:, 20:], past_key_values=copy.deepcopy(cache)).logits
    hook = patched.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        patched(ids[:, 20:], past_key_values=cache)
    hook.remove()
    assert cache.lengths.tolist() == [20] and cache.get_seq_length() == 20
    assert torch.equal(patched(ids[:, 20:], past_key_values=cache).logits, want)
    assert cache.lengths.tolist() == [30]


# ---- the patch ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, implementation",
    [(kind, "eager") for kind in KINDS]
    + [(kind, "sdpa") for kind in KINDS if CLASSES[kind][1]._supports_sdpa],
)
def test_use_transformers_undoes_the_patch_to_the_bit(kind, implementation):
    model = tiny_model(kind)
    model.set_attn_implementation(implementation)
    want = trace(model), model(**prompt()).logits, model.generate(**prompt(), max_new_tokens=6)
    weights = {name: t.data_ptr() for name, t in model.state_dict().items()}

    assert models.use_custom_pypto(model) is model
    model.generate(**prompt(), max_new_tokens=6)
    assert trace(model) != want[0]
    assert {name: t.data_ptr() for name, t in model.state_dict().items()} == weights

    assert models.use_transformers(model) is model
    got = trace(model), model(**prompt()).logits, model.generate(**prompt(), max_new_tokens=6)
    assert got[0] == want[0]
    assert torch.equal(got[1], want[1]) and torch.equal(got[2], want[2])
    assert {name: t.data_ptr() for name, t in model.state_dict().items()} == weights


def test_a_patch_leaves_other_models_alone():
    config = tiny_config()
    one, other = (CLASSES["deepseek_v32"][1](config).eval() for _ in range(2))
    want = trace(other), other(**prompt()).logits
    models.use_custom_pypto(one)  # built from the same config object
    one.generate(**prompt(), max_new_tokens=2)
    assert trace(other) == want[0] and torch.equal(other(**prompt()).logits, want[1])


def test_patching_twice_and_undoing_twice_are_harmless():
    upstream, model = tiny_model(), tiny_model()
    models.use_custom_pypto(models.use_custom_pypto(model), block_size=32)
    cache = model(token_ids(1, 4)).past_key_values
    assert cache.block_size == 32
    models.use_transformers(models.use_transformers(model))
    assert trace(model) == trace(upstream)


def through_pickle(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle])
def test_a_copy_of_a_patched_model_is_a_patched_model_of_its_own(duplicate):
    upstream, patched = upstream_and_patched()
    copied = duplicate(patched)
    models.use_transformers(patched)
    assert trace(patched) == trace(upstream)
    assert furthest(upstream, copied) <= TOLERANCE
    cache = copied.generate(
        **prompt(), max_new_tokens=2, return_dict_in_generate=True
    ).past_key_values
    assert isinstance(cache, models.PagedCache)
    assert trace(models.use_transformers(copied)) == trace(upstream)


@pytest.mark.parametrize("kind", KINDS)
def test_a_patched_model_saves_what_upstream_saves(kind, tmp_path):
    upstream, patched = upstream_and_patched(kind)
    for name, model in (("upstream", upstream), ("patched", patched)):
        model.save_pretrained(tmp_path / name)
    saved = [sorted((tmp_path / name).iterdir()) for name in ("upstream", "patched")]
    assert [[file.name for file in files] for files in saved][0] == [f.name for f in saved[1]]
    for a, b in zip(*saved, strict=True):
        assert a.read_bytes() == b.read_bytes(), a.name
    architectures = json.loads((tmp_path / "patched/config.json").read_text())["architectures"]
    assert architectures == [CLASSES[kind][1].__name__]
    assert furthest(upstream, models.load(tmp_path / "patched")) <= TOLERANCE


def test_the_experts_implementation_can_still_be_chosen():
    # generate() does so on every device but CPU
    upstream, patched = upstream_and_patched()
    for model in (upstream, patched):
        model.set_experts_implementation("batched_mm")
        assert model.config._experts_implementation == "batched_mm"
    assert furthest(upstream, patched) <= TOLERANCE


# ---- gradients ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_training_mode_gives_upstream_gradients(kind):
    gradients = []
    for model in upstream_and_patched(kind):
        ids = token_ids(2, 20)
        with torch.enable_grad():
            model.train()(ids, labels=ids).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_evaluation_mode_rejects_a_backward_instead_of_losing_gradients():
    _, patched = upstream_and_patched()
    ids = token_ids(2, 20)
    with torch.enable_grad():
        loss = patched(ids, labels=ids, use_cache=False).loss
        with pytest.raises(RuntimeError, match="npu_sparse_flash_attention_pto"):
            loss.backward()


# ---- rejections -----------------------------------------------------------------------------


def quantised_projection(model):
    class QuantisedLinear(nn.Linear):
        pass

    model.model.layers[1].self_attn.kv_b_proj.__class__ = QuantisedLinear
    return model


def wrapped_forward(model):
    attention = model.model.layers[1].self_attn
    attention.forward = attention.forward
    return model


def llama():
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        vocab_size=8,
    )
    return LlamaForCausalLM(config)


@pytest.mark.parametrize(
    "model, error, message",
    [
        pytest.param(llama, TypeError, "got .*LlamaForCausalLM", id="another-model"),
        pytest.param(lambda: tiny_model().model, TypeError, "got .*V32Model", id="no-head"),
        pytest.param(
            lambda: tiny_model(index_topk=2049),
            ValueError,
            "index_topk must be 1 to 2048.*got 2049",
            id="index-topk",
        ),
        pytest.param(
            lambda: quantised_projection(tiny_model()),
            TypeError,
            r"kv_b_proj of layer 1 must be a plain torch.nn.Linear \(.*\), got QuantisedLinear",
            id="quantised",
        ),
        pytest.param(
            lambda: wrapped_forward(tiny_model()),
            TypeError,
            "layer 1 must be a plain DeepseekV32Attention, got .*a wrapped forward",
            id="wrapped",
        ),
    ],
)
def test_a_model_that_cannot_be_patched_is_rejected_untouched(model, error, message):
    model = model()
    before = {name: type(m) for name, m in model.named_modules()}
    with pytest.raises(error, match=f"use_custom_pypto: .*{message}"):
        models.use_custom_pypto(model)
    assert {name: type(m) for name, m in model.named_modules()} == before


def test_every_architecture_is_tested_and_named_in_the_rejection_of_others():
    # in files of their own
    others = {"DeepseekV4", "Glm5Next", "MistralLarge4"}
    tested = [name for _, name in NAMES.values()]
    assert {x for x in ARCHITECTURES if not x.startswith(tuple(others))} == set(tested)
    root = Path(__file__).parents[1]
    for document in (root / "README.md", root / "README.zh-CN.md"):
        assert all(f"`{name}`" in document.read_text() for name in ARCHITECTURES)
    expected = f"a {' or '.join(available())} of transformers"
    with pytest.raises(TypeError, match=f"use_custom_pypto: model must be {expected}, got .*Llama"):
        models.use_custom_pypto(llama())


def test_what_architectures_share_knows_none_of_them():
    folder = Path(models.__file__).parent
    kinds = [*NAMES, "deepseek_v4", "glm5_next", "mistral_large4"]
    assert {path.parent.name for path in folder.glob("*/__init__.py")} == {*kinds, "cache"}
    shared = {*folder.glob("*.py"), *folder.glob("cache/*.py")}
    for path in shared - {folder / "architectures.py"}:
        found = re.search("|".join(["transformers.models", *kinds]), path.read_text())
        assert found is None, f"{path.name} names {found[0]}"


def test_use_transformers_names_what_it_cannot_undo():
    with pytest.raises(TypeError, match="use_transformers: model must be .*got .*Llama"):
        models.use_transformers(llama())


@pytest.mark.parametrize("block_size", [0, 24, -16, 2048])
def test_block_sizes_the_ops_do_not_take_are_rejected(block_size):
    with pytest.raises(ValueError, match=f"multiple of 16 from 16 to 1024, got {block_size}"):
        models.use_custom_pypto(tiny_model(), block_size=block_size)


def right_padded():
    mask = torch.ones(2, 10, dtype=torch.int64)
    mask[1, -3:] = 0
    return mask


@pytest.mark.parametrize(
    "call, error, message",
    [
        pytest.param(
            lambda m: m(token_ids(2, 10), attention_mask=right_padded()),
            ValueError,
            "attention_mask must have all padding on the left, got a 0 after a 1",
            id="right-padding",
        ),
        pytest.param(
            lambda m: m.generate(token_ids(2, 10), attention_mask=right_padded(), max_new_tokens=1),
            ValueError,
            "padding_side = 'left'",
            id="right-padding-generate",
        ),
        pytest.param(
            lambda m: m(token_ids(1, 4), attention_mask=torch.ones(1, 1, 4, 4)),
            ValueError,
            r"attention_mask must be \[B, tokens so far\].*got \[1, 1, 4, 4\]",
            id="4d-mask",
        ),
        pytest.param(
            lambda m: m(token_ids(1, 4), past_key_values=DynamicCache(config=m.config)),
            TypeError,
            "past_key_values must be a models.PagedCache, got DynamicCache",
            id="upstream-cache",
        ),
        pytest.param(
            lambda m: m.generate(token_ids(1, 4), cache_implementation="static", max_new_tokens=1),
            ValueError,
            "cache_implementation must be None or 'dynamic' .*, got 'static'",
            id="cache-implementation",
        ),
        pytest.param(
            lambda m: m(token_ids(3, 4), past_key_values=models.PagedCache(m, 2, 16)),
            ValueError,
            r"the batch must be 2 \(batch_size\), got 3",
            id="batch",
        ),
        pytest.param(
            lambda m: m.generate(
                token_ids(1, 10),
                past_key_values=models.PagedCache(m, 1, 16, block_size=16),
                max_new_tokens=20,
            ),
            ValueError,
            "max_cache_len of at least 29, got PagedCache.*max_cache_len=16",
            id="generate-longer-than-the-cache",
        ),
        pytest.param(
            lambda m: m.generate(
                token_ids(2, 10), past_key_values=models.PagedCache(m, 1, 64), max_new_tokens=2
            ),
            ValueError,
            r"must be a PagedCache with batch_size=2 .*got PagedCache\(batch_size=1",
            id="generate-with-another-batch",
        ),
        pytest.param(
            lambda m: m(token_ids(1, 4), output_attentions=True),
            ValueError,
            "output_attentions must be False .the ops never form",
            id="output-attentions",
        ),
    ],
)
def test_a_call_the_patched_model_cannot_serve_is_rejected(call, error, message):
    _, patched = upstream_and_patched()
    with pytest.raises(error, match=message):
        call(patched)


def test_an_upstream_model_rejects_a_paged_cache():
    upstream, patched = upstream_and_patched()
    with pytest.raises(TypeError, match="model must be patched by models.use_custom_pypto"):
        upstream(token_ids(1, 4), past_key_values=models.PagedCache(patched, 1, 16))


def test_a_shared_first_layer_is_rejected():
    _, patched = upstream_and_patched("glm_moe_dsa", indexer_types=["shared", "full", "full"])
    with pytest.raises(
        ValueError, match="must have a 'full' layer before layer 0, which is 'shared'"
    ):
        patched(token_ids(1, 4))


# ---- bf16 -----------------------------------------------------------------------------------


@pytest.mark.parametrize("index_topk", [8, 64], ids=["selection", "all-keys"])
@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_as_close_to_float32_as_upstream_bf16(kind, index_topk, tmp_path):
    # selection and routing are discontinuous: bf16 logits may differ from upstream's as much as
    # upstream's differ from float32's. All three are loaded: model.to() would also round inv_freq.
    tiny_model(kind, index_topk=index_topk).save_pretrained(tmp_path)

    def logits(dtype, patch=False):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        model = models.use_custom_pypto(model) if patch else model
        return model(token_ids(8, 60), use_cache=False).logits.float()

    exact = logits(torch.float32)
    upstream_error = (logits(torch.bfloat16) - exact).abs().mean()
    assert (logits(torch.bfloat16, patch=True) - exact).abs().mean() <= 1.2 * upstream_error
