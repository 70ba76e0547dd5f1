"""Ranks that share prompts compute what one process computes, and end with its cache."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from model_harness import assert_close, feed, left_padded
from processes import in_ranks
from tiny import ALL_KINDS, clear_case, tiny_model, token_ids
from training_harness import (
    TOKENS,
    TOLERANCES,
    assert_near,
    checkpointed,
    not_checkpointed,
    packed,
    padded,
    trained,
)

from custom_pypto import models
from custom_pypto.models import CACHE
from custom_pypto.models.latent_attention import LatentAttention
from custom_pypto.models.patched import patched_attentions, text_model

LATENT = [kind for kind in ALL_KINDS if kind not in ("deepseek_v4", "glm5_next")]
SHARING = "deepseek_v32 FSS"  # two layers share the selection of the first
PADS = (0, 9)
CHUNKS = [45, 1, 37]  # a prompt of uneven pieces, a token, a prompt behind cached tokens


def rows(cache):
    """Of every pool the rows of all tokens, of both sequences."""
    return [
        pool[cache.block_table].flatten(1, 2)[b, :length]
        for layer in cache.layers
        for pool in layer.pools.values()
        for b, length in enumerate(cache.lengths.tolist())
    ]


def patched(kind, model=None, **options):
    """A model of a kind, or of a kind and an ``index_topk_pattern``."""
    name, _, pattern = kind.partition(" ")
    options["index_topk_pattern"] = pattern or None
    return models.use_custom_pypto(model or tiny_model(name), **options)


def computed(model, seed):
    ids, mask, positions = left_padded(PADS, sum(CHUNKS), seed)
    cache = models.PagedCache(model, len(PADS), 96, block_size=16)
    with models.record_indices(model, experts=True) as record:
        logits = feed(model, cache, ids, mask, positions, CHUNKS)
    with models.replay_indices(model, record):
        again = models.PagedCache(model, len(PADS), 96, block_size=16)
        replayed = feed(model, again, ids, mask, positions, CHUNKS)
    generated = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    return {
        "logits": logits,
        "replayed": replayed,
        "record": record.tensors(),
        "rows": rows(cache),
        "tokens": generated,
    }


def batches(seed: int) -> dict[str, dict]:
    return {"padded": padded(left=(3, 0), right=(5, 9), seed=seed), "packed": packed(seed)}


def losses_and_gradients(model, seed: int) -> dict[str, tuple]:
    """Of each batch, also with activation checkpointing."""
    LatentAttention.slice_tokens = 23  # several parts of each piece
    found = {name: trained(model, batch) for name, batch in batches(seed).items()}
    for reentrant in (False, True)[: 1 + ("mistral" not in model.config.model_type)]:
        checkpointed(model, reentrant)
        found[f"checkpointed, {reentrant}"] = trained(model, batches(seed)["padded"])
        not_checkpointed(model)
    return found


def meaned(grads: dict) -> dict:
    """The mean over the ranks, as DistributedDataParallel takes it."""
    for x in grads.values():
        dist.all_reduce(x)
        x /= dist.get_world_size()
    return grads


def failure(call) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def work(rank: int, folder: Path, seeds: dict[str, int]):
    """What each of two ranks does, and notes in a file."""
    seen = {}
    for kind, seed in seeds.items():
        model = patched(kind, context_parallel=True, block_size=16)
        norm, fed = text_model(model).norm, []
        norm.register_forward_hook(lambda _, args, output, fed=fed: fed.append(output.size(1)))
        with torch.no_grad():
            seen[kind] = computed(model, seed)
        seen[kind]["fed"] = fed[: len(CHUNKS)]
        patched(kind, model.train(), training="ops", context_parallel=True)
        of_batches = losses_and_gradients(model, seed).items()
        seen[kind]["trained"] = {x: (loss, meaned(grads)) for x, (loss, grads) in of_batches}
        assert max(fed[-3:]) < TOKENS
    of_one_forward(rank, folder, seen)
    torch.save(seen, folder / f"{rank}.pt")


@torch.no_grad()
def of_one_forward(rank: int, folder: Path, seen: dict):
    model = models.use_custom_pypto(tiny_model().bfloat16(), context_parallel=True, **INT8)
    cache = models.PagedCache(model, 1, 128)
    model(token_ids(1, 64), **{CACHE: cache})
    cache.save(folder / f"cache of {rank}")
    seen["int8"] = rows(cache)

    model = models.use_custom_pypto(tiny_model(), context_parallel=True)
    other = token_ids(1, 64, seed=rank)
    seen["other ids"] = failure(lambda: model(other))
    seen["other sizes"] = failure(lambda: model(other[:, : 40 + rank]))
    everything = {"output_hidden_states": True}
    seen["hidden states"] = failure(lambda: model(token_ids(1, 64), **everything))
    for name, (change, _) in DIFFERENCES.items():
        model = tiny_model().bfloat16()
        models.use_custom_pypto(model, context_parallel=True)
        assert not failure(lambda model=model: model(token_ids(1, 64)))
        call = change(model) if rank else None
        seen[name] = failure(call or partial(generated, model))


def generated(model, **options):
    model.generate(token_ids(1, 64), **({"max_new_tokens": 4, "do_sample": False} | options))


def with_other_topk(model):
    for attention in patched_attentions(text_model(model)).values():
        attention.indexer.index_topk = 4


def with_other_config(model):
    model.config.rms_norm_eps = 0.1


def with_another_pattern(model):
    models.use_custom_pypto(model, context_parallel=True, index_topk_pattern="FFS")


def in_float16(model):
    models.use_custom_pypto(model.half(), context_parallel=True)


def with_another_router(model):
    model.model.layers[1].mlp.gate.weight.data.neg_()


def with_another_head(model):
    model.lm_head.weight.data.neg_()


def with_an_int8_cache(model):
    return partial(generated, model, cache=models.PagedCache(model, 1, 68, **INT8))


# what rank 1 does to its model, and calls in place of generated(); what every rank says
DIFFERENCES = {
    "index_topk": (with_other_topk, "index_topk of layer 0 must be equal .* got 8 .* and 4"),
    "pattern": (
        with_another_pattern,
        "index_topk_pattern of use_custom_pypto must be equal .* got 'None' .* and 'FFS'",
    ),
    "config": (with_other_config, "rms_norm_eps of the config must be equal on all ranks"),
    "dtype": (
        in_float16,
        "dtype of the model must be equal .* got 'torch.bfloat16' .* 'torch.float16'",
    ),
    "weight": (
        with_another_router,
        r"a checksum of layers\.1\.mlp\.gate\.weight must be equal on all ranks",
    ),
    "head": (with_another_head, "a checksum of the head's weight must be equal on all ranks"),
    "format": (with_an_int8_cache, "dtype of index in the cache must be equal .*int8"),
    "request": (
        lambda model: partial(generated, model, max_new_tokens=5),
        "max_length of generation_config must be equal on all ranks, got '68' .* '69'",
    ),
}


def alone(kind: str, seed: int) -> dict:
    model = patched(kind)
    with torch.no_grad():
        found = computed(model, seed)
    patched(kind, model.train(), training="ops")
    return found | {"trained": losses_and_gradients(model, seed)}


INT8 = {"index_dtype": torch.int8, "kv_dtype": None}


@pytest.fixture(scope="module")
def shared(tmp_path_factory, request):
    """What two ranks have seen, and what one process computes."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.set_num_threads(1)
    few = [kind for kind in LATENT if kind in ("glm_moe_dsa", "dots3_note", "hy_v4_vl")]
    kinds = [*(LATENT if request.config.getoption("--all") else few), SHARING]
    with pytest.MonkeyPatch.context() as patch:
        # put back what losses_and_gradients() changes
        patch.setattr(LatentAttention, "slice_tokens", LatentAttention.slice_tokens)
        found = {kind: clear_case(lambda seed, kind=kind: alone(kind, seed)) for kind in kinds}
    in_ranks(work, folder, {kind: seed for kind, (seed, _) in found.items()})
    ranks = [torch.load(folder / f"{rank}.pt") for rank in range(2)]
    return folder, ranks, {kind: expected for kind, (_, expected) in found.items()}


def test_ranks_that_share_prompts_end_with_what_one_process_has(shared):
    _, ranks, expected = shared
    for kind, alone in expected.items():
        for rank in (rank[kind] for rank in ranks):
            assert rank["fed"] in ([21, 1, 17], [24, 1, 20])
            assert_close(rank["logits"], alone["logits"], kind)
            assert_close(rank["replayed"], alone["replayed"], kind)
            assert rank["record"].keys() == alone["record"].keys()
            for layer, indices in alone["record"].items():
                assert torch.equal(rank["record"][layer].sort(-1)[0], indices.sort(-1)[0])
            assert torch.equal(rank["tokens"], alone["tokens"])
            for mine, other in zip(rank["rows"], alone["rows"], strict=True):
                assert_close(mine, other, kind)
        one, other = (rank[kind]["rows"] for rank in ranks)
        assert one and all(map(torch.equal, one, other))


def test_the_mean_of_the_gradients_of_ranks_is_that_of_one_process(shared):
    _, ranks, expected = shared
    for kind, alone in expected.items():
        for rank in (rank[kind] for rank in ranks):
            for batch, (loss, grads) in alone["trained"].items():
                got, of_ranks = rank["trained"][batch]
                torch.testing.assert_close(got, loss, rtol=TOLERANCES["deepseek_v32"], atol=0)
                assert_near(of_ranks, grads, kind)


def test_the_caches_of_all_ranks_are_equal_in_int8_and_one_process_continues_on_them(shared):
    folder, ranks, _ = shared
    one, other = (rank["int8"] for rank in ranks)
    assert any(rows.dtype == torch.int8 for rows in one) and all(map(torch.equal, one, other))
    model = models.use_custom_pypto(tiny_model().bfloat16(), **INT8)
    assert (folder / "cache of 0").read_bytes() == (folder / "cache of 1").read_bytes()
    cache = models.PagedCache.load(folder / "cache of 1", model)
    assert all(map(torch.equal, rows(cache), one))


def test_ranks_with_other_prompts_or_requests_say_so(shared):
    for rank in shared[1]:
        assert "input_ids must be equal on all ranks, got " in rank["other ids"]
        assert "tokens [B, S] must be equal on all ranks, got [1, 40] on " in rank["other sizes"]
        assert "output_hidden_states must be False" in rank["hidden states"]


@pytest.mark.parametrize("name", DIFFERENCES)
def test_ranks_with_other_models_say_so(shared, name):
    for rank in shared[1]:
        assert re.search(DIFFERENCES[name][1], rank[name])


@pytest.mark.parametrize("kind", ["deepseek_v4", "glm5_next"])
def test_states_of_earlier_tokens_are_not_shared(kind):
    with pytest.raises(ValueError, match=f"context_parallel must be False for model_type {kind}"):
        models.use_custom_pypto(tiny_model(kind), context_parallel=True)


def test_sharing_needs_a_process_group():
    with pytest.raises(RuntimeError, match="context_parallel needs a process group.*torchrun"):
        models.use_custom_pypto(tiny_model(), context_parallel=True)
