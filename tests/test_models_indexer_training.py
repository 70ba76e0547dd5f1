"""Training with the loss of the indexers: what scales it, who adds it, and what is rejected."""

import copy
from functools import partial

import pytest
import torch
from test_models_indexer_loss import indexer_names
from tiny import tiny_model, token_ids
from torch.utils._pytree import tree_flatten, tree_unflatten
from training_harness import (
    CHECKPOINTING,
    KINDS_OF_LOSS,
    TOKENS,
    TOLERANCES,
    assert_equal,
    assert_near,
    checkpointed,
    gradients,
    holes,
    logged_losses,
    model_for,
    one_thread,  # noqa: F401
    padded,
    whole,
)
from transformers.utils import is_accelerate_available

from custom_pypto import models
from custom_pypto.models.training_rows import CallLayer

ROUNDING = TOLERANCES["deepseek_v32"]


def learning(loss="sparse", **options):
    return model_for("auto" if loss else "ops", loss=loss, **options)


def of_both(model, loss):
    """The gradients of the indexers, and of everything else."""
    found = gradients(model, loss)
    indexers = {name: x for name, x in found.items() if ".indexer." in name}
    return indexers, {name: x for name, x in found.items() if name not in indexers}


@pytest.mark.parametrize("loss", [None, "sparse"])
def test_indexers_keep_a_graph_only_while_they_learn(loss, monkeypatch):
    """Not in the first forward of reentrant checkpointing, whose graph nobody uses."""
    scored, select = [], CallLayer.select

    def recorded(self, query, weights, *args):
        scored.append([x.requires_grad for x in (query, self.pools["index"], weights)])
        return select(self, query, weights, *args)

    monkeypatch.setattr(CallLayer, "select", recorded)
    model = learning(loss)
    model(**whole())
    assert scored == [[loss is not None] * 3] * 3
    checkpointed(model, True)
    output = model(**whole())
    assert scored[3:] == [[False] * 3] * 3
    output.loss.backward()
    assert scored[6:] == [[loss is not None] * 3] * 3


# ---- backward -----------------------------------------------------------------------------------


def test_what_scales_the_loss_scales_the_gradients_of_the_indexers():
    model, batch = learning(), whole()
    want, _ = of_both(model, model(**batch).loss)
    got, _ = of_both(model, model(**batch).loss / 4)
    assert_equal(got, {name: x / 4 for name, x in want.items()})


def test_the_coefficient_scales_the_loss():
    batch, plain = whole(), learning()
    want, _ = of_both(plain, plain(**batch).loss)
    language = learning(None)(**batch).loss
    model = learning(coefficient=0.25)
    output = model(**batch)
    assert torch.equal(output.loss, language + 0.25 * output.indexer_loss)
    assert_equal(of_both(model, output.loss)[0], {name: x / 4 for name, x in want.items()})


def test_two_half_batches_have_the_gradients_of_the_whole():
    model, batch = learning(), padded(left=(0, 9))
    items = (batch["labels"][:, 1:] != -100).sum()
    want = {name: x.clone() for name, x in of_both(model, model(**batch).loss)[0].items()}
    model.zero_grad()
    halves = [{name: x[i : i + 1] for name, x in batch.items()} for i in range(2)]
    outputs = [model(**half, num_items_in_batch=items) for half in halves]
    for output in outputs:  # after both forwards: each keeps its own gradients
        output.loss.backward()
    got = {n: p.grad for n, p in model.named_parameters() if ".indexer." in n}
    assert_near(got, want)


def test_without_labels_the_loss_is_a_mean_over_real_tokens():
    model, batch = learning(), padded(left=(0, 9), right=(4, 0))
    labels = batch.pop("labels")
    items, tokens = (labels[:, 1:] != -100).sum(), batch["attention_mask"].sum()
    alone = model(**batch)
    assert alone.loss is None and items != tokens
    with_labels = model(**batch, labels=labels).indexer_loss
    near = partial(torch.testing.assert_close, rtol=ROUNDING, atol=0)
    near(alone.indexer_loss * tokens, with_labels * items)
    by_count = model(**batch, num_items_in_batch=7).indexer_loss
    near(by_count * 7, with_labels * items)
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    by_shifted = model(**batch, labels=labels, shift_labels=shifted).indexer_loss
    assert torch.equal(by_shifted, with_labels)


def test_a_backward_that_does_not_ask_for_the_loss_leaves_the_indexers_alone():
    model = learning()
    output = model(**whole())
    output.indexer_loss.backward(retain_graph=True)
    indexers, others = of_both(model, output.logits.square().mean())
    assert others and not any(x.any() for x in indexers.values())


def test_padding_and_empty_rows_add_nothing():
    model, batch = learning(), padded(left=(0, 9), right=(4, 0))
    batch.pop("position_ids")
    want = model(**batch, num_items_in_batch=1).indexer_loss
    longer = {
        name: torch.cat([x, torch.full_like(x[:1], {"labels": -100}.get(name, 0))])
        for name, x in batch.items()
    }
    got = model(**longer, num_items_in_batch=1).indexer_loss
    torch.testing.assert_close(got, want, rtol=ROUNDING, atol=0)
    batch["input_ids"] = batch["input_ids"].where(batch["attention_mask"] == 1, 5)
    got = model(**batch, num_items_in_batch=1).indexer_loss
    torch.testing.assert_close(got, want, rtol=ROUNDING, atol=0)


@pytest.mark.parametrize("loss", KINDS_OF_LOSS)
@pytest.mark.parametrize("precision", ["autocast", "weights"])
def test_bfloat16_is_near_float32(precision, loss):
    """Without routed experts and with every position selected, as both are discontinuous."""
    dense = {"index_topk": 64, "mlp_layer_types": ["dense"] * 3}
    exact = learning(loss, **dense)
    want = exact(**whole())
    wanted, _ = of_both(exact, want.indexer_loss)
    model = learning(loss, **dense)
    model = model.bfloat16() if precision == "weights" else model
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        got = model(**whole())
    torch.testing.assert_close(got.indexer_loss, want.indexer_loss, rtol=0.02, atol=0)
    indexers, _ = of_both(model, got.indexer_loss)
    assert indexers.keys() == wanted.keys()
    errors = [float((x - wanted[n]).norm() / wanted[n].norm()) for n, x in indexers.items()]
    # mostly the rounding of the layers before, as the comparison of each layer shows
    assert all(x < 0.2 for x in errors)


# ---- forwards without a loss, and rejections ----------------------------------------------------


def test_forwards_that_do_not_train_have_no_loss():
    model, ids = learning("dense"), token_ids(2, TOKENS)
    with torch.no_grad():
        assert "indexer_loss" not in model(ids)
        cache = models.PagedCache(model, 2, TOKENS, block_size=16)
        assert "indexer_loss" not in model(ids, cache=cache)
        plain = learning(None).eval()
        got = model.eval()(ids)
        assert "indexer_loss" not in got and torch.equal(got.logits, plain(ids).logits)
    assert "indexer_loss" not in learning().eval()(ids)  # with gradients


def test_the_output_is_of_the_class_that_callers_know():
    model = learning()
    output, plain = model(**whole()), learning(None)(**whole())
    assert isinstance(output, type(plain)) and output[0] is output.loss
    assert list(output) == [*plain, "indexer_loss"]
    leaves, spec = tree_flatten(output)  # as DistributedDataParallel does
    assert tree_unflatten(leaves, spec).indexer_loss is output.indexer_loss


REJECTED = {
    "kind": (dict(indexer_loss="mean"), "indexer_loss must be 'sparse' or 'dense' or None, got"),
    "upstream": (
        dict(indexer_loss="sparse", training="upstream"),
        "must be None for training='upstream', .*pass training='auto', got 'sparse'",
    ),
    "coefficient": (
        dict(indexer_loss="sparse", indexer_loss_coefficient=float("nan")),
        "indexer_loss_coefficient must be a number of at least 0, got nan",
    ),
}


@pytest.mark.parametrize("arguments, message", REJECTED.values(), ids=REJECTED)
def test_options_that_cannot_be_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=f"use_custom_pypto: .*{message}"):
        models.use_custom_pypto(tiny_model(), **arguments)


@pytest.mark.parametrize("loss", KINDS_OF_LOSS)
@pytest.mark.parametrize("kind", ["deepseek_v4", "glm5_next"])
def test_indexers_of_groups_are_rejected(kind, loss):
    message = "indexer_loss must be None for model_type .*, whose indexer scores groups .*got"
    with pytest.raises(ValueError, match=message):
        model_for("auto", kind, loss)


IN_FORWARD = {
    "tuple": (whole, {"return_dict": False}, "return_dict must be True with indexer_loss"),
    "holes": (holes, {}, "padding at the ends only"),
    "cache": (whole, {"use_cache": True}, "use_cache must be False"),
    "attentions": (whole, {"output_attentions": True}, "output_attentions must be False"),
}


@pytest.mark.parametrize("batch, arguments, message", IN_FORWARD.values(), ids=IN_FORWARD)
def test_forwards_that_cannot_have_the_loss_are_rejected(batch, arguments, message):
    with pytest.raises(ValueError, match=f"patched model: .*{message}"):
        learning()(**batch(), **arguments)


def test_a_replay_is_rejected():
    model, batch = learning(), whole()
    with models.record_indices(model) as record:
        model(**batch)
    message = r"indexers of layers \[0, 1, 2\] must run for indexer_loss, got a replay"
    with models.replay_indices(model, record), pytest.raises(ValueError, match=message):
        model(**batch)


def test_a_call_that_bypasses_the_hooks_is_rejected():
    model = learning()
    for call in (model.model, model.forward):
        with pytest.raises(ValueError, match="whole model must be called for indexer_loss"):
            call(token_ids(2, TOKENS))


def test_patching_again_changes_the_option():
    model, batch = learning("dense"), whole()
    want = learning()(**batch)
    models.use_custom_pypto(model, block_size=16, indexer_loss="sparse")
    assert torch.equal(model(**batch).loss, want.loss)
    models.use_custom_pypto(model, block_size=16, training="ops")
    assert "indexer_loss" not in model(**batch)
    copied = copy.deepcopy(learning())
    assert torch.equal(copied(**batch).loss, want.loss)


def test_a_frozen_indexer_beside_others_that_learn():
    model, batch = learning(), whole()
    want, _ = of_both(model, model(**batch).loss)
    frozen = model.model.layers[1].self_attn.indexer.requires_grad_(False)
    output = model(**batch)
    got, _ = of_both(model, output.loss)
    assert len(want) - len(got) == len([*frozen.parameters()])
    assert_equal(got, {name: want[name] for name in got})


def test_adapters_train_beside_the_indexers():
    peft = pytest.importorskip("peft")
    model = learning()
    want, _ = of_both(model, model(**whole()).loss)
    config = peft.LoraConfig(r=4, target_modules=["kv_b_proj", "o_proj"])
    adapted = peft.get_peft_model(model, config).train()
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_(".indexer." in name or "lora" in name)
    got, others = of_both(adapted, adapted(**whole()).loss)
    assert all("lora" in name for name in others)  # adapters start at 0
    prefix = "base_model.model."
    assert_near({name.removeprefix(prefix): x for name, x in got.items()}, want)


@pytest.mark.slow
def test_a_compiled_model_trains_alike():
    model, batch = learning(num_hidden_layers=2), whole()
    output = model(**batch)
    want = gradients(model, output.loss)
    again = torch.compile(model, backend="aot_eager")(**batch)
    torch.testing.assert_close(again.indexer_loss, output.indexer_loss, rtol=ROUNDING, atol=0)
    assert_near(gradients(model, again.loss), want)


# ---- trainers -----------------------------------------------------------------------------------


def trained(model, folder, steps, **arguments):
    rows = [{"input_ids": ids, "labels": ids} for ids in token_ids(4, TOKENS)]
    return logged_losses(model, folder, rows, steps, **arguments)


@pytest.mark.skipif(not is_accelerate_available(), reason="transformers.Trainer needs accelerate")
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({}, id="plain", marks=pytest.mark.slow),
        pytest.param({CHECKPOINTING: True}, id="checkpointing"),
        pytest.param({"gradient_accumulation_steps": 2}, id="accumulation"),
    ],
)
def test_the_trainer_of_transformers_adds_the_loss(arguments, tmp_path):
    with_loss, without = (
        trained(learning(loss), tmp_path, 3, **arguments) for loss in ("sparse", None)
    )
    assert len(with_loss) == 3
    assert all(a > b + 0.5 for a, b in zip(with_loss, without, strict=True))


@pytest.mark.skipif(not is_accelerate_available(), reason="transformers.Trainer needs accelerate")
@pytest.mark.parametrize("loss", KINDS_OF_LOSS)
def test_indexers_alone_learn_where_attention_looks(loss, tmp_path):
    model = learning(loss)
    before = copy.deepcopy(model.state_dict())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".indexer." in name)
    first = model(**whole()).indexer_loss
    logged = trained(model, tmp_path, 20, learning_rate=3e-3)
    last = model(**whole()).indexer_loss
    assert last < 0.8 * first and logged[-1] < logged[0]
    changed = {name for name, x in model.state_dict().items() if not torch.equal(x, before[name])}
    assert changed == indexer_names(model)
