"""The loss of the indexers: its value and gradients by definition, and nobody else's."""

import copy

import pytest
import torch
from tiny import ALL_KINDS, clear_case, tiny_model, token_ids
from torch.utils._pytree import tree_flatten, tree_unflatten
from training_harness import (
    BATCHES,
    TOKENS,
    Quadratic,
    logged_losses,
    nothing_outlives_it,
    padded,
    whole,
)
from transformers.utils import is_accelerate_available

from custom_pypto import models
from custom_pypto.models import indexer_loss
from custom_pypto.models.absorbed import absorbed_query
from custom_pypto.models.latent_attention import LatentAttention
from custom_pypto.models.patched import text_model
from custom_pypto.models.training_rows import IndexKeysOfCall

# their indexers score tokens, not groups of tokens
LEARNING = [kind for kind in ALL_KINDS if kind not in ("deepseek_v4", "glm5_next")]
KINDS_OF_LOSS = ["sparse", "dense"]
OF_A_FORWARD = (indexer_loss.IndexerLoss, indexer_loss.Scale, models.training.StoreOfCalls)
# of a gradient's norm, in float32
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)  # tensors this small only wait for a second one


def model_for(loss, kind="deepseek_v32", coefficient=1.0, **changes):
    return models.use_custom_pypto(
        tiny_model(kind, **changes).train(),
        block_size=16,
        training="ops" if loss is None else "auto",
        indexer_loss=loss,
        indexer_loss_coefficient=coefficient,
    )


def gradients(model, loss):
    """Of the indexers, and of everything else, as one backward of ``loss`` gives them."""
    model.zero_grad()
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    indexers = {name: x for name, x in found.items() if ".indexer." in name}
    return indexers, {name: x for name, x in found.items() if name not in indexers}


def indexer_names(model):
    return {name for name, _ in model.named_parameters() if ".indexer." in name}


def assert_near(got, want, tolerance=TOLERANCE):
    assert want and got.keys() == want.keys()
    for name, x in want.items():
        error = float((got[name].double() - x.double()).norm() / x.double().norm())
        assert error <= tolerance, (name, error)


def assert_equal(got, want):
    assert want and got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


# ---- the definition -----------------------------------------------------------------------------


def divergence(scores, probabilities, seen):
    """Of each token, from float64 scores ``[.., T, T]``, probabilities ``[.., H, T, T]`` and the
    keys that it sees; 0 if it sees none."""
    target = probabilities.sum(-3)
    target = target / target.sum(-1, keepdim=True).clamp(min=1e-300)
    some = seen.any(-1, keepdim=True)
    log_q = scores.masked_fill(~seen & some, -torch.inf).log_softmax(-1)
    terms = target * (target.clamp(min=1e-300).log() - log_q.masked_fill(~seen, 0))
    return terms.where(seen, 0).sum(-1)


def defined(paged, model, batch, dense):
    """The summed loss of upstream's ``model`` in float64, with the rotations of ``paged``."""
    total = []

    def attention_of(attention, args, kwargs):
        indexer, hidden, (cos, sin) = (
            attention.indexer,
            *map(kwargs.get, ("hidden_states", "position_embeddings")),
        )
        if indexer is None:
            return
        mask = kwargs["attention_mask"][:, 0]
        visible = mask if mask.dtype == torch.bool else mask == 0

        def rotated(rope, x, width):
            x, rest = x.split([width, x.size(-1) - width], -1)
            return torch.cat([rope(x, x, cos, sin, unsqueeze_dim=2)[0], rest], -1)

        def of_index(x):
            return rotated(paged.index_rope, x, indexer.qk_rope_head_dim)

        q_latent = attention.q_a_layernorm(attention.q_a_proj(hidden))
        constant = hidden.detach()
        query = indexer.wq_b(q_latent.detach()).unflatten(-1, (indexer.n_heads, -1))
        key = indexer.k_norm(indexer.wk(constant)).unsqueeze(2)
        products = torch.einsum("bthd,bsd->bhts", of_index(query), of_index(key)[:, :, 0]).relu()
        scale = indexer.n_heads**-0.5 * indexer.softmax_scale
        scores = torch.einsum("bth,bhts->bts", indexer.weights_proj(constant) * scale, products)
        seen = visible
        if not dense:
            best = scores.masked_fill(~visible, -torch.inf).topk(indexer.index_topk).indices
            seen = torch.zeros_like(visible).scatter(-1, best, True) & visible
        with torch.no_grad():
            widths = [attention.kv_lora_rank, attention.qk_rope_head_dim]
            latent, k_rope = attention.kv_a_proj_with_mqa(hidden).split(widths, -1)
            nope = attention.qk_nope_head_dim
            q = attention.q_b_proj(q_latent).unflatten(-1, (-1, attention.qk_head_dim))
            k = attention.kv_b_proj(attention.kv_a_layernorm(latent))
            k = k.unflatten(-1, (q.size(2), -1))[..., :nope]
            logits = torch.einsum("bthd,bshd->bhts", q[..., :nope], k)
            q_rope = rotated(paged.rope, q[..., nope:], widths[1])
            k_rope = rotated(paged.rope, k_rope.unsqueeze(2), widths[1])
            logits += torch.einsum("bthd,bsd->bhts", q_rope, k_rope[:, :, 0])
            logits = (logits * attention.scaling).masked_fill(~seen[:, None], -torch.inf)
            probabilities = logits.softmax(-1).nan_to_num(0)
        real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        total.append(divergence(scores, probabilities, seen)[real].sum())

    hooks = [
        layer.self_attn.register_forward_pre_hook(attention_of, with_kwargs=True)
        for layer in model.model.layers
    ]
    model(**{name: x for name, x in batch.items() if name != "labels"}, use_cache=False)
    for hook in hooks:
        hook.remove()
    return sum(total)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("loss", KINDS_OF_LOSS)
@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_values_and_gradients_are_those_of_the_definition(kind, loss, batch, monkeypatch):
    monkeypatch.setattr(LatentAttention, "slice_tokens", 23)  # several parts
    monkeypatch.setattr(models.training, "DENSE_TOKENS", 23)
    model = model_for(loss, kind)
    # upstream attends to all positions if index_topk exceeds them
    changes = {"index_topk": 64} if loss == "dense" else {}
    upstream = tiny_model(kind, **changes).train().double()
    upstream.config._experts_implementation = "eager"  # the default takes no float64
    upstream.set_attn_implementation("sdpa")  # eager computes the softmax in float32
    paged = type(model.model.layers[0].self_attn)
    seed, want = clear_case(
        lambda seed: defined(paged, upstream, BATCHES[batch](seed), loss == "dense")
    )
    inputs = BATCHES[batch](seed)
    got = model(**inputs, use_cache=False).indexer_loss
    items = (inputs["labels"][:, 1:] != -100).sum()
    torch.testing.assert_close(got.double() * items, want.detach(), rtol=TOLERANCE, atol=0)
    got, _ = gradients(model, got * items)
    want, _ = gradients(upstream, want)
    assert got.keys() == indexer_names(model)
    assert_near(got, want)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("loss", KINDS_OF_LOSS)
@pytest.mark.parametrize("kind", LEARNING)
def test_each_layer_measures_the_attention_that_it_computes(
    kind, loss, dtype, tolerance, monkeypatch
):
    """The divergence of every architecture, sinks and all, from what its layers pass to the ops."""
    calls = {}

    def recorded(self, *args):
        calls[self.layer] = self.inputs, args, divergence_of(self, *args)
        return calls[self.layer][2]

    divergence_of = indexer_loss.LayerLoss.divergence
    monkeypatch.setattr(indexer_loss.LayerLoss, "divergence", recorded)
    batch = padded(left=(0, 9), right=(4, 0))
    model = model_for(loss, kind).to(dtype)
    model(**batch)
    layers = text_model(model).layers
    assert sorted(calls) == [i for i, x in enumerate(layers) if x.self_attn.indexer is not None]

    def in_batch(x):
        return x.detach().double().unflatten(0, (2, TOKENS))

    real, column = batch["attention_mask"].bool(), torch.arange(TOKENS)
    position = column - real.int().argmax(1)[:, None]  # within the sequence
    visible = (column <= column[:, None]) & real[:, None] & real[..., None]
    for inputs, (heads, latent, rope, indices, *_), got in calls.values():
        inputs = [in_batch(x).requires_grad_() for x in inputs]
        query, key, weights = inputs
        products = torch.einsum("bthd,bsd->bhts", query, key[:, :, 0]).relu()
        scores = torch.einsum("bth,bhts->bts", weights, products)
        seen = visible
        if loss == "sparse":
            chosen = indices.view(2, TOKENS, -1, 1) == position[:, None, None]
            seen = visible & chosen.any(2)
        q = in_batch(absorbed_query(heads.q_nope, heads.weight))
        logits = torch.einsum("bthl,bsl->bhts", q, in_batch(latent)[:, :, 0])
        if rope is not None:
            k = in_batch(rope)[:, :, 0]
            logits += torch.einsum("bthr,bsr->bhts", in_batch(heads.q_rope), k)
        logits = (logits * heads.scaling).masked_fill(~seen[:, None], -torch.inf)
        if heads.sinks is not None:
            sinks = heads.sinks.detach().double()[:, None, None].expand(*logits.shape[:3], 1)
            logits = torch.cat([logits, sinks], -1)
        probabilities = logits.softmax(-1).nan_to_num(0)[..., :TOKENS]
        want = divergence(scores, probabilities, seen).sum()
        torch.testing.assert_close(got[3].double(), want.detach(), rtol=tolerance, atol=0)
        for gradient, x in zip(got, torch.autograd.grad(want, inputs), strict=False):
            assert (in_batch(gradient) - x).norm() <= tolerance * x.norm()


def test_an_indexer_that_looks_where_attention_looks_has_no_loss():
    """Scores that are the logarithm of the target, up to a constant."""
    torch.manual_seed(0)
    scores = torch.randn(1, 5, 5, dtype=torch.float64)
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    target = scores.masked_fill(~seen, -torch.inf).softmax(-1)[:, None]
    assert divergence(scores + 3, target.expand(1, 4, 5, 5), seen).abs().max() < 1e-12


# ---- what stays as it is ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LEARNING)
def test_selection_logits_and_all_other_gradients_keep_their_bits(kind):
    batch, results = BATCHES["left-padding"](1), []
    for loss in (None, "sparse"):
        model, selected = model_for(loss, kind), {}
        with models.record_indices(model) as record:
            output = model(**batch)
        selected = {f"selection {i}": x for i, x in record.items()}
        indexers, others = gradients(model, output.loss)
        assert indexers.keys() == (indexer_names(model) if loss else set())
        results.append(others | selected | {"logits": output.logits})
    assert_equal(*results)


@pytest.mark.parametrize("kind", LEARNING)
def test_the_loss_of_the_indexers_reaches_nothing_else(kind):
    model = model_for("sparse", kind)
    indexers, others = gradients(model, model(**whole()).indexer_loss)
    assert indexers.keys() == indexer_names(model) and not others
    assert all(x.any() for x in indexers.values())


@pytest.mark.parametrize("loss", KINDS_OF_LOSS)
@pytest.mark.parametrize("kind", LEARNING)
def test_dense_training_attends_to_everything(kind, loss):
    """The model with a loss selects all, or is told to attend to all."""
    want = model_for(None, kind, index_topk=64)
    got = model_for(loss, kind, **({"index_topk": 64} if loss == "sparse" else {}))
    want, got = (model(**BATCHES["left-padding"](1)).logits for model in (want, got))
    torch.testing.assert_close(got, want, rtol=0, atol=5e-5)


def test_both_losses_agree_where_the_selection_is_everything():
    sparse, dense = model_for("sparse", index_topk=64), model_for("dense", index_topk=64)
    results = [model(**padded(left=(0, 9), right=(4, 0))) for model in (sparse, dense)]
    torch.testing.assert_close(*(x.indexer_loss for x in results), rtol=TOLERANCE, atol=0)
    pairs = zip((sparse, dense), results, strict=True)
    assert_near(*(gradients(model, x.indexer_loss)[0] for model, x in pairs), 1e-4)


@pytest.mark.parametrize("loss", KINDS_OF_LOSS)
def test_no_tensor_grows_with_the_square_of_the_sequence(loss):
    ids = token_ids(1, 1100)  # more than any other dim
    model = model_for(loss)
    with Quadratic(ids.size(1)) as mode:
        model(input_ids=ids, labels=ids).loss.backward()
    assert not mode.found


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_nothing_of_a_forward_outlives_its_output(reentrant, backward):
    model = model_for("sparse")
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    with nothing_outlives_it(*OF_A_FORWARD):
        output = model(**whole())
        if backward:
            output.loss.backward()
        del output


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("where", ["in the text model", "behind it"])
def test_nothing_of_a_forward_that_raises_outlives_it(reentrant, where):
    def refuse(*_):
        raise ValueError("refused")

    model = model_for("sparse")
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    module = text_model(model).norm if where == "in the text model" else model.lm_head
    module.register_forward_hook(refuse)
    with nothing_outlives_it(*OF_A_FORWARD):
        with pytest.raises(ValueError, match="refused"):
            model(**whole())


@pytest.mark.parametrize("loss", [None, "sparse"])
def test_indexers_keep_a_graph_only_while_they_learn(loss, monkeypatch):
    """Not in the first forward of reentrant checkpointing, whose graph nobody uses."""
    scored, select = [], IndexKeysOfCall.select

    def recorded(self, layer, query, weights, *args):
        scored.append([x.requires_grad for x in (query, layer.index, weights)])
        return select(self, layer, query, weights, *args)

    monkeypatch.setattr(IndexKeysOfCall, "select", recorded)
    model = model_for(loss)
    model(**whole())
    assert scored == [[loss is not None] * 3] * 3
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    output = model(**whole())
    assert scored[3:] == [[False] * 3] * 3
    output.loss.backward()
    assert scored[6:] == [[loss is not None] * 3] * 3


# ---- backward -----------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", KINDS_OF_LOSS)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", LEARNING)
def test_checkpointing_changes_no_bit(kind, reentrant, loss):
    if kind == "mistral_large4" and reentrant:
        pytest.skip("rejected: the gradient of shared latents would be dropped")
    model, batch = model_for(loss, kind), BATCHES["left-padding"](1)
    output = model(**batch)
    want = {name: x for part in gradients(model, output.loss) for name, x in part.items()}
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    again = model(**batch)
    assert torch.equal(again.indexer_loss, output.indexer_loss)
    got = {name: x for part in gradients(model, again.loss) for name, x in part.items()}
    assert_equal(got, want)


def test_what_scales_the_loss_scales_the_gradients_of_the_indexers():
    model, batch = model_for("sparse"), whole()
    want, _ = gradients(model, model(**batch).loss)
    got, _ = gradients(model, model(**batch).loss / 4)
    assert_equal(got, {name: x / 4 for name, x in want.items()})


def test_the_coefficient_scales_the_loss():
    batch, plain = whole(), model_for("sparse")
    want, _ = gradients(plain, plain(**batch).loss)
    language = model_for(None)(**batch).loss
    model = model_for("sparse", coefficient=0.25)
    output = model(**batch)
    assert torch.equal(output.loss, language + 0.25 * output.indexer_loss)
    assert_equal(gradients(model, output.loss)[0], {name: x / 4 for name, x in want.items()})


def test_two_half_batches_have_the_gradients_of_the_whole():
    model, batch = model_for("sparse"), padded(left=(0, 9))
    items = (batch["labels"][:, 1:] != -100).sum()
    want = {name: x.clone() for name, x in gradients(model, model(**batch).loss)[0].items()}
    model.zero_grad()
    halves = [{name: x[i : i + 1] for name, x in batch.items()} for i in range(2)]
    outputs = [model(**half, num_items_in_batch=items) for half in halves]
    for output in outputs:  # after both forwards: each keeps its own gradients
        output.loss.backward()
    got = {n: p.grad for n, p in model.named_parameters() if ".indexer." in n}
    assert_near(got, want)


def test_without_labels_the_loss_is_a_mean_over_real_tokens():
    model, batch = model_for("sparse"), padded(left=(0, 9), right=(4, 0))
    labels = batch.pop("labels")
    items, tokens = (labels[:, 1:] != -100).sum(), batch["attention_mask"].sum()
    alone = model(**batch)
    assert alone.loss is None and items != tokens
    with_labels = model(**batch, labels=labels).indexer_loss
    torch.testing.assert_close(alone.indexer_loss * tokens, with_labels * items)
    by_count = model(**batch, num_items_in_batch=7).indexer_loss
    torch.testing.assert_close(by_count * 7, with_labels * items)
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    by_shifted = model(**batch, labels=labels, shift_labels=shifted).indexer_loss
    assert torch.equal(by_shifted, with_labels)


def test_a_backward_that_does_not_ask_for_the_loss_leaves_the_indexers_alone():
    model = model_for("sparse")
    output = model(**whole())
    output.indexer_loss.backward(retain_graph=True)
    indexers, others = gradients(model, output.logits.square().mean())
    assert others and not any(x.any() for x in indexers.values())


def test_padding_and_empty_rows_add_nothing():
    model, batch = model_for("sparse"), padded(left=(0, 9), right=(4, 0))
    batch.pop("position_ids")
    want = model(**batch, num_items_in_batch=1).indexer_loss
    longer = {
        name: torch.cat([x, torch.full_like(x[:1], {"labels": -100}.get(name, 0))])
        for name, x in batch.items()
    }
    got = model(**longer, num_items_in_batch=1).indexer_loss
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    batch["input_ids"] = batch["input_ids"].where(batch["attention_mask"] == 1, 5)
    torch.testing.assert_close(model(**batch, num_items_in_batch=1).indexer_loss, want)


@pytest.mark.parametrize("loss", KINDS_OF_LOSS)
@pytest.mark.parametrize("precision", ["autocast", "weights"])
def test_bfloat16_is_near_float32(precision, loss):
    """Without routed experts and with every position selected, as both are discontinuous."""
    dense = {"index_topk": 64, "mlp_layer_types": ["dense"] * 3}
    exact = model_for(loss, **dense)
    want = exact(**whole())
    wanted, _ = gradients(exact, want.indexer_loss)
    model = model_for(loss, **dense)
    model = model.bfloat16() if precision == "weights" else model
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        got = model(**whole())
    torch.testing.assert_close(got.indexer_loss, want.indexer_loss, rtol=0.02, atol=0)
    indexers, _ = gradients(model, got.indexer_loss)
    assert indexers.keys() == wanted.keys()
    errors = [float((x - wanted[n]).norm() / wanted[n].norm()) for n, x in indexers.items()]
    # mostly the rounding of the layers before, as the comparison of each layer shows
    assert all(x < 0.2 for x in errors)


# ---- forwards without a loss, and rejections ----------------------------------------------------


def test_forwards_that_do_not_train_have_no_loss():
    model, ids = model_for("dense"), token_ids(2, TOKENS)
    with torch.no_grad():
        assert "indexer_loss" not in model(ids)
        cache = models.PagedCache(model, 2, TOKENS, block_size=16)
        assert "indexer_loss" not in model(ids, past_key_values=cache)
        plain = model_for(None).eval()
        got = model.eval()(ids)
    assert "indexer_loss" not in got and torch.equal(got.logits, plain(ids).logits)
    assert "indexer_loss" not in model_for("sparse").eval()(ids)  # with gradients


def test_the_output_is_of_the_class_that_callers_know():
    model = model_for("sparse")
    output, plain = model(**whole()), model_for(None)(**whole())
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
        model_for(loss, kind)


def holes():
    batch = padded()
    batch["attention_mask"][1, 20] = 0
    return batch


IN_FORWARD = {
    "tuple": (whole, {"return_dict": False}, "return_dict must be True with indexer_loss"),
    "holes": (holes, {}, "padding at the ends only"),
    "cache": (whole, {"use_cache": True}, "use_cache must be False"),
    "attentions": (whole, {"output_attentions": True}, "output_attentions must be False"),
}


@pytest.mark.parametrize("batch, arguments, message", IN_FORWARD.values(), ids=IN_FORWARD)
def test_forwards_that_cannot_have_the_loss_are_rejected(batch, arguments, message):
    with pytest.raises(ValueError, match=f"patched model: .*{message}"):
        model_for("sparse")(**batch(), **arguments)


def test_a_replay_is_rejected():
    model, batch = model_for("sparse"), whole()
    with models.record_indices(model) as record:
        model(**batch)
    message = r"indexers of layers \[0, 1, 2\] must run for indexer_loss, got a replay"
    with models.replay_indices(model, record), pytest.raises(ValueError, match=message):
        model(**batch)


def test_a_call_that_bypasses_the_hooks_is_rejected():
    model = model_for("sparse")
    for call in (model.model, model.forward):
        with pytest.raises(ValueError, match="whole model must be called for indexer_loss"):
            call(token_ids(2, TOKENS))


def test_patching_again_changes_the_option():
    model, batch = model_for("dense"), whole()
    want = model_for("sparse")(**batch)
    models.use_custom_pypto(model, block_size=16, indexer_loss="sparse")
    assert torch.equal(model(**batch).loss, want.loss)
    models.use_custom_pypto(model, block_size=16, training="ops")
    assert "indexer_loss" not in model(**batch)
    copied = copy.deepcopy(model_for("sparse"))
    assert torch.equal(copied(**batch).loss, want.loss)


def test_a_frozen_indexer_beside_others_that_learn():
    model, batch = model_for("sparse"), whole()
    want, _ = gradients(model, model(**batch).loss)
    frozen = model.model.layers[1].self_attn.indexer.requires_grad_(False)
    output = model(**batch)
    got, _ = gradients(model, output.loss)
    assert len(want) - len(got) == len([*frozen.parameters()])
    assert_equal(got, {name: want[name] for name in got})


def test_adapters_train_beside_the_indexers():
    peft = pytest.importorskip("peft")
    model = model_for("sparse")
    want, _ = gradients(model, model(**whole()).loss)
    config = peft.LoraConfig(r=4, target_modules=["kv_b_proj", "o_proj"])
    adapted = peft.get_peft_model(model, config).train()
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_(".indexer." in name or "lora" in name)
    got, others = gradients(adapted, adapted(**whole()).loss)
    assert all("lora" in name for name in others)  # adapters start at 0
    prefix = "base_model.model."
    assert_near({name.removeprefix(prefix): x for name, x in got.items()}, want)


def test_a_compiled_model_trains_alike():
    model, batch = model_for("sparse"), whole()
    output = model(**batch)
    want, _ = gradients(model, output.loss)
    again = torch.compile(model, backend="aot_eager")(**batch)
    torch.testing.assert_close(again.indexer_loss, output.indexer_loss)
    assert_near(gradients(model, again.loss)[0], want)


# ---- trainers -----------------------------------------------------------------------------------


def trained(model, folder, steps, **arguments):
    rows = [{"input_ids": ids, "labels": ids} for ids in token_ids(4, TOKENS)]
    return logged_losses(model, folder, rows, steps, **arguments)


@pytest.mark.skipif(not is_accelerate_available(), reason="transformers.Trainer needs accelerate")
@pytest.mark.parametrize(
    "arguments",
    [{}, {"gradient_checkpointing": True}, {"gradient_accumulation_steps": 2}],
    ids=["plain", "checkpointing", "accumulation"],
)
def test_the_trainer_of_transformers_adds_the_loss(arguments, tmp_path):
    with_loss, without = (
        trained(model_for(loss), tmp_path, 3, **arguments) for loss in ("sparse", None)
    )
    assert len(with_loss) == 3
    assert all(a > b + 0.5 for a, b in zip(with_loss, without, strict=True))


@pytest.mark.skipif(not is_accelerate_available(), reason="transformers.Trainer needs accelerate")
@pytest.mark.parametrize("loss", KINDS_OF_LOSS)
def test_indexers_alone_learn_where_attention_looks(loss, tmp_path):
    model = model_for(loss, coefficient=1.0)
    before = copy.deepcopy(model.state_dict())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".indexer." in name)
    first = model(**whole()).indexer_loss
    logged = trained(model, tmp_path, 20, learning_rate=3e-3)
    last = model(**whole()).indexer_loss
    assert last < 0.8 * first and logged[-1] < logged[0]
    changed = {name for name, x in model.state_dict().items() if not torch.equal(x, before[name])}
    assert changed == indexer_names(model)
