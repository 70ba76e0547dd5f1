"""Recorded selections are replayed to the bit, on the ops and in training."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from model_harness import TOLERANCES, WRONG
from tiny import ALL_KINDS, V4_LAYERS, clear_case, tiny_model, token_ids
from training_harness import checkpointed

from custom_pypto import models
from custom_pypto.models import deepseek_v4
from custom_pypto.models.latent_attention import LatentAttention
from custom_pypto.models.patched import patched_attentions, text_model


class Case(NamedTuple):
    """What differs between architectures."""

    make: Callable
    tolerance: float
    #: indices of a token in a record
    width: int = 8
    #: from how many indices a token selects if it sees ``n`` tokens, and how many it selects
    selectable: Callable = lambda n: n
    selected: Callable = lambda n: n.clamp(max=8)
    #: projections before and after the selection
    projections: tuple[str, str] = ("kv_b_proj", "o_proj")
    #: of a batch in training
    pads: tuple[int, int] = (0, 9)


PADS = (0, 9)
CASES = {kind: Case(partial(tiny_model, kind), TOLERANCES[kind]) for kind in ALL_KINDS}
CASES["glm5_next"] = CASES["glm5_next"]._replace(
    width=16 + 3,  # four groups of 4 tokens, and the incomplete last one
    selected=lambda n: (n // 4).clamp(max=4) * 4 + n % 4,
)
CASES["glm5_next-without-the-tail"] = CASES["glm5_next"]._replace(
    make=partial(tiny_model, "glm5_next", index_kpool_always_select_tail=False),
    width=16,
    selectable=lambda n: n - n % 4,
    selected=lambda n: (n // 4).clamp(max=4) * 4,
)
CASES["deepseek_v4"] = CASES["deepseek_v4"]._replace(
    width=5,
    selectable=lambda n: n // 4,
    selected=lambda n: (n // 4).clamp(max=5),
    projections=("kv_proj", "o_b_proj"),
    pads=(0, 0),
)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)  # tensors this small only wait for a second one


def patched_model(kind="deepseek_v32", training="auto"):
    return models.use_custom_pypto(CASES[kind].make(), block_size=16, training=training)


def indexers(model):
    """The modules of upstream that select, by layer."""
    modules = ((name.split("."), module) for name, module in model.named_modules())
    return {
        int(path[path.index("layers") + 1]): module
        for path, module in modules
        if path[-1] == "indexer"
    }


def other_policy(kind="deepseek_v32", training="auto"):
    """The same model but for its indexers, which prefer what those of the rollout avoid."""
    model = patched_model(kind, training)
    for indexer in indexers(model).values():
        getattr(indexer, "scorer", indexer).weights_proj.weight.data.neg_()
    return model


def prompt(seed=1, pads=PADS):
    ids, mask = token_ids(2, 30, seed), torch.ones(2, 30, dtype=torch.int64)
    for row, n in enumerate(pads):
        mask[row, :n] = 0  # any token is padding then; upstream's routing of id 0 has ties
    return {"input_ids": ids, "attention_mask": mask}


def rollout(model, seed=1, pads=PADS, experts=False):
    """What a rollout fed, as arguments of a forward, and what it chose."""
    asked = prompt(seed, pads)
    with models.record_indices(model, experts=experts) as record:
        ids = model.generate(**asked, max_new_tokens=8, do_sample=False)[:, :-1]
    mask = torch.cat([asked["attention_mask"], torch.ones(2, 7, dtype=torch.int64)], 1)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}, record


def same(one, other):
    one, other = one.tensors(), other.tensors()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def logits(model, fed):
    """Of the tokens that are not padding."""
    return model(**fed).logits[fed["attention_mask"].bool()]


@pytest.mark.parametrize("kind", CASES)
def test_a_record_has_what_each_indexer_selected_of_every_token(kind):
    case, model = CASES[kind], patched_model(kind)
    fed, record = rollout(model)
    assert list(record.indices) == list(indexers(model)) and record.experts == {}
    for indices in record.indices.values():
        assert indices.dtype == torch.int32 and indices.shape == (2, 37, case.width)
        # a token sees itself and those before it; padding sees none
        for row, pads in enumerate(PADS):
            seen = (torch.arange(37) + 1 - pads).clamp(min=0)
            assert torch.equal((indices[row] >= 0).sum(-1), case.selected(seen))
            assert (indices[row] < case.selectable(seen).clamp(min=0)[:, None]).all()
    # one forward over the same tokens selects the same
    with models.record_indices(model) as again, torch.no_grad():
        model(**fed, use_cache=False)
    assert same(again, record)


@pytest.mark.parametrize("kind", CASES)
def test_another_policy_attends_to_what_the_rollout_did(kind, monkeypatch):
    monkeypatch.setattr(LatentAttention, "slice_tokens", 7)  # a prompt is read in slices
    monkeypatch.setattr(deepseek_v4, "SLICE", 7)
    trained, tolerance = other_policy(kind), CASES[kind].tolerance
    fed, record = rollout(patched_model(kind))
    with torch.no_grad():
        own = logits(trained, fed)
        with models.replay_indices(trained, record), models.record_indices(trained) as again:
            replayed = logits(trained, fed)
        assert same(again, record)
        with models.replay_indices(trained, record):
            cache = models.PagedCache(trained, 2, 48, block_size=16)
            parts = []
            for first, end in [(0, 30), *((t, t + 1) for t in range(30, 37))]:
                step = {name: x[:, first:end] for name, x in fed.items()}
                step["attention_mask"] = fed["attention_mask"][:, :end]
                parts.append(trained(**step, cache=cache).logits)
    in_steps = torch.cat(parts, 1)[fed["attention_mask"].bool()]
    torch.testing.assert_close(in_steps, replayed, rtol=0, atol=tolerance)
    assert (own - replayed).abs().max() > WRONG


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("path", ["ops", "upstream"])
def test_training_attends_to_what_the_rollout_did_and_has_gradients(kind, path, checkpointing):
    case, trained = CASES[kind], other_policy(kind, path)

    def both(seed):  # routing of experts is discontinuous, too
        fed, record = rollout(patched_model(kind), seed, case.pads)
        with models.replay_indices(trained, record), torch.no_grad():
            return fed, record, logits(trained.eval(), fed)

    _, (fed, record, want) = clear_case(both)
    if checkpointing:
        checkpointed(trained)
    trained.train()
    own = logits(trained, fed).detach()
    with models.replay_indices(trained, record):
        got = logits(trained, fed)
        got.logsumexp(-1).sum().backward()
    torch.testing.assert_close(got.detach(), want, rtol=0, atol=case.tolerance)
    assert (own - want).abs().max() > WRONG
    for name in case.projections:
        attention = patched_attentions(text_model(trained))[max(record.indices)]
        gradient = getattr(attention, name).weight.grad
        assert gradient.isfinite().all() and gradient.abs().max() > 0
    # afterwards the indexers select again
    assert torch.equal(logits(trained, fed).detach(), own)


@pytest.mark.parametrize("kind", CASES)
def test_training_needs_no_mask_without_padding(kind):
    model = patched_model(kind)
    fed, record = rollout(model, pads=[0, 0])
    ids = fed["input_ids"]
    with models.replay_indices(model.train(), record):
        loss = model(input_ids=ids, labels=ids).loss
        want = model(**fed, labels=ids).loss
    assert torch.equal(loss, want)


def test_a_record_follows_crops_second_turns_and_new_caches():
    model, ids = patched_model(), token_ids(2, 40)
    cache = models.PagedCache(model, 2, 64, block_size=16)
    with models.record_indices(model) as record, torch.no_grad():
        model(token_ids(2, 20, seed=7))  # of another cache
        model(ids[:, :30], cache=cache)
        model(token_ids(2, 5, seed=8), cache=cache)
        cache.crop(-5)
        model(ids[:, 30:], cache=cache)
    with models.record_indices(model) as whole, torch.no_grad():
        model(ids)
    assert whole.indices[0].shape == (2, 40, 8)
    assert same(record, whole)


def test_a_cache_from_before_the_recording_is_rejected():
    model = patched_model()
    cache = models.PagedCache(model, 2, 64, block_size=16)
    model(token_ids(2, 20), cache=cache)
    with models.record_indices(model) as record:
        with pytest.raises(ValueError, match=r"must be empty, or hold .*\[0, 0\]; got .*\[2, 20\]"):
            model(token_ids(2, 1), cache=cache)
    assert all(indices.numel() == 0 for indices in record.indices.values())
    assert int(cache.seen) == 20
    model(token_ids(2, 1), cache=cache)


def test_an_exchange_of_sequences_while_recording_is_rejected():
    model = patched_model()
    with (
        pytest.raises(ValueError, match="sequences must keep their places .*of beam search"),
        models.record_indices(model),
    ):
        model.generate(token_ids(1, 20), num_beams=2, max_new_tokens=4, do_sample=False)


RECORDS = {
    "of-other-layers": (
        lambda indices: {0: indices[0]},
        r"record.indices must have layers \[0, 1, 2\] .*got \[0\]",
    ),
    "of-another-index-topk": (
        lambda indices: {layer: x[..., :4] for layer, x in indices.items()},
        r"record.indices\[0\] must be int32 \[B, T, 8\].*got torch.int32 \[2, 37, 4\]",
    ),
    "of-another-dtype": (
        lambda indices: indices | {1: indices[1].long()},
        r"record.indices\[1\] must be int32 .*got torch.int64 \[2, 37, 8\]",
    ),
    "of-other-tokens-in-one-layer": (
        lambda indices: indices | {2: indices[2][:, 1:]},
        r"record.indices\[2\] must be .*\[B, T\] = \[2, 37\], got torch.int32 \[2, 36, 8\]",
    ),
}


@pytest.mark.parametrize("change, message", RECORDS.values(), ids=RECORDS)
def test_a_record_of_another_model_is_rejected(change, message):
    model = patched_model()
    _, record = rollout(model)
    with pytest.raises(ValueError, match=f"replay_indices: {message}"):
        with models.replay_indices(model, models.Record(change(record.indices))):
            pass


@pytest.mark.parametrize("training", [False, True], ids=["ops", "upstream"])
def test_a_forward_of_other_tokens_is_rejected(training):
    model = patched_model()
    fed, record = rollout(model)
    model.train(training)
    longer = token_ids(2, 38)
    with models.replay_indices(model, record):
        with pytest.raises(ValueError, match=r"\[2, 37\] tokens \[B, T\] of the record"):
            model(longer)
        with pytest.raises(ValueError, match=r"\[2, 37\] tokens \[B, T\] of the record"):
            model(longer[:1, :37])
        model(**fed)


def test_training_with_other_padding_is_rejected():
    model = patched_model()
    fed, record = rollout(model)
    with models.replay_indices(model.train(), record):
        with pytest.raises(ValueError, match=r"must have the padding .*\[0, 9\] tokens"):
            model(fed["input_ids"])


def test_deepseek_v4_trains_padded_sequences_alone():
    model = patched_model("deepseek_v4")
    fed, record = rollout(model)
    with models.replay_indices(model, record), torch.no_grad():
        want = model(**fed).logits
    model.train()
    with models.replay_indices(model, record):
        with pytest.raises(ValueError, match=r"must have no padding .*got some in sequences \[1\]"):
            model(**fed)
        with pytest.raises(
            ValueError, match=r"where \[3, 12\] tokens select nothing, got \[0, 0\]"
        ):
            model(fed["input_ids"])
    for row, pads in enumerate(PADS):
        with models.replay_indices(model, record[row : row + 1, pads:]):
            got = model(fed["input_ids"][row : row + 1, pads:]).logits[0].detach()
        torch.testing.assert_close(
            got, want[row, pads:], rtol=0, atol=CASES["deepseek_v4"].tolerance
        )


def test_a_model_without_an_indexer_has_an_empty_record():
    changes = dict(layer_types=V4_LAYERS[:1] * 2, num_hidden_layers=2, mlp_layer_types=["moe"] * 2)
    model, ids = (
        models.use_custom_pypto(tiny_model("deepseek_v4", **changes), block_size=16),
        token_ids(2, 20),
    )
    with models.record_indices(model) as record, torch.no_grad():
        want = model(ids).logits
    assert record.tensors() == {}
    with models.replay_indices(model, record), torch.no_grad():
        assert torch.equal(model(ids).logits, want)


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm5_next", "deepseek_v4"])
def test_a_record_of_hostile_numbers_reads_nothing_outside(kind):
    model, case = patched_model(kind), CASES[kind]
    fed, record = rollout(model, pads=case.pads)
    last = int(case.selectable(torch.tensor(37))) - 1  # not seen yet, as the next does not exist
    numbers = torch.tensor([last, last + 1, 2**31 - 1, -(2**31), -2], dtype=torch.int32)
    hostile = {layer: indices.clone() for layer, indices in record.indices.items()}
    for indices in hostile.values():
        indices[:, 20:34, 1:] = numbers[torch.arange(case.width - 1) % 5]
    with models.replay_indices(model, models.Record(hostile)), torch.no_grad():
        on_ops, upstream = logits(model, fed), logits(model.train(), fed)
    assert on_ops.isfinite().all() and upstream.isfinite().all()
    if kind != "deepseek_v32":  # whose upstream has no number for no token
        torch.testing.assert_close(upstream, on_ops, rtol=0, atol=case.tolerance)


@pytest.mark.parametrize(
    "context", [models.record_indices, lambda m: models.replay_indices(m, models.Record())]
)
def test_an_upstream_model_is_rejected(context):
    with pytest.raises(TypeError, match="_indices: model must be patched .*got a DeepseekV32For"):
        with context(tiny_model()):
            pass


def test_a_context_leaves_nothing_behind():
    model = patched_model()
    before = [sorted(vars(module)) for module in model.modules()]
    _, record = rollout(model)
    with pytest.raises(RuntimeError, match="out of luck"):
        with models.replay_indices(model, record), models.record_indices(model):
            raise RuntimeError("out of luck")
    assert [sorted(vars(module)) for module in model.modules()] == before
