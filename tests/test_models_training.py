"""Training on the ops: upstream's gradients in every kind of batch, without a matrix of scores."""

from collections import defaultdict

import pytest
import torch
from model_harness import COUNT_PADDING
from tiny import ALL_KINDS, KINDS, clear_case, tiny_model, token_ids
from training_harness import (
    BATCHES,
    TOKENS,
    Quadratic,
    nothing_outlives_it,
    packed,
    padded,
    trained,
    whole,
)

from custom_pypto import models
from custom_pypto.models import deepseek_v4, training
from custom_pypto.models.latent_attention import LatentAttention
from custom_pypto.models.patched import text_model

# of a gradient's norm, in float32: sums in another order in forward and backward. Gradients of
# sinks, position biases and learned scales of queries are sums over all tokens that nearly cancel:
# upstream's own are as far from those of float64, by the test below.
TOLERANCES = defaultdict(lambda: 5e-6)
TOLERANCES |= dict.fromkeys(["axk2", "dots3_note", "glm5_next", "hy_v4"], 2e-5)
TOLERANCES |= {"mistral_large4": 1e-4, "deepseek_v4": 1e-4}
# its layers attend to the latents of others, where transformers has it
SHARING = "mistral_large4" if "mistral_large4" in ALL_KINDS else KINDS[0]
# those of hyper-connections: of a few elements, and a hundredth of the other gradients
HYPER_CONNECTIONS = 1e-3


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)  # tensors this small only wait for a second one


def model_for(path, kind="deepseek_v32", **changes):
    model = tiny_model(kind, **changes).train()
    return models.use_custom_pypto(model, block_size=16, training=path)


def assert_same(got, want, kind):
    assert want[1] and got[1].keys() == want[1].keys()
    torch.testing.assert_close(got[0], want[0], rtol=TOLERANCES[kind], atol=0)
    for name, gradient in want[1].items():
        error = float((got[1][name] - gradient).norm() / gradient.norm())
        assert error <= (HYPER_CONNECTIONS if "hc" in name else TOLERANCES[kind]), name


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
    def errors(got):
        assert got.keys() == exact.keys()
        return {n: float((got[n] - exact[n]).norm() / exact[n].norm()) for n in exact}

    upstream = model_for("upstream", kind)
    seed, want = clear_case(lambda seed: trained(upstream, whole(seed)))
    upstreams = dict(want[1])
    upstream.config._experts_implementation = "eager"  # the default takes no float64
    exact = trained(upstream.double(), whole(seed))[1]
    ours = errors(trained(model_for("ops", kind), whole(seed))[1])
    assert max(ours.values()) <= 4 * max(errors(upstreams).values()), ours


def test_deepseek_v4_with_left_padding_trains_like_each_sequence_alone():
    upstream, pads = model_for("upstream", "deepseek_v4"), (0, 9)

    def alone(seed):
        batch, losses = padded(left=pads, seed=seed), []
        items = (batch["labels"] >= 0).sum()
        for row, n in enumerate(pads):
            ids, labels = (batch[name][row : row + 1, n:] for name in ("input_ids", "labels"))
            losses.append(upstream(input_ids=ids, labels=labels, num_items_in_batch=items).loss)
        upstream.zero_grad()
        sum(losses).backward()
        named = upstream.named_parameters()
        return sum(losses).detach(), {n: p.grad for n, p in named if p.grad is not None}

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
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_checkpointing_changes_no_bit(kind, reentrant):
    model, batch = model_for("ops", kind), BATCHES["left-padding"](1)
    want = trained(model, batch)
    want = {name: gradient.clone() for name, gradient in want[1].items()}
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    if kind == "mistral_large4" and reentrant:  # upstream drops the gradient of shared latents
        with pytest.raises(ValueError, match="use_reentrant=False .*got True, which would drop"):
            trained(model, batch)
        return
    got = trained(model, batch)[1]
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


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
        loss.backward()
        got = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
        assert got.keys() == exact.keys() and all(x.isfinite().all() for x in got.values())
        errors = [float((got[n] - exact[n]).norm() / exact[n].norm()) for n in exact]
        return torch.tensor(errors).median()

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


def test_a_second_derivative_is_rejected():
    model = model_for("ops")
    weight = model.model.layers[1].self_attn.kv_b_proj.weight
    (first,) = torch.autograd.grad(model(**whole()).loss, weight, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()


# ---- memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_no_tensor_grows_with_the_square_of_the_sequence(kind):
    ids = token_ids(1, 1100)  # more than any other dim

    def shapes(path):
        with Quadratic(ids.size(1)) as mode:
            trained(model_for(path, kind), {"input_ids": ids, "labels": ids})
        return mode.found

    assert shapes("upstream") and not shapes("ops")


def test_nothing_of_a_forward_outlives_its_backward():
    model = model_for("ops", SHARING)
    with nothing_outlives_it(training.StoreOfCalls):
        output = model(**whole())
        assert output.past_key_values is None
        output.loss.backward()
        del output


@pytest.mark.parametrize("learns", ["everything", "indexers"])
@pytest.mark.parametrize("loss", [None, "sparse"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_nothing_of_a_checkpointed_forward_without_backward_outlives_its_output(
    reentrant, loss, learns
):
    """Neither the layers' latents for others, nor the graph of those."""
    model = models.use_custom_pypto(
        tiny_model(SHARING).train(), block_size=16, training="ops", indexer_loss=loss
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(learns == "everything" or ".indexer." in name)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with nothing_outlives_it(training.StoreOfCalls):
        output = model(**whole())
        assert output.loss.requires_grad
        del output


# ---- the choice of a path -----------------------------------------------------------------------


def runs_on_the_ops(model, batch, **arguments):
    """Whether a training forward does."""
    text, tokens = text_model(model), batch["input_ids"].shape
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    return training.step_of(text, inputs | arguments, *tokens) is not None


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


def holes():
    batch = padded()
    batch["attention_mask"][1, 20] = 0
    return batch


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
    kind, batch, arguments, message, monkeypatch
):
    monkeypatch.setattr(training, "UPSTREAM_SCORES", 0)
    for path in ("ops", "auto"):
        model = model_for(path, kind)
        if "dropout" in message:
            text_model(model).config.attention_dropout = 0.5
        if path == "auto":
            assert not runs_on_the_ops(model, batch(), **arguments)
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
