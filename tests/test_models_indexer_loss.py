"""The loss of the indexers: its value and gradients by definition, and nobody else's."""

import pytest
import torch
from model_harness import TOLERANCES as LOGITS
from tiny import clear_case, tiny_model
from training_harness import (
    BATCHES,
    KINDS_OF_LOSS,
    LEARNING,
    TOKENS,
    TOLERANCES,
    assert_equal,
    assert_near,
    gradients,
    model_for,
    one_thread,  # noqa: F401
    padded,
    whole,
)

from custom_pypto import models
from custom_pypto.models import indexer_loss
from custom_pypto.models.absorbed import absorbed_query
from custom_pypto.models.latent_attention import LatentAttention
from custom_pypto.models.patched import text_model

ROUNDING = TOLERANCES["deepseek_v32"]


def indexer_names(model):
    return {name for name, _ in model.named_parameters() if ".indexer." in name}


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
            return torch.cat([rope.upstream(x, x, cos, sin, unsqueeze_dim=2)[0], rest], -1)

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
    model = model_for("auto", kind, loss)
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
    torch.testing.assert_close(got.double() * items, want.detach(), rtol=ROUNDING, atol=0)
    got, want = gradients(model, got * items), gradients(upstream, want)
    assert got.keys() == indexer_names(model)
    assert_near(got, want)


@pytest.mark.parametrize(
    "dtype, tolerance",
    # gradients in bfloat16 are rounded once, which is half of this
    [(torch.float32, ROUNDING), (torch.bfloat16, 2**-8)],
)
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
    model = model_for("auto", kind, loss).to(dtype)
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
        model = model_for("ops", kind, loss)
        with models.record_indices(model) as record:
            output = model(**batch)
        selected = {f"selection {i}": x for i, x in record.indices.items()}
        found = gradients(model, output.loss)
        learned = indexer_names(model) & found.keys()
        assert learned == (indexer_names(model) if loss else set())
        others = {name: x for name, x in found.items() if name not in learned}
        results.append(others | selected | {"logits": output.logits})
    assert_equal(*results)


@pytest.mark.parametrize("kind", LEARNING)
def test_the_loss_of_the_indexers_reaches_nothing_else(kind):
    model = model_for("auto", kind, "sparse")
    found = gradients(model, model(**whole()).indexer_loss)
    assert found.keys() == indexer_names(model) and all(x.any() for x in found.values())


@pytest.mark.parametrize("loss", KINDS_OF_LOSS)
@pytest.mark.parametrize("kind", LEARNING)
def test_dense_training_attends_to_everything(kind, loss):
    """The model with a loss selects all, or is told to attend to all."""
    want = model_for("ops", kind, index_topk=64)
    got = model_for("auto", kind, loss, **({"index_topk": 64} if loss == "sparse" else {}))
    want, got = (model(**BATCHES["left-padding"](1)).logits for model in (want, got))
    torch.testing.assert_close(got, want, rtol=0, atol=LOGITS[kind])


def test_both_losses_agree_where_the_selection_is_everything():
    sparse, dense = (model_for("auto", loss=loss, index_topk=64) for loss in ("sparse", "dense"))
    results = [model(**padded(left=(0, 9), right=(4, 0))) for model in (sparse, dense)]
    torch.testing.assert_close(*(x.indexer_loss for x in results), rtol=ROUNDING, atol=0)
    pairs = zip((sparse, dense), results, strict=True)
    assert_near(*(gradients(model, x.indexer_loss) for model, x in pairs))
