"""Patched models compute the logits of upstream transformers."""

import copy
from collections import defaultdict

import pytest
import torch
from model_harness import (
    CHUNKS,
    COUNT_PADDING,
    PADS,
    TOLERANCES,
    alone,
    assert_close,
    assert_same,
    both,
    feed,
    furthest,
    left_padded,
    no_grad_and_one_thread,  # noqa: F401
    paged_cache,
    upstream_and_patched,
)
from tiny import (
    ALL_KINDS,
    KINDS,
    PUBLISHED_V4,
    V4_LAYERS,
    ClosestCall,
    clear_case,
    representatives,
    tiny_model,
    token_ids,
)
from transformers import AutoModelForCausalLM, DynamicCache

from custom_pypto import models
from custom_pypto.models import CACHE, deepseek_v4
from custom_pypto.models.latent_attention import LatentAttention


@pytest.mark.parametrize("pads", [[0], [0, 0], PADS], ids=["batch-1", "batch-2", "left-padded"])
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_logits_equal_upstream_transformers(kind, chunks, pads):
    want, got = both(*upstream_and_patched(kind), pads, chunks)
    assert_close(got, want, kind)


SLICED = CHUNKS | {"decode-alone": [1] * 40, "slices": [47, 8, 1]}


@pytest.mark.parametrize("pads", [[0], PADS], ids=["batch-1", "left-padded"])
@pytest.mark.parametrize("chunks", SLICED.values(), ids=SLICED)
@pytest.mark.parametrize("kind", [*KINDS, "deepseek_v4"])
def test_logits_equal_upstream_transformers_in_slices_shorter_than_a_window(
    kind, chunks, pads, monkeypatch
):
    monkeypatch.setattr(LatentAttention, "slice_tokens", 7)
    monkeypatch.setattr(deepseek_v4, "SLICE", 7)
    upstream, patched = upstream_and_patched(kind)
    tokens = []
    if kind in KINDS:
        patched.model.layers[0].self_attn.o_proj.register_forward_hook(
            lambda module, args, output: tokens.append(output.size(1))
        )
    want, got = both(upstream, patched, pads, chunks)
    assert_close(got, want, kind)
    if tokens:
        assert tokens == [min(7, n - i) for n in chunks for i in range(0, n, 7)]


@pytest.mark.parametrize("chunks", [[300], [261, 1, 1, 4]], ids=["prefill", "decode"])
def test_logits_equal_upstream_transformers_at_the_published_dims(chunks):
    want, got = both(*upstream_and_patched("deepseek_v4", **PUBLISHED_V4), [0, 5], chunks)
    assert_close(got, want, "deepseek_v4")


@pytest.mark.parametrize("index_topk", [1, 2, 16, 128], ids=lambda k: f"{k}-of-70-keys")
@pytest.mark.parametrize("kind", [*KINDS, "deepseek_v4"])
def test_logits_equal_upstream_transformers_however_many_keys_are_selected(kind, index_topk):
    found = furthest(*upstream_and_patched(kind, index_topk=index_topk), (66, 1, 3))
    assert found <= TOLERANCES[kind]


ONE_LAYER = defaultdict(lambda: dict(num_hidden_layers=1)) | {
    "deepseek_v4": dict(
        num_hidden_layers=1,
        layer_types=["compressed_sparse_attention"],
        mlp_layer_types=["hash_moe"],
    ),
    "glm5_next": dict(
        num_hidden_layers=1,
        layer_types=["indexed_attention"],
        indexer_types=["full"],
        mlp_layer_types=["dense"],
    ),
    "hy_v4_vl": dict(num_hidden_layers=1, indexer_types=["full"]),
    "mistral_large4": dict(
        num_hidden_layers=1, indexer_types=["full"], no_rope_layers=[1], kv_source_layers=[0]
    ),
}


@pytest.mark.parametrize("kind", representatives(ALL_KINDS))
def test_logits_equal_upstream_transformers_beyond_4096_keys_in_chunks(kind):
    """Of one layer: a close call, which some thousand tokens always have, moves the logits of its
    own token alone."""
    changes = ONE_LAYER[kind] | dict(max_position_embeddings=8192)
    upstream, patched = upstream_and_patched(kind, **changes)
    chunks = [700] * 6 + [1, 3]
    tokens = sum(chunks)
    ids, mask, positions = left_padded([0], tokens)
    with ClosestCall() as calls:
        cache = DynamicCache(config=upstream.config)
        want = feed(upstream, cache, ids, mask, positions, chunks)[0]
    got = feed(patched, paged_cache(patched, 1, tokens), ids, mask, positions, chunks)[0]
    # one choice of each token, by its indexer
    clear = torch.cat([gaps.flatten() for gaps in calls.gaps]) > 1e-4
    assert clear.shape == (tokens,) and clear.sum() > 0.99 * tokens
    assert_close(got[clear], want[clear], kind)


def of_one_type(layer_type):
    return dict(layer_types=[layer_type] * 2, num_hidden_layers=2, mlp_layer_types=["moe"] * 2)


CONFIGS = {
    "deepseek_v32": {
        "without-yarn": dict(rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    },
    "deepseek_v4": {f"of-{name}s": of_one_type(name) for name in V4_LAYERS[:3]},
    "glm5_next": {
        "one-group": dict(index_topk=4),
        "every-group": dict(index_topk=64),
        "groups-of-16": dict(index_kpool=16, index_topk=32),
        "without-the-tail": dict(index_kpool_always_select_tail=False),
        "an-indexer-after-an-indexer": dict(indexer_types=["full"] * 6),
    },
    "mistral_large4": {
        "no-rope": dict(no_rope_layers=[0] * 4),
        "rope-everywhere": dict(no_rope_layers=[1] * 4),
        "pairs": dict(kv_source_layers=[0, 0, 2, 2], no_rope_layers=[1, 1, 0, 0]),
        "own-latents": dict(kv_source_layers=[0, 1, 2, 3]),
        "an-indexer-in-every-layer": dict(indexer_types=["full"] * 4),
    },
}


@pytest.mark.parametrize(
    "kind, changes",
    [
        pytest.param(kind, changes, id=f"{kind}-{name}")
        for kind in CONFIGS
        if kind in ALL_KINDS
        for name, changes in CONFIGS[kind].items()
    ],
)
def test_logits_equal_upstream_transformers_of_other_configs(kind, changes):
    assert furthest(*upstream_and_patched(kind, **changes)) <= TOLERANCES[kind]


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_without_a_cache_makes_its_own(kind, use_cache):
    caches = []

    def run(model, seed):
        ids = token_ids(2, 33, seed)
        output = model(ids[:, :30], use_cache=use_cache)
        caches.append(output.get(CACHE))
        if not use_cache:
            return output.logits
        # the positions continue after the cache
        return model(ids[:, 30:], **{CACHE: output[CACHE]}).logits

    assert_same(*upstream_and_patched(kind), run)
    assert isinstance(caches[-1], models.PagedCache if use_cache else type(None))


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_positions_that_are_left_out_are_upstreams(kind):
    upstream, patched = upstream_and_patched(kind)

    def run(seed):
        ids, mask, _ = left_padded(PADS, 60, seed)
        if kind in COUNT_PADDING:
            return alone(upstream, ids, PADS)
        return upstream(ids, attention_mask=mask).logits[mask.bool()]

    seed, want = clear_case(run)
    ids, mask, _ = left_padded(PADS, 60, seed)
    for use_cache in (False, True):
        got = patched(ids, attention_mask=mask, use_cache=use_cache).logits
        assert_close(got[mask.bool()], want, kind)
        assert got.isfinite().all()  # of padding, too


@pytest.mark.parametrize("kind", COUNT_PADDING)
def test_the_reference_of_the_tests_is_upstreams_own_cache(kind):
    upstream = tiny_model(kind)
    ids, mask, positions = left_padded([0], 60)
    cache = DynamicCache(config=upstream.config)
    got = feed(upstream, cache, ids, mask, positions, [40] + [1] * 20)
    assert_close(got[0], alone(upstream, ids, [0]), kind)


# ---- images ---------------------------------------------------------------------------------

has_images = pytest.mark.skipif("hy_v4_vl" not in ALL_KINDS, reason="needs transformers 5.24")
IMAGE, VIDEO = 3, 4


def seen(seed, pads=(0, 5), frames=2):
    """Prompts of text, an image of 2 x 3 tokens, text, a video of as many a frame, and text."""
    generator = torch.Generator().manual_seed(seed)
    ids, mask, _ = left_padded(list(pads), 60, seed)
    ids[(ids == IMAGE) | (ids == VIDEO)] = 5
    ids[:, 12:18], ids[:, 25 : 25 + 6 * frames] = IMAGE, VIDEO
    grids = torch.tensor([[1, 4, 4], [frames, 4, 4]])[:, None].expand(-1, len(pads), -1)
    images, videos = (
        torch.randn(int(grid.prod(1).sum()), 3 * 4 * 4, generator=generator) for grid in grids
    )
    return dict(
        input_ids=ids,
        attention_mask=mask,
        mm_token_type_ids=(ids == IMAGE).int() + 2 * (ids == VIDEO).int(),
        pixel_values=images,
        image_grid_thw=grids[0],
        pixel_values_videos=videos,
        video_grid_thw=grids[1],
    )


@has_images
@pytest.mark.parametrize("beams", [1, 2])
def test_images_and_videos_are_seen_as_upstream_sees_them(beams):
    upstream, patched = upstream_and_patched("hy_v4_vl")

    def run(model, seed):
        inputs = seen(seed)
        logits = model(**inputs, use_cache=False).logits[inputs["attention_mask"].bool()]
        options = dict(do_sample=False, return_dict_in_generate=True, num_beams=beams)
        turn = model.generate(**inputs, **options, max_new_tokens=6)
        new = torch.cat([turn.sequences, token_ids(2, 7, seed).clamp(min=5)], 1)
        old = inputs["attention_mask"]
        mask = torch.cat([old, old.new_ones(2, new.size(1) - old.size(1))], 1)
        if beams > 1:
            return logits, turn.sequences
        # positions go on after those of the images
        cache = {CACHE: turn[CACHE]}
        last = model.generate(new, attention_mask=mask, **options, **cache, max_new_tokens=4)
        return logits, turn.sequences, last.sequences

    assert_same(upstream, patched, run)
    inputs = seen(1)
    blind = patched(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    assert (patched(**inputs).logits - blind).abs().max() > 1


def packed_positions():
    """Of two sequences, of text and of pictures, in a row."""
    text = torch.cat([torch.arange(25), torch.arange(15)])
    pictures = torch.stack([text, text // 3, text % 5])
    return text.expand(2, -1), pictures[:, None].expand(-1, 2, -1)


POSITIONS = {
    "of-text": lambda text, axes: torch.arange(40)[None] * 3,
    "three-axes": lambda text, axes: axes,
    "one-axis": lambda text, axes: axes[1:2],
    "packed": lambda text, axes: torch.cat([text[None], axes]),
    "restarting-yet-not-packed": lambda text, axes: text,
}


@has_images
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
def test_positions_of_three_axes_mean_what_they_mean_upstream(positions, training):
    upstream, patched = upstream_and_patched("hy_v4_vl")
    models.use_custom_pypto(patched, training="ops")
    position_ids = positions(*packed_positions())

    def run(model, seed):
        ids = token_ids(2, 40, seed)
        return model.train(training)(ids, position_ids=position_ids, use_cache=False).logits

    assert_same(upstream, patched, run)
    moved = patched(token_ids(2, 40), use_cache=False).logits - run(patched, 1)
    assert moved.abs().max() > 0.1


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


def test_bf16_of_deepseek_v4_is_as_close_to_float32_as_upstream_bf16():
    # all rows: a selection is a choice
    upstream, patched = upstream_and_patched("deepseek_v4", index_topk=64)
    ids = token_ids(2, 60)
    want = upstream(ids, use_cache=False).logits
    theirs, ours = (
        (model.bfloat16()(ids, use_cache=False).logits.float() - want).pow(2).mean()
        for model in (upstream, patched)
    )
    assert ours <= 1.2**2 * theirs


EVERY_EXPERT = {
    "deepseek_v4": dict(num_experts_per_tok=4),
    "hy_v4": dict(num_experts_per_tok=8, topk_group=2),
}


@pytest.mark.parametrize("kind", [kind for kind in EVERY_EXPERT if kind in ALL_KINDS])
def test_bf16_made_from_a_config_is_as_close_to_float32_as_upstream_bf16(kind):
    # from transformers 5.24 on such a model has norms and sinks in float32; nothing is a choice
    config = tiny_model(kind, index_topk=64, **EVERY_EXPERT[kind]).config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    ids = token_ids(8, 60)
    want = copy.deepcopy(model).float()(ids, use_cache=False).logits
    theirs = (model(ids, use_cache=False).logits - want).pow(2).mean()
    patched = models.use_custom_pypto(model)
    ours = (patched(ids, use_cache=False).logits - want).pow(2).mean()
    assert 0 < ours <= 1.2**2 * theirs
