"""Training on the ops: upstream's gradients in every kind of batch, without a matrix of scores."""

import re
from functools import partial

import pytest
import torch
from model_harness import COUNT_PADDING
from tiny import ALL_KINDS, KINDS, clear_case, token_ids
from torch.utils.checkpoint import checkpoint
from training_harness import (
    BATCHES,
    KINDS_OF_LOSS,
    LEARNING,
    TOKENS,
    TOLERANCES,
    Quadratic,
    assert_equal,
    assert_near,
    checkpointed,
    errors,
    gradients,
    holes,
    model_for,
    nothing_outlives_it,
    one_thread,  # noqa: F401
    packed,
    padded,
    trained,
    whole,
)

from custom_pypto import models
from custom_pypto.models import CACHE, deepseek_v4, indexer_loss, masks, training, training_rows
from custom_pypto.models.latent_attention import LatentAttention
from custom_pypto.models.patched import patched_attentions, text_model

# its layers attend to the latents of others, where transformers has it
SHARING = "mistral_large4" if "mistral_large4" in ALL_KINDS else KINDS[0]


def assert_same(got, want, kind):
    torch.testing.assert_close(got[0], want[0], rtol=TOLERANCES[kind], atol=0)
    assert_near(got[1], want[1], kind)


def assert_upstreams(kind, make_batch, **arguments):
    """The ops train as upstream does."""
    upstream = model_for("upstream", kind)
    seed, want = clear_case(lambda seed: trained(upstream, make_batch(seed), **arguments))
    assert_same(trained(model_for("ops", kind), make_batch(seed), **arguments), want, kind)


# ---- gradients --------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_the_ops_give_upstream_gradients(kind, batch):
    if batch == "packed" and kind in COUNT_PADDING:
        pytest.skip("upstream counts groups across packed sequences; rejected below")
    if kind == "deepseek_v4" and batch in ("left-padding", "padding-on-both-sides"):
        pytest.skip("upstream counts padding as tokens of windows; compared alone below")
    assert_upstreams(kind, BATCHES[batch])


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_float32_is_as_near_to_float64_as_upstream(kind):
    upstream = model_for("upstream", kind)
    seed, (_, theirs) = clear_case(lambda seed: trained(upstream, whole(seed)))
    upstream.config._experts_implementation = "eager"  # the default takes no float64
    _, exact = trained(upstream.double(), whole(seed))
    _, ours = trained(model_for("ops", kind), whole(seed))
    theirs, ours = (max(errors(got, exact).values()) for got in (theirs, ours))
    assert ours <= 4 * theirs


def test_deepseek_v4_with_left_padding_trains_like_each_sequence_alone():
    upstream, pads = model_for("upstream", "deepseek_v4"), (0, 9)

    def alone(seed):
        batch, losses = padded(left=pads, seed=seed), []
        items = (batch["labels"] >= 0).sum()
        for row, n in enumerate(pads):
            ids, labels = (batch[name][row : row + 1, n:] for name in ("input_ids", "labels"))
            losses.append(upstream(input_ids=ids, labels=labels, num_items_in_batch=items).loss)
        return sum(losses).detach(), gradients(upstream, sum(losses))

    seed, want = clear_case(alone)
    got = trained(model_for("ops", "deepseek_v4"), padded(left=pads, seed=seed))
    assert_same(got, want, "deepseek_v4")


@pytest.mark.parametrize("batch", ["left-padding", "packed"])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_sequences_longer_than_a_slice_train_alike(kind, batch, monkeypatch):
    monkeypatch.setattr(LatentAttention, "slice_tokens", 7)  # ends within sequences and padding
    monkeypatch.setattr(deepseek_v4, "SLICE", 7)
    counts = kind in COUNT_PADDING
    assert_upstreams(kind, whole if counts else BATCHES[batch])


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_num_items_in_batch_scales_the_gradients(kind):
    assert_upstreams(kind, whole, num_items_in_batch=torch.tensor(17))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "kind, loss",
    [*((k, None) for k in ALL_KINDS), *((k, loss) for k in LEARNING for loss in KINDS_OF_LOSS)],
)
def test_checkpointing_changes_no_bit(kind, loss, reentrant):
    model, batch = model_for("ops", kind, loss), BATCHES["left-padding"](1)
    want = trained(model, batch)
    checkpointed(model, reentrant)
    if kind == "mistral_large4" and reentrant:  # upstream drops the gradient of shared latents
        with pytest.raises(ValueError, match="use_reentrant=False .*got True, which would drop"):
            trained(model, batch)
        return
    got = trained(model, batch)
    assert torch.equal(got[0], want[0])
    assert_equal(got[1], want[1])


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("precision", ["autocast", "weights"])
def test_gradients_in_bfloat16_are_as_close_to_float32_as_upstream(kind, precision):
    """Without routed experts and with every position selected, as both are discontinuous."""
    layers = {"deepseek_v4": ["hash_moe"] * 4, "glm5_next": ["dense"] * 6}
    layers["mistral_large4"] = ["dense"] * 4
    dense = {"index_topk": 64, "mlp_layer_types": layers.get(kind, ["dense"] * 3)}

    def error(path):
        model = model_for(path, kind, **dense)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            model = model.bfloat16() if precision == "weights" else model
            loss = model(**whole(), use_cache=False).loss
        of_each = torch.tensor([*errors(gradients(model, loss), exact).values()])
        assert of_each.isfinite().all()
        return of_each.median()

    exact = trained(model_for("upstream", kind, **dense), whole())[1]
    assert error("ops") <= 1.2 * error("upstream")


@pytest.mark.parametrize("kind", [kind for kind in ALL_KINDS if kind != "deepseek_v4"])
def test_adapters_train_as_in_upstream(kind):
    peft = pytest.importorskip("peft")

    def adapted(path):
        model, targets = model_for(path, kind), ["kv_b_proj", "o_proj"]
        targets += [name for name in ("q_b_proj", "q_proj", "q_gate_proj") if name in names(model)]
        torch.manual_seed(7)
        config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
        return peft.get_peft_model(model, config).train()

    def names(model):
        return {name.rpartition(".")[2] for name, _ in model.named_modules()}

    upstream = adapted("upstream")
    seed, want = clear_case(lambda seed: trained(upstream, whole(seed)))
    assert all("lora" in name for name in want[1])
    assert_same(trained(adapted("ops"), whole(seed)), want, kind)


@pytest.mark.parametrize("loss", [None, "sparse"])
def test_a_second_derivative_is_rejected_before_a_part_of_it_is_lost(loss):
    model = model_for("ops", loss=loss)
    embedded = model.get_input_embeddings()(whole()["input_ids"]).detach().requires_grad_()
    output = model(inputs_embeds=embedded, labels=whole()["labels"])
    with pytest.raises(NotImplementedError, match='create_graph must be .*"upstream"'):
        torch.autograd.grad(output.loss, embedded, create_graph=True)


def test_a_reentrant_checkpoint_of_shared_latents_is_rejected_by_the_layer():
    """Whoever made it: `gradient_checkpointing_enable` tells the model, a hand-written one none."""

    def by_hand(forward, hidden_states, **kwargs):
        return checkpoint(partial(forward, **kwargs), hidden_states, use_reentrant=True)

    model = model_for("ops", SHARING)
    model.enable_input_require_grads()
    for layer in text_model(model).layers:
        layer.forward = partial(by_hand, layer.forward)
    with pytest.raises(ValueError, match="use_reentrant=False .*got True, which would drop"):
        trained(model, whole())


# ---- memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, loss", [*((k, None) for k in ALL_KINDS), *((KINDS[0], loss) for loss in KINDS_OF_LOSS)]
)
def test_no_tensor_grows_with_the_square_of_the_sequence(kind, loss):
    ids = token_ids(1, 400)  # more than any other dim

    def shapes(path, loss):
        model = model_for(path, kind, loss, index_n_heads=16, index_head_dim=16)
        with Quadratic(ids.size(1)) as mode:
            trained(model, {"input_ids": ids, "labels": ids})
        return mode.found

    assert shapes("upstream", None) and not shapes("ops", loss)


@pytest.mark.parametrize("learns", ["everything", "indexers"])
@pytest.mark.parametrize("loss", [None, "sparse"])
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("end", ["output dropped", "backward", "norm raises", "lm_head raises"])
def test_nothing_of_a_forward_outlives_it(end, reentrant, loss, learns):
    """Neither the layers' latents for others, nor the graph of those."""
    # which rejects reentrant checkpointing of shared latents
    model = model_for("ops", KINDS[0] if reentrant else SHARING, loss)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(learns == "everything" or ".indexer." in name)
    model.enable_input_require_grads()
    if reentrant is not None:
        checkpointed(model, reentrant)

    def refuse(*_):
        raise ValueError("refused")

    raising = {"norm raises": text_model(model).norm, "lm_head raises": model.lm_head}
    if end in raising:
        raising[end].register_forward_hook(refuse)
    with nothing_outlives_it(
        training_rows.TrainingRows, indexer_loss.IndexerLoss, indexer_loss.Scale
    ):
        if end in raising:
            with pytest.raises(ValueError, match="refused"):
                model(**whole())
            return
        output = model(**whole())
        assert output.loss.requires_grad and output.get(CACHE) is None
        if end == "backward":
            output.loss.backward()
        del output


# ---- the choice of a path -----------------------------------------------------------------------


def runs_on_the_ops(model, batch, **arguments):
    """Whether a training forward does."""
    text = text_model(model)
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    attentions = patched_attentions(text)
    request = masks.read(text, next(iter(attentions.values())), inputs | arguments)
    return training.step_of(text, attentions, request) is not None


def published():
    """An attention of DeepSeek-V3.2 without memory."""
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    with torch.device("meta"):
        model = DeepseekV32ForCausalLM(DeepseekV32Config(num_hidden_layers=1))
    return models.use_custom_pypto(model).model.layers[0].self_attn


@pytest.mark.parametrize(
    "batch, tokens, upstream",
    [(1, 1024, True), (4, 1024, False), (1, 2048, False), (1, 8192, False), (1, 32768, False)],
)
def test_upstream_is_cheaper_for_short_sequences(batch, tokens, upstream):
    # 128 heads in bfloat16: 2048 tokens have 1 GiB of scores
    assert training.upstream_is_cheaper([published()], batch, tokens, 2) is upstream


def test_operations_alone_are_equal_at_7000_tokens(monkeypatch):
    monkeypatch.setattr(training, "UPSTREAM_SCORES", float("inf"))
    attention = published()
    assert attention.multiplications(8) == (64 * 320, 36 * 1088)
    assert training.upstream_is_cheaper([attention], 1, 6900, 2)
    assert not training.upstream_is_cheaper([attention], 1, 7100, 2)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_auto_takes_the_ops_where_upstream_is_not_cheaper(kind, monkeypatch):
    auto, ops, upstream = (model_for(path, kind) for path in ("auto", "ops", "upstream"))
    assert not runs_on_the_ops(auto, whole()) and runs_on_the_ops(ops, whole())
    # a token attends to few of so many; memory is no reason yet
    ids = token_ids(1, 1000)
    assert 4 * 1000**2 * 4 < training.UPSTREAM_SCORES
    assert runs_on_the_ops(auto, {"input_ids": ids})
    monkeypatch.setattr(training, "UPSTREAM_SCORES", 0)
    assert runs_on_the_ops(auto, whole()) and not runs_on_the_ops(upstream, whole())
    assert_same(trained(auto, whole()), trained(ops, whole()), kind)


def masked_by_pairs():
    batch = padded()
    batch["attention_mask"] = torch.ones(2, 1, TOKENS, TOKENS, dtype=torch.bool).tril()
    return batch


# with a cache, transformers does not separate packed sequences
SEPARATE = {"use_cache": False}
REJECTED = {
    "dropout": ("deepseek_v32", whole, {}, "attention_dropout must be 0 .*got 0.5"),
    "attentions": (
        "deepseek_v32",
        whole,
        {"output_attentions": True},
        "output_attentions must be False .*got True",
    ),
    "cache": ("deepseek_v32", whole, {"use_cache": True}, "use_cache must be False .*got True"),
    "holes": ("deepseek_v32", holes, {}, "padding at the ends only, got a 0 between ones"),
    "pairs": ("deepseek_v32", masked_by_pairs, {}, r"must be \[B, tokens\] .*got \[2, 1, 40, 40\]"),
    "packed-groups": ("glm5_next", packed, SEPARATE, "position_ids must not restart"),
    "packed-windows": ("deepseek_v4", packed, SEPARATE, "position_ids must not restart"),
}


@pytest.mark.parametrize("kind, batch, arguments, message", REJECTED.values(), ids=REJECTED)
def test_what_the_ops_cannot_train_is_rejected_or_takes_upstreams_path(
    kind, batch, arguments, message, monkeypatch, caplog
):
    monkeypatch.setattr(training, "UPSTREAM_SCORES", 0)
    for path in ("ops", "auto"):
        model = model_for(path, kind)
        if "dropout" in message:
            text_model(model).layers[1].self_attn.attention_dropout = 0.5
        if path == "auto":
            assert not runs_on_the_ops(model, batch(), **arguments)
            assert not runs_on_the_ops(model, batch(), **arguments)
            (told,) = caplog.messages  # once, in words that name the reason
            assert re.match(f"training on the upstream path: .*{message}", told)
            continue
        with pytest.raises(ValueError, match=f'patched model: .*{message}.*training="auto"'):
            model(**batch(), **arguments)


def test_additions_that_the_ops_would_bypass_are_rejected_or_take_upstreams_path(monkeypatch):
    monkeypatch.setattr(training, "UPSTREAM_SCORES", 0)
    for path in ("ops", "auto"):
        model = model_for(path)
        model.model.layers[1].self_attn.kv_b_proj.register_forward_hook(lambda *args: None)
        if path == "auto":
            assert not runs_on_the_ops(model, whole())
            continue
        with pytest.raises(TypeError, match="kv_b_proj of layer 1 must be a plain .* forward hook"):
            model(**whole())


def test_an_option_that_does_not_exist_is_rejected():
    with pytest.raises(ValueError, match="training must be 'auto' or 'ops' or .*got 'sparse'"):
        model_for("sparse")
