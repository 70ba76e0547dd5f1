"""Patched models where others run theirs: packed rows, autocast, offloaded weights, inference mode,
decode loops on the cache that a forward returned."""

import copy

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from model_harness import (
    TOLERANCES,
    assert_close,
    assert_same,
    in_steps,
    left_padded,
    no_grad_and_one_thread,  # noqa: F401
    patched_model,
    upstream_and_patched,
)
from tiny import KINDS, clear_case, representatives, tiny_model, token_ids
from transformers import AutoModelForCausalLM

import custom_pypto
from custom_pypto import models
from custom_pypto.models import CACHE

# ---- packed sequences -------------------------------------------------------------------------

ONE_AFTER_ANOTHER = [[*range(12), *range(8)]]
PACKED = {
    "one-row": ONE_AFTER_ANOTHER,
    "same-for-two-rows": ONE_AFTER_ANOTHER,
    "two-rows": [*ONE_AFTER_ANOTHER, [*range(3), *range(15), *range(2)]],
    "one-of-two-rows": [[*range(20)], *ONE_AFTER_ANOTHER],
    "positions-of-left-padding": [[0] * 4 + [*range(16)]],
}


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("kind", representatives(KINDS))
def test_packed_sequences_do_not_see_each_other(kind, name):
    upstream, patched = upstream_and_patched(kind)
    positions = torch.tensor(PACKED[name])
    ids = token_ids(1 if name == "one-row" else 2, 20)

    def logits(model, **options):
        return model(ids, position_ids=positions, use_cache=False, **options).logits

    want = logits(upstream)
    assert (want - upstream(ids, use_cache=False).logits).abs().max() > 0.1
    torch.testing.assert_close(logits(patched), want, rtol=0, atol=TOLERANCES[kind])
    # attention of each on its own
    if name == "one-row":
        alone = [patched(part, use_cache=False).logits for part in (ids[:, :12], ids[:, 12:])]
        assert_close(torch.cat(alone, 1), want)
    # a mask says that it is one sequence; as in upstream, so does a cache
    mask = torch.ones_like(ids)
    masked = [logits(model, attention_mask=mask) for model in (patched, upstream)]
    assert_close(*masked)
    cached = [model(ids, position_ids=positions).logits for model in (patched, upstream)]
    assert_close(*cached)


@pytest.mark.parametrize("kind", representatives(KINDS))
def test_a_compiled_forward_separates_packed_sequences_too(kind):
    upstream, patched = upstream_and_patched(kind, num_hidden_layers=2)
    compiled = torch.compile(patched.forward, backend="eager", fullgraph=True)
    for positions in (ONE_AFTER_ANOTHER, [[*range(20)]]):
        kwargs = {"position_ids": torch.tensor(positions), "use_cache": False}
        want = upstream(token_ids(1, 20), **kwargs).logits
        got = compiled(token_ids(1, 20), **kwargs).logits
        assert_close(got, want)


@pytest.mark.parametrize("kind", representatives(KINDS))
def test_positions_of_one_sequence_still_run_on_the_ops(kind, monkeypatch):
    patched, calls = patched_model(kind), []
    op = custom_pypto.npu_sparse_flash_attention_pto

    def spy(*args, **kwargs):
        calls.append(args)
        return op(*args, **kwargs)

    monkeypatch.setattr(custom_pypto, "npu_sparse_flash_attention_pto", spy)
    patched(token_ids(2, 20), position_ids=torch.arange(5, 25)[None], use_cache=False)
    assert len(calls) == 3
    patched(token_ids(2, 20), position_ids=torch.tensor(ONE_AFTER_ANOTHER), use_cache=False)
    assert len(calls) == 3


# ---- autocast ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("index_topk", [8, 64], ids=["selection", "all-keys"])
@pytest.mark.parametrize("kind", representatives(KINDS))
def test_autocast_is_as_close_to_float32_as_upstream_autocast(kind, index_topk, dtype):
    # selection and routing are discontinuous: in bf16 upstream and patched model differ as well
    upstream, patched = upstream_and_patched(kind, index_topk=index_topk)
    errors = torch.zeros(2)
    for seed in range(4):
        ids = token_ids(8, 60, seed)
        exact = in_steps(upstream, ids, 56)
        for i, model in enumerate((upstream, patched)):
            with torch.autocast("cpu", dtype):
                got = in_steps(model, ids, 56)
            assert got.dtype == dtype
            errors[i] += (got.float() - exact).abs().mean()
    assert errors[1] <= 1.2 * errors[0]


@pytest.mark.parametrize("kind", representatives(KINDS))
def test_generate_under_autocast_shares_its_cache_with_what_is_outside(kind):
    patched, ids = patched_model(kind), token_ids(2, 20)
    with torch.autocast("cpu", torch.bfloat16):
        generated = patched.generate(
            ids, max_new_tokens=8, do_sample=False, return_dict_in_generate=True
        )
        cache, want = models.PagedCache(patched, 2, 32), ids
        for _ in range(8):
            new = want[:, int(cache.get_seq_length()) :]
            logits = patched(new, cache=cache).logits
            want = torch.cat([want, logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(generated.sequences, want)
    assert generated[CACHE].layers[0].pools["latent"].dtype == torch.float32
    patched.generate(want, cache=generated[CACHE], max_length=31)
    patched(want[:, -1:], cache=cache)


# ---- offloaded weights ------------------------------------------------------------------------


def logits_and_tokens(model, seed):
    ids = token_ids(2, 50, seed)
    tokens = model.generate(ids, max_new_tokens=6, do_sample=False)
    return torch.cat([model(ids).logits.flatten(), tokens.flatten().float()])


OFFLOAD = {
    "cpu": lambda model, folder: cpu_offload(model, torch.device("cpu")),
    "disk": lambda model, folder: disk_offload(model, folder, torch.device("cpu")),
    "whole-attention": lambda model, folder: cpu_offload(
        model,
        torch.device("cpu"),
        preload_module_classes=[type(model.model.layers[0].self_attn).__name__],
    ),
}


def assert_same_until_restored(upstream, model):
    """A model that is patched, and unpatched."""
    seed, want = clear_case(lambda seed: logits_and_tokens(upstream, seed))
    assert_close(logits_and_tokens(model, seed), want, upstream.config.model_type)
    assert_close(logits_and_tokens(models.use_transformers(model), seed), want)


def devices(model):
    return {weight.device.type for weight in model.model.layers[0].self_attn.parameters()}


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("offload", OFFLOAD)
@pytest.mark.parametrize("kind", representatives([*KINDS, "deepseek_v4"]))
def test_offloaded_weights_are_brought_in(kind, offload, order, tmp_path):
    model = tiny_model(kind)
    if order == "after":
        models.use_custom_pypto(model, block_size=16)
    OFFLOAD[offload](model, tmp_path)
    if order == "before":
        models.use_custom_pypto(model, block_size=16)
    assert devices(model) == {"meta"}
    assert_same_until_restored(tiny_model(kind), model)
    assert devices(model) == {"meta"}  # out again


def map_of_devices(model):
    names = [f"model.{name}" for name, _ in model.model.named_children() if name != "layers"]
    names += ["lm_head", "model.layers.0"]
    return dict.fromkeys(names, "cpu") | {"model.layers.1": "disk", "model.layers.2": "disk"}


@pytest.mark.parametrize("first", ["dispatched", "patched"])
@pytest.mark.parametrize("kind", representatives(KINDS))
def test_a_model_on_several_devices(kind, first, tmp_path):
    upstream = tiny_model(kind)
    options = map_of_devices(upstream), tmp_path / "offloaded"
    if first == "patched":
        model = dispatch_model(patched_model(kind), options[0], offload_dir=options[1])
    else:
        upstream.save_pretrained(tmp_path)
        device_map, offload_folder = options
        model = models.use_custom_pypto(
            AutoModelForCausalLM.from_pretrained(
                tmp_path, device_map=device_map, offload_folder=offload_folder
            ),
            block_size=16,
        )
    assert_same_until_restored(upstream, model)


@pytest.mark.parametrize("kind", representatives(KINDS))
def test_a_forward_that_someone_else_wrapped_is_rejected_with_the_order_that_works(kind):
    def wrap(model):
        attention = model.model.layers[1].self_attn
        forward = attention.forward
        attention.forward = lambda *args, **kwargs: calls.append(1) or forward(*args, **kwargs)
        return model

    calls = []
    with pytest.raises(TypeError, match="layer 1 .* a wrapped forward .*; patch before wrapping"):
        models.use_custom_pypto(wrap(tiny_model(kind)))
    # accelerate's own hook around it brings nothing in
    add_hook_to_module(model := wrap(tiny_model(kind)), AlignDevicesHook())
    add_hook_to_module(model.model.layers[1].self_attn, AlignDevicesHook())
    with pytest.raises(TypeError, match="layer 1 .* a wrapped forward .*; patch before wrapping"):
        models.use_custom_pypto(model)
    assert_same(tiny_model(kind), wrap(patched_model(kind)), logits_and_tokens)
    assert calls


@pytest.mark.parametrize("kind", representatives(KINDS))
def test_layers_on_several_devices_are_rejected(kind):
    model = patched_model(kind)
    model.model.layers[2].to("meta")
    message = "one device, got layer 0 on cpu and layer 2 on meta; .*device_map={'': 'cpu'}"
    with pytest.raises(ValueError, match=message):
        model(token_ids(1, 4))


# ---- inference mode ---------------------------------------------------------------------------


@pytest.mark.parametrize("made", ["by-a-forward", "by-the-caller", "by-generate"])
@pytest.mark.parametrize("kind", representatives(KINDS))
def test_a_cache_made_in_inference_mode_is_of_use_outside(kind, made):
    upstream, patched = upstream_and_patched(kind)

    def run(model, seed):
        ids = token_ids(2, 60, seed)
        with torch.inference_mode():
            cache = None
            if made == "by-the-caller" and model is patched:
                cache = models.PagedCache(model, 2, 96, block_size=16)
            if made == "by-generate":
                cache = model.generate(ids[:, :20], max_new_tokens=1, return_dict_in_generate=True)[
                    CACHE
                ]
            else:
                cache = model(ids[:, :20], use_cache=True, **{CACHE: cache})[CACHE]
        if made == "by-generate":
            return model.generate(ids[:, :21], **{CACHE: cache}, max_length=24)
        parts = []
        cache.activate_past_recording()  # else upstream cannot crop a sliding window
        for t in range(20, 60, 2):  # a cache that grows does so here, and once more inside
            with torch.inference_mode(40 < t < 50):
                parts.append(model(ids[:, t : t + 2], **{CACHE: cache}).logits)
        cache.reorder_cache(torch.tensor([1, 0]))
        with torch.inference_mode():
            cache.batch_repeat_interleave(2)
        cache.crop(-3)
        ids = ids[:, 57:].flip(0).repeat_interleave(2, 0)
        return torch.cat([*parts, model(ids, **{CACHE: cache}).logits[::2]], 1)

    assert_same(upstream, patched, run)


# ---- caches that grow -------------------------------------------------------------------------


def loop(model, seed, pads=(0, 0), end=66, forward=None):
    """The logits of a prompt, 20 tokens, and of those up to ``end``, on the cache that the prompt's
    returned; and that cache."""
    forward, (ids, mask, positions) = forward or model, left_padded(pads, end, seed)
    logits, cache = [], None
    for start, stop in [(0, 20), *((t, t + 1) for t in range(20, end))]:
        output = forward(
            ids[:, start:stop].clone(),
            attention_mask=mask[:, :stop] if max(pads) else None,
            position_ids=positions[:, start:stop],
            **{CACHE: cache},
            use_cache=True,
        )
        cache = output[CACHE]
        logits.append(output.logits)
    return torch.cat(logits, 1)[mask.bool()], cache


@pytest.mark.parametrize("kind", representatives([*KINDS, "deepseek_v4"]))
def test_a_loop_on_the_cache_of_a_forward_goes_on_and_on(kind):
    upstream, patched = upstream_and_patched(kind)
    for pads in [(0, 0), (0, 9)] if kind in KINDS else [(0, 0)]:
        seed, (want, _) = clear_case(lambda seed, pads=pads: loop(upstream, seed, pads))
        got, cache = loop(patched, seed, pads)
        assert_close(got, want, kind)
        # 36 tokens at first, in blocks of 16; then twice that
        assert cache.max_cache_len == 96 and cache.lengths.tolist() == [66 - n for n in pads]


@pytest.mark.parametrize("kind", representatives(KINDS))
def test_a_cache_grows_by_doubling_and_keeps_what_it_has(kind):
    model = patched_model(kind)
    cache, sizes = model(token_ids(2, 20))[CACHE], []
    for t in range(20, 100):
        table, pools = cache.block_table.clone(), [pool.clone() for pool in cache.store.pools()]
        model(token_ids(2, 1, t), cache=cache)
        if cache.max_cache_len not in sizes:
            sizes.append(cache.max_cache_len)
        blocks = cache.block_table
        assert torch.equal(blocks[:, : table.size(1)], table)
        assert blocks.unique().tolist() == list(range(1, 1 + blocks.numel()))
        for now, then in zip(cache.store.pools(), pools, strict=True):
            for row in table[:, : t // 16].flatten().tolist():  # blocks that were full
                assert torch.equal(now[row], then[row])
    assert sizes == [48, 96, 192]


@pytest.mark.parametrize("kind", representatives(KINDS))
def test_a_compiled_loop_on_the_cache_of_a_forward_is_right_too(kind):
    patched = patched_model(kind, num_hidden_layers=1)
    want, _ = loop(patched, 1, end=52)
    compiled = torch.compile(patched.forward, backend="eager")
    got, cache = loop(patched, 1, end=52, forward=compiled)
    assert_close(got, want)
    assert cache.max_cache_len == 96


@pytest.mark.parametrize("kind", representatives(KINDS))
def test_a_whole_graph_wants_a_cache_of_a_fixed_size(kind):
    patched = patched_model(kind, num_hidden_layers=1)
    compiled = torch.compile(patched.forward, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=rf"pass {CACHE}=models.PagedCache\(...\)"):
        compiled(token_ids(1, 20))
    cache = patched(token_ids(1, 20))[CACHE]
    with pytest.raises(Exception, match="a cache created by a forward grows"):
        compiled(token_ids(1, 1), cache=cache)


@pytest.mark.parametrize("kind", representatives(KINDS))
def test_a_cache_of_the_caller_grows_only_when_told_to(kind):
    model = patched_model(kind)
    cache = models.PagedCache(model, 2, 32, block_size=16)
    addresses = [pool.data_ptr() for pool in cache.store.pools()]
    model(token_ids(2, 32), cache=cache)
    with pytest.raises(ValueError, match="capacity exceeded: holds 32 of 32 tokens"):
        model(token_ids(2, 1), cache=cache)
    with pytest.raises(ValueError, match="max_cache_len of at least"):
        model.generate(token_ids(2, 33), cache=cache, max_new_tokens=3)
    cache.reserve(20)
    assert [pool.data_ptr() for pool in cache.store.pools()] == addresses
    cache.reserve(33)
    assert cache.max_cache_len == 64
    model(token_ids(2, 32), cache=cache)
    with pytest.raises(ValueError, match="capacity exceeded: holds 64 of 64 tokens"):
        model(token_ids(2, 1), cache=cache)


@pytest.mark.parametrize("kind", representatives(KINDS))
def test_a_cache_that_cannot_grow_says_so_and_can_be_used_on(kind, monkeypatch):
    model, ids = patched_model(kind), token_ids(2, 70)
    cache = model(ids[:, :48])[CACHE]
    other = copy.deepcopy(cache)
    empty, pools = torch.empty, []

    def no_memory(shape, *args, **keywords):
        pools.extend([shape] * (len(shape) == 4))
        if len(pools) == 4:  # half-way
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return empty(shape, *args, **keywords)

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError) as error:
        patch.setattr(torch, "empty", no_memory)
        model(ids[:, 48:], cache=cache)
    assert "cannot grow from max_cache_len=64 to 128 on cpu; pass a models.Paged" in str(
        error.value
    )
    assert cache.max_cache_len == 64 and cache.lengths.tolist() == [48, 48]
    want = model(ids[:, 48:], cache=other).logits
    assert torch.equal(model(ids[:, 48:], cache=cache).logits, want)
