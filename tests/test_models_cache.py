"""The paged cache of a patched model: changed like upstream's, and left alone by what cannot be
served."""

import copy
import re

import pytest
import torch
from model_harness import (
    CHANGES,
    PADS,
    assert_close,
    both,
    continued,
    feed,
    interrupted,
    left_padded,
    no_grad_and_one_thread,  # noqa: F401
    paged_cache,
    patched_model,
    prompt,
    unchanged,
    upstream_and_patched,
)
from tiny import ALL_KINDS, KINDS, OWN, clear_case, marks_of, tiny_model, token_ids
from transformers import DynamicCache

from custom_pypto import models
from custom_pypto.models import CACHE
from custom_pypto.models.cache.layout import Pool
from custom_pypto.rows.parts import write


def crop(tokens):
    return lambda cache: cache.crop(-tokens), [0, 1, 2]


@pytest.mark.parametrize("change, rows", [crop(6), *CHANGES.values()], ids=["crop", *CHANGES])
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
                **{CACHE: cache},
            ).logits
            for t in range(past, past + 12, 4)
        ]

    seed, want = clear_case(lambda seed: run(upstream, DynamicCache(config=upstream.config), seed))
    assert_close(run(patched, paged_cache(patched, 3), seed), want)


# tokens fed before the change, and crops that the rings and states of the cache can spare
FED = {"deepseek_v4": [57, 60]}
CROPS = {"deepseek_v4": [16, 3, 60], "glm5_next": [50]}


@pytest.mark.parametrize(
    "kind, fed, change, rows",
    [
        pytest.param(kind, fed, *change, id=f"{kind}-{fed}-tokens-{name}", marks=marks_of(kind))
        for kind in OWN
        for fed in FED.get(kind, [50])
        for name, change in (
            {f"crop-{n}": crop(n) for n in CROPS.get(kind, [13])}
            | {"reserve": (lambda cache: cache.reserve(200), [0, 1, 2])}
            | CHANGES
        ).items()
    ],
)
def test_a_changed_cache_continues_as_if_its_tokens_had_been_fed(kind, fed, change, rows):
    upstream, patched = upstream_and_patched(kind)
    ids, cache = token_ids(3, fed), paged_cache(patched, 3)
    patched(ids, cache=cache)
    cache = change(cache) or cache
    left, steps = int(cache.get_seq_length()), [4, 1, 1, 7, 17]
    # other tokens than those that were cropped
    whole = torch.cat([ids[rows, :left], token_ids(len(rows), sum(steps), 7)], 1)
    want = upstream(whole, use_cache=False).logits[:, left:]
    assert_close(continued(patched, cache, whole, left, steps), want, kind)


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
        ids[:, 36:], attention_mask=mask, position_ids=positions[:, 36:], cache=cache
    ).logits
    assert_close(got, want)


def test_a_recurrent_state_cannot_be_taken_back():
    patched = patched_model("glm5_next")
    cache = paged_cache(patched, 1)
    patched(token_ids(1, 50), cache=cache)
    with pytest.raises(ValueError, match="must be at least 0 .*or at most -50 .*got -1"):
        cache.crop(-1)


def test_a_cache_may_be_shorter_than_a_group_of_tokens():
    upstream, patched = upstream_and_patched("glm5_next", index_kpool=32, index_topk=32)
    ids = token_ids(1, 12)
    got = patched(ids, cache=paged_cache(patched, 1, 16)).logits
    assert_close(got, upstream(ids, use_cache=False).logits, "glm5_next")


@pytest.mark.parametrize("group", [3, 5, 24])
def test_blocks_need_be_no_multiple_of_a_group_of_tokens(group):
    changes = {"index_kpool": group, "index_topk": 2 * group}
    want, got = both(*upstream_and_patched("glm5_next", **changes), [0, 0], [47, 1, 1, 70, 1, 9])
    assert_close(got, want, "glm5_next")


# ---- pools ------------------------------------------------------------------------------------

LATENT, ROPE, INDEX = {"latent": 64}, {"rope": 16}, {"index": 32}
FULL = LATENT | ROPE | INDEX
WIDTHS = {
    "glm_moe_dsa": [FULL, LATENT | ROPE, FULL],
    "dots3_note": [FULL, {"latent": 80} | ROPE, FULL],
    "mistral_large4": [FULL, LATENT | ROPE, LATENT | INDEX, INDEX],
}


@pytest.mark.parametrize("kind", [kind for kind in WIDTHS if kind in ALL_KINDS])
def test_a_layer_has_the_pools_and_widths_that_it_needs(kind):
    cache = models.PagedCache(patched_model(kind), 2, 33, block_size=16)
    rows = [{name: pool.size(-1) for name, pool in layer.pools.items()} for layer in cache.layers]
    assert rows == WIDTHS[kind]
    assert cache.max_cache_len == 48 and cache.block_table.shape == (2, 3)
    tokens = 7 * 16  # 2 * 3 blocks, and one for pads
    assert cache.nbytes == tokens * 4 * sum(sum(widths.values()) for widths in WIDTHS[kind])


def test_a_pool_that_an_architecture_adds_goes_where_the_others_go(monkeypatch):
    patched = patched_model()
    plain = models.PagedCache(patched, 2, 32, block_size=16)
    cls = type(patched.model.layers[0].self_attn)
    write_index_keys = cls.write_index_keys

    def and_numbers(self, hidden_states, cos, sin, step, layer):
        write_index_keys(self, hidden_states, cos, sin, step, layer)
        numbers = torch.arange(hidden_states[..., 0].numel())
        write(layer.pools["number"], step.slots, numbers[:, None].expand(-1, 3))

    monkeypatch.setattr(cls, "write_index_keys", and_numbers)
    monkeypatch.setattr(cls, "pools", cls.pools | {"number": Pool(3, torch.int32)})
    with pytest.raises(ValueError, match=r"pools=\{.*got one with pools=.*'number': torch.int32"):
        patched(token_ids(2, 20), cache=plain)
    cache = paged_cache(patched, 2, 32)
    rows = 5 * 16 * 3  # 2 * 2 blocks, and one for pads
    assert cache.nbytes == rows * (64 + 16 + 32) * 4 + rows * 3 * 4
    patched(token_ids(2, 20), cache=cache)
    cache.batch_select_indices(torch.tensor([1, 0, 1]))
    cache.reserve(64)
    cache.reorder_cache(torch.tensor([1, 0, 0]))
    for layer in cache.layers:
        assert layer.pools["number"].dtype == torch.int32
        found = layer.pools["number"][cache.block_table].flatten(1, 3)[:, :20]
        want = torch.stack([torch.arange(20) + first for first in (0, 20, 20)])
        assert torch.equal(found, want[..., None].expand(-1, -1, 3).int())


# ---- what does not fit ------------------------------------------------------------------------


def test_out_of_capacity_is_rejected_before_anything_is_written():
    patched = patched_model()
    cache = models.PagedCache(patched, 1, 32, block_size=16)
    patched(token_ids(1, 30), cache=cache)
    message = "capacity exceeded: holds 30 of 32 tokens.*got 3 more"
    with unchanged(cache), pytest.raises(ValueError, match=message):
        patched(token_ids(1, 3), cache=cache)
    patched(token_ids(1, 2), cache=cache)  # exactly full


def test_a_block_table_that_is_too_small_is_out_of_capacity():
    patched = patched_model()
    cache = models.PagedCache(patched, 1, 64, block_size=16)
    cache.block_table = cache.block_table[:, :2].clone()
    with pytest.raises(ValueError, match="capacity exceeded: holds 0 of 32 tokens.*got 33 more"):
        patched(token_ids(1, 33), cache=cache)
    assert cache.lengths.tolist() == [0]
    with pytest.raises(ValueError, match="max_cache_len of at least 39, got .*max_cache_len=32"):
        patched.generate(token_ids(1, 20), cache=cache, max_new_tokens=20)


@pytest.mark.parametrize(
    "batch, sizes, message",
    [
        (1, (1, 16), "max_cache_len of at least 29, got PagedCache.*max_cache_len=16"),
        (2, (1, 64), r"with batch_size=2 .*got PagedCache\(batch_size=1"),
    ],
    ids=["longer", "another-batch"],
)
def test_a_cache_that_generate_would_outgrow_is_rejected(batch, sizes, message):
    patched = patched_model()
    cache = models.PagedCache(patched, *sizes, block_size=16)
    with pytest.raises(ValueError, match=message):
        patched.generate(token_ids(batch, 10), cache=cache, max_new_tokens=20)


def test_another_batch_is_rejected():
    patched = patched_model()
    with pytest.raises(ValueError, match=r"the batch must be 2 \(batch_size\), got 3"):
        patched(token_ids(3, 4), cache=models.PagedCache(patched, 2, 16))


@pytest.mark.parametrize("name, sizes", [("batch_size", (0, 16)), ("max_cache_len", (1, 0))])
def test_a_cache_without_room_for_a_token_is_rejected(name, sizes):
    with pytest.raises(ValueError, match=f"PagedCache: {name} must be at least 1, got 0"):
        models.PagedCache(patched_model(), *sizes)


# ---- a cache of another model -----------------------------------------------------------------


# "less" would fit, "more" would fail half-way
OTHER_MODELS = {
    "L": ("deepseek_v32", {"kv_lora_rank": 32}, "kv_lora_rank=64, got one with kv_lora_rank=32"),
    "R": ("deepseek_v32", {"qk_rope_head_dim": 32}, "qk_rope_head_dim=16, got one with .*=32"),
    "D": ("deepseek_v32", {"index_head_dim": 64}, "index_head_dim=32, got one with .*=64"),
    "less": ("deepseek_v32", {"num_hidden_layers": 2}, "num_hidden_layers=3, got one with .*=2"),
    "more": ("deepseek_v32", {"num_hidden_layers": 4}, "num_hidden_layers=3, got one with .*=4"),
    "dtype": ("deepseek_v32", {"dtype": torch.bfloat16}, "dtype=torch.float32, got .*=torch.b"),
    "indexers": (
        "glm_moe_dsa",
        {"indexer_types": ["full", "full", "shared"]},
        "indexer_types=.*'full', 'shared', 'full'.*got one with",
    ),
    "L-of-some-layers": (
        "dots3_note",
        {"swa_kv_lora_rank": 96},
        r"kv_lora_rank=\[64, 80, 64\], got .*=\[64, 96, 64\]",
    ),
    "window": ("deepseek_v4", {"sliding_window": 32}, "sliding_window=16, got one with .*=32"),
}
OTHER_MODELS = {name: of for name, of in OTHER_MODELS.items() if of[0] in ALL_KINDS}


@pytest.mark.parametrize("kind, change, difference", OTHER_MODELS.values(), ids=OTHER_MODELS)
def test_the_cache_of_another_model_is_rejected_before_anything_is_written(
    kind, change, difference
):
    patched = patched_model(kind)
    sizes = {name: value for name, value in change.items() if name != "dtype"}
    other = models.use_custom_pypto(tiny_model(kind, **sizes).to(change.get("dtype")))
    cache = models.PagedCache(patched, 1, 64, block_size=16)
    patched(token_ids(1, 20), cache=cache)
    ids, message = token_ids(1, 24), f"PagedCache: created for a model with {difference}"
    with unchanged(cache):
        with pytest.raises(ValueError, match=message):
            other(ids[:, 20:], cache=cache)
        with pytest.raises(ValueError, match=message):
            other.generate(ids, cache=cache, max_new_tokens=2)


def test_a_cache_is_made_for_a_patched_model():
    with pytest.raises(TypeError, match="must be patched .*got one with a DeepseekV32Attention"):
        models.PagedCache(tiny_model(), 1, 16)


@pytest.mark.parametrize("kind", ["deepseek_v32", "deepseek_v4"])
def test_an_upstream_model_rejects_a_paged_cache(kind):
    upstream, patched = upstream_and_patched(kind)
    message = "model must be patched by models.use_custom_pypto"
    with pytest.raises(TypeError, match=message):
        upstream(token_ids(1, 4), **{CACHE: models.PagedCache(patched, 1, 16)})


@pytest.mark.skipif("mistral_large4" not in OWN, reason="transformers has no Mistral Large 4")
def test_layers_without_rows_of_their_own_forget_tokens_like_others():
    """Two layers attend to the latents of the one before, and have no indexer."""
    shared = dict(kv_source_layers=[0, 0, 2, 2], no_rope_layers=[1, 1, 0, 0])
    model, ids = patched_model("mistral_large4", **shared), token_ids(1, 30)
    cache = models.PagedCache(model, 1, 64, block_size=16)
    assert not cache.store.recurrent and any(not layer.pools for layer in cache.layers)
    model(ids[:, :20], **{CACHE: cache})
    want = model(ids[:, 20:], **{CACHE: copy.deepcopy(cache)}).logits
    model(token_ids(1, 5, seed=7), **{CACHE: cache})
    cache.crop(-5)
    assert torch.equal(model(ids[:, 20:], **{CACHE: cache}).logits, want)


# ---- interruption ---------------------------------------------------------------------------


@pytest.mark.parametrize("forward", [0, 1, 4], ids=["prefill", "first-token", "later"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_can_be_used_again_after_an_interrupted_generation(kind, forward):
    patched = patched_model(kind)
    options = {"max_new_tokens": 8, "do_sample": False}
    seed, want = clear_case(lambda seed: patched.generate(**prompt(seed), **options))
    asked = prompt(seed)
    tokens = asked["input_ids"].size(1)

    cache = paged_cache(patched, len(PADS))
    # Ctrl-C when the first layer has written and no other has
    with interrupted(patched.model.layers[0].mlp, after=forward):
        patched.generate(**asked, **options, cache=cache)
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
            cache=cache,
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
    patched, ids = patched_model(), token_ids(1, 30)
    cache = paged_cache(patched, 1)
    patched(ids[:, :20], cache=cache)
    want = patched(ids[:, 20:], cache=copy.deepcopy(cache)).logits
    with interrupted(patched.model.layers[1].mlp, RuntimeError):
        patched(ids[:, 20:], cache=cache)
    assert cache.lengths.tolist() == [20] and cache.get_seq_length() == 20
    assert torch.equal(patched(ids[:, 20:], cache=cache).logits, want)
    assert cache.lengths.tolist() == [30]
