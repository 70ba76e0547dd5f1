"""The loss of the MTP layer in training: its value and its gradients by the definition, which each
sequence of a batch gets alone from transformers' decoder layers."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from mtp_harness import MTP_KINDS, surroundings, upstream_drafting
from published import V4
from tiny import clear_case, representatives, tiny_model
from training_harness import (
    BATCHES,
    LEARNING,
    assert_equal,
    assert_near,
    checkpointed,
    gradients,
    one_thread,  # noqa: F401
    padded,
    whole,
)

from custom_pypto import models
from custom_pypto.models import CACHE
from custom_pypto.models.mtp import layer as mtp
from custom_pypto.models.mtp.loss import COEFFICIENT
from custom_pypto.models.patched import text_model

# whose groups of tokens would reach from one packed sequence into the next
GROUPS = (V4, "glm5_next")


def sequences_of(batch):
    """Ids and labels of each sequence, without padding."""
    ids, labels = batch["input_ids"], batch["labels"]
    mask = batch.get("attention_mask", torch.ones_like(ids)).bool()
    positions = batch.get("position_ids", torch.arange(ids.size(1)).expand_as(ids))
    for row in range(len(ids)):
        starts = (mask[row] & (positions[row] == 0)).nonzero().flatten().tolist()
        starts = starts if mask[row].all() else starts[-1:]  # positions of padding are 0, too
        for begin, end in zip(starts, [*starts[1:], ids.size(1)], strict=True):
            kept = mask[row, begin:end]
            yield ids[row, begin:end][kept][None], labels[row, begin:end][kept]


def logits_of(model, kind, ids):
    """Of the model, and of the layer for all tokens but the last; its row of token t has the state
    of t and the token after it."""
    text, states = text_model(model), []
    layer = mtp.mtp_layer(text)
    if kind == V4:
        hook = text.hc_head.register_forward_pre_hook(lambda _, args: states.append(args[0]))
    hidden = text(ids, use_cache=False).last_hidden_state
    if kind == V4:
        hook.remove()
    else:
        states.append(hidden)
    embeddings = getattr(layer, "embed_tokens", text.embed_tokens)(ids[:, 1:])
    embedded, before = layer.enorm(embeddings), layer.hnorm(states[0][:, :-1])
    if kind == V4:
        embedded = layer.e_proj(embedded)[:, :, None] + layer.h_proj(before)
    else:
        embedded = layer.eh_proj(torch.cat([embedded, before], -1))
    positions = torch.arange(1, ids.size(1))[None]
    others = surroundings(text, layer, kind, embedded, positions)
    output = layer(embedded, position_ids=positions, **others, **{CACHE: None})
    output = output[0] if isinstance(output, tuple) else output
    if kind == V4:
        output = layer.kv_norm(layer.hc_head(output))
    else:
        output = layer.shared_head.norm(output)
    return model.lm_head(hidden), model.lm_head(output)


def defined(model, kind, batch, count=None):
    """The losses of language model and layer, each divided by the labels that count."""
    sums, counts = [0, 0], [0, 0]
    for ids, labels in sequences_of(batch):
        for i, logits in enumerate(logits_of(model, kind, ids)):
            wanted = labels[i + 1 :]
            logits = logits[0, : len(wanted)].double()
            sums[i] = sums[i] + F.cross_entropy(logits, wanted, reduction="sum")
            counts[i] += (wanted != -100).sum()
    return tuple(x / (count or n) for x, n in zip(sums, counts, strict=True))


def model_for(kind, **options):
    model = upstream_drafting(kind, right=False).train()
    return models.use_custom_pypto(model, block_size=16, **options)


BY_BATCH = [
    pytest.param(kind, name, marks=kind_.marks)
    for kind_ in representatives(MTP_KINDS)
    for kind in kind_.values
    for name in BATCHES
    if kind not in GROUPS or name != "packed"
]


@pytest.mark.parametrize("kind, name", BY_BATCH)
def test_value_and_gradients_are_those_of_the_definition(kind, name):
    plain = upstream_drafting(kind, right=False)

    def run(seed):
        batch = BATCHES[name](seed)
        losses = defined(plain, kind, batch)
        return batch, losses, gradients(plain, losses[0] + COEFFICIENT * losses[1])

    _, (batch, (of_language, of_mtp), want) = clear_case(run)
    model = model_for(kind)
    output = model(**batch, use_cache=False)  # else transformers takes no sequences for packed
    torch.testing.assert_close(output.mtp_loss.double(), of_mtp, rtol=1e-5, atol=0)
    together = of_language + COEFFICIENT * of_mtp
    torch.testing.assert_close(output.loss.double(), together, rtol=1e-5, atol=0)
    got = gradients(model, output.loss)
    assert any("layers.3." in name or ".mtp." in name for name in got)
    assert_near(got, {name: want[name] for name in got}, kind)
    assert got.keys() == want.keys()


@pytest.mark.parametrize("kind", representatives(MTP_KINDS))
def test_the_loss_reaches_the_layer_the_trunk_embedding_and_head(kind):
    model = model_for(kind)
    got = gradients(model, model(**whole()).mtp_loss)
    names = {name for name, _ in model.named_parameters() if ".visual." not in name}
    indexers = {name for name in names if "indexer" in name}
    assert names - got.keys() <= indexers | {"model.norm.weight"} | of_head(kind)
    assert all(x.abs().max() > 0 for name, x in got.items() if "experts" not in name)


def of_head(kind):
    """What comes behind the streams that DeepSeek-V4's layer takes."""
    return {f"model.hc_head.hc_{name}" for name in ("fn", "base", "scale")} if kind == V4 else set()


@pytest.mark.parametrize("kind", representatives(MTP_KINDS))
def test_a_coefficient_multiplies_it_and_0_leaves_training_as_it_is_without(kind):
    batch = whole()
    first, tenth = (model_for(kind, mtp_loss_coefficient=x)(**batch) for x in (1.0, 0.1))
    assert torch.equal(first.mtp_loss, tenth.mtp_loss)
    language = model_for(kind, mtp_loss_coefficient=0)(**batch)
    assert "mtp_loss" not in language
    for output, coefficient in ((first, 1.0), (tenth, 0.1)):
        together = language.loss + coefficient * output.mtp_loss
        torch.testing.assert_close(output.loss, together, rtol=1e-5, atol=0)
    divided = model_for(kind, mtp_loss_coefficient=1.0)(**batch, num_items_in_batch=7)
    labels = 2 * (batch["labels"].size(1) - 2)
    torch.testing.assert_close(divided.mtp_loss, first.mtp_loss * labels / 7)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", representatives(MTP_KINDS))
def test_checkpointed_layers_give_the_same_bits(kind, reentrant):
    batch, model = whole(), model_for(kind)
    want = gradients(model, model(**batch).loss)
    checkpointed(model, reentrant)
    assert_equal(gradients(model, model(**batch).loss), want)


@pytest.mark.parametrize("kind", [kind for kind in MTP_KINDS if kind in LEARNING])
def test_indexers_learn_as_without_it(kind):
    batch = whole()
    options = {"training": "ops", "indexer_loss": "sparse"}
    with_mtp = model_for(kind, **options)
    output = with_mtp(**batch)
    again = pickle.loads(pickle.dumps(output))
    assert again.keys() == output.keys() >= {"loss", "mtp_loss", "indexer_loss"}
    got = gradients(with_mtp, output.loss)
    without = model_for(kind, mtp_loss_coefficient=0, **options)
    want = gradients(without, without(**batch).loss)
    own = {name for name in want if ".indexer." in name}
    assert own and all(torch.equal(got[name], want[name]) for name in own)
    assert {name for name in got if ".indexer." in name} == own  # that of the layer does not learn


def test_evaluation_caches_and_forwards_without_labels_have_none():
    model, batch = model_for("deepseek_v32"), whole()
    ids = batch["input_ids"]
    assert "mtp_loss" not in model(ids)
    with torch.no_grad():
        assert "mtp_loss" not in model(**batch)
    cache = models.PagedCache(model, 2, 48, block_size=16)
    assert "mtp_loss" not in model(**batch, **{CACHE: cache})
    assert "mtp_loss" not in model.eval()(**batch)
    assert "mtp_loss" in model.train()(**batch)


REJECTED = {
    "text": ({"mtp_loss_coefficient": "1"}, "must be a number of at least 0 or None, got '1'"),
    "negative": ({"mtp_loss_coefficient": -1}, "must be a number of at least 0 or None, got -1"),
    "upstream": (
        {"mtp_loss_coefficient": 1, "training": "upstream"},
        "must be None or 0 for training='upstream'; pass training='auto', got 1",
    ),
}


@pytest.mark.parametrize("options, message", REJECTED.values(), ids=REJECTED)
def test_what_has_no_such_loss_is_rejected_by_name(options, message):
    with pytest.raises(ValueError, match=f"use_custom_pypto: mtp_loss_coefficient {message}"):
        model_for("deepseek_v32", **options)


def test_a_model_without_the_layer_has_no_such_loss():
    with pytest.raises(ValueError, match="mtp_loss_coefficient .* without its MTP layer; load it"):
        models.use_custom_pypto(tiny_model(), mtp_loss_coefficient=0.1)
    assert "mtp_loss" not in models.use_custom_pypto(tiny_model()).train()(**whole())


def test_what_the_ops_cannot_train_names_the_remedy():
    model = model_for("deepseek_v32")
    with pytest.raises(ValueError, match="use_cache must be .*call .*mtp_loss_coefficient=0"):
        model(**padded(), use_cache=True)
    model = model_for(V4)
    with pytest.raises(ValueError, match="position_ids must count .*mtp_loss_coefficient=0"):
        model(**BATCHES["packed"](1))
