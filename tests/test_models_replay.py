"""Recorded selections are replayed to the bit, on the ops and in training."""

import pytest
import torch
from tiny import KINDS, clear_case, tiny_model, token_ids

from custom_pypto import models

TOLERANCE = 5e-5  # float32, as in test_models.py
PADS = [0, 9]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)  # tensors this small only wait for a second one


def patched_model(kind="deepseek_v32", **changes):
    return models.use_custom_pypto(tiny_model(kind, **changes), block_size=16)


def other_policy(kind="deepseek_v32"):
    """The same model but for its indexers, which prefer what those of ``tiny_model`` avoid."""
    model = patched_model(kind)
    for layer in model.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.weights_proj.weight.data.neg_()
    return model


def prompt(seed=1):
    ids, mask = token_ids(2, 30, seed), torch.ones(2, 30, dtype=torch.int64)
    for row, pads in enumerate(PADS):
        ids[row, :pads], mask[row, :pads] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def rollout(model, seed=1):
    """What a rollout fed, as arguments of a forward, and which positions it attended to."""
    asked = prompt(seed)
    with models.record_indices(model) as record:
        ids = model.generate(**asked, max_new_tokens=8, do_sample=False)[:, :-1]
    mask = torch.cat([asked["attention_mask"], torch.ones(2, 7, dtype=torch.int64)], 1)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}, record


def logits(model, fed):
    """Of the tokens that are not padding."""
    return model(**fed).logits[fed["attention_mask"].bool()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_has_what_each_indexer_selected_of_every_token(kind):
    model = patched_model(kind)
    fed, record = rollout(model)
    layers = [
        i for i, layer in enumerate(model.model.layers) if layer.self_attn.indexer is not None
    ]
    assert list(record) == layers
    for indices in record.values():
        assert indices.dtype == torch.int32 and indices.shape == (2, 37, 8)
        # a token sees itself and those before it; padding sees none
        for row, pads in enumerate(PADS):
            position = torch.arange(37) - pads
            seen = (indices[row] >= 0).sum(-1)
            assert torch.equal(seen, (position + 1).clamp(0, 8))
            assert (indices[row] <= position.clamp(min=-1)[:, None]).all()
    # one forward over the same tokens selects the same
    with models.record_indices(model) as again, torch.no_grad():
        model(**fed, use_cache=False)
    assert all(torch.equal(again[layer], record[layer]) for layer in layers)


@pytest.mark.parametrize("kind", KINDS)
def test_another_policy_attends_to_what_the_rollout_did(kind, monkeypatch):
    monkeypatch.setattr(models.attention, "SLICE", 7)  # a prompt is read in slices
    trained = other_policy(kind)
    fed, record = rollout(patched_model(kind))
    with torch.no_grad():
        own = logits(trained, fed)
        with models.replay_indices(trained, record), models.record_indices(trained) as again:
            replayed = logits(trained, fed)
        assert all(torch.equal(again[layer], record[layer]) for layer in record)
        with models.replay_indices(trained, record):
            cache = models.PagedCache(trained, 2, 48, block_size=16)
            parts = []
            for first, end in [(0, 30), *((t, t + 1) for t in range(30, 37))]:
                step = {name: x[:, first:end] for name, x in fed.items()}
                step["attention_mask"] = fed["attention_mask"][:, :end]
                parts.append(trained(**step, past_key_values=cache).logits)
    in_steps = torch.cat(parts, 1)[fed["attention_mask"].bool()]
    torch.testing.assert_close(in_steps, replayed, rtol=0, atol=TOLERANCE)
    assert (own - replayed).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_training_attends_to_what_the_rollout_did_and_has_gradients(kind, checkpointing):
    trained = other_policy(kind)

    def both(seed):  # routing of experts is discontinuous, too
        fed, record = rollout(patched_model(kind), seed)
        with models.replay_indices(trained, record), torch.no_grad():
            return fed, record, logits(trained.eval(), fed)

    _, (fed, record, want) = clear_case(both)
    if checkpointing:
        trained.gradient_checkpointing_enable()
    trained.train()
    own = logits(trained, fed).detach()
    with models.replay_indices(trained, record):
        got = logits(trained, fed)
        got.logsumexp(-1).sum().backward()
    torch.testing.assert_close(got.detach(), want, rtol=0, atol=TOLERANCE)
    assert (own - want).abs().max() > 100 * TOLERANCE
    for name in ("kv_b_proj", "o_proj"):
        gradient = getattr(trained.model.layers[2].self_attn, name).weight.grad
        assert gradient.isfinite().all() and gradient.abs().max() > 0
    # afterwards the indexers select again
    assert torch.equal(logits(trained, fed).detach(), own)


def test_a_record_follows_crops_second_turns_and_new_caches():
    model, ids = patched_model(), token_ids(2, 40)
    cache = models.PagedCache(model, 2, 64, block_size=16)
    with models.record_indices(model) as record, torch.no_grad():
        model(token_ids(2, 20, seed=7))  # of another cache
        model(ids[:, :30], past_key_values=cache)
        model(token_ids(2, 5, seed=8), past_key_values=cache)
        cache.crop(-5)
        model(ids[:, 30:], past_key_values=cache)
    with models.record_indices(model) as whole, torch.no_grad():
        model(ids)
    assert whole[0].shape == (2, 40, 8)
    assert all(torch.equal(record[layer], whole[layer]) for layer in range(3))


def test_a_cache_from_before_the_recording_is_rejected():
    model = patched_model()
    cache = models.PagedCache(model, 2, 64, block_size=16)
    model(token_ids(2, 20), past_key_values=cache)
    with models.record_indices(model) as record:
        with pytest.raises(ValueError, match=r"must be empty, or hold .*\[0, 0\]; got .*\[2, 20\]"):
            model(token_ids(2, 1), past_key_values=cache)
    assert all(indices.numel() == 0 for indices in record.values())
    assert int(cache.seen) == 20
    model(token_ids(2, 1), past_key_values=cache)


RECORDS = {
    "of-other-layers": (
        lambda record: {0: record[0]},
        r"record must have layers \[0, 1, 2\] .*got \[0\]",
    ),
    "of-another-index-topk": (
        lambda record: {layer: x[..., :4] for layer, x in record.items()},
        r"record\[0\] must be int32 \[B, T, 8\] \(index_topk\).*got torch.int32 \[2, 37, 4\]",
    ),
    "of-another-dtype": (
        lambda record: record | {1: record[1].long()},
        r"record\[1\] must be int32 .*got torch.int64 \[2, 37, 8\]",
    ),
    "of-other-tokens-in-one-layer": (
        lambda record: record | {2: record[2][:, 1:]},
        r"record\[2\] must be .*with B and T of record\[0\], got torch.int32 \[2, 36, 8\]",
    ),
}


@pytest.mark.parametrize("change, message", RECORDS.values(), ids=RECORDS)
def test_a_record_of_another_model_is_rejected(change, message):
    model = patched_model()
    _, record = rollout(model)
    with pytest.raises(ValueError, match=f"replay_indices: {message}"):
        with models.replay_indices(model, change(record)):
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


def test_a_record_of_hostile_numbers_reads_nothing_outside():
    model = patched_model()
    fed, record = rollout(model)
    numbers = torch.tensor([2**31 - 1, -(2**31), 37, 36, 5000, -2, 0], dtype=torch.int32)
    hostile = {layer: indices.clone() for layer, indices in record.items()}
    for indices in hostile.values():
        indices[:, 20:, 1:] = numbers
    with models.replay_indices(model, hostile):
        assert logits(model, fed).isfinite().all()
        assert logits(model.train(), fed).isfinite().all()


@pytest.mark.parametrize("context", [models.record_indices, lambda m: models.replay_indices(m, {})])
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
