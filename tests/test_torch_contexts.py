"""Patched models and ops where a program has changed what torch does by default."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from model_harness import TOLERANCES, no_grad_and_one_thread  # noqa: F401
from tiny import ALL_KINDS, representatives, tiny_model, token_ids
from torch._subclasses.fake_tensor import FakeTensorMode

import custom_pypto
from custom_pypto import models, threads
from custom_pypto.models import CACHE
from custom_pypto.rows import expanded

FORWARD_MODE = "forward-mode derivatives .* are not implemented; use backward"


def expanding(kind):
    """A patched model whose prompts of 96 tokens attend to keys of every head, if it can."""
    changes = {} if kind == "deepseek_v4" else {"index_topk": 96}
    return models.use_custom_pypto(tiny_model(kind, **changes))


@pytest.fixture
def restored_defaults():
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_default_dtype_changes_no_logit(kind, monkeypatch, restored_defaults):
    calls, run = [], expanded.expanded_attention
    monkeypatch.setattr(expanded, "expanded_attention", lambda *x: calls.append(x) or run(*x))
    model, ids = expanding(kind), token_ids(2, 96)
    want = model(ids).logits
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        got = model(ids).logits
        assert got.dtype == torch.float32
        # upstream computes YaRN's frequencies in the default dtype
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCES[kind])
    alone = kind in ("hy_v4", "hy_v4_vl", "deepseek_v4")  # sinks
    assert alone or calls or "amx" in torch.ops.custom_pypto.cpu_isa()


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_default_device_takes_no_tensor_of_a_model_elsewhere(kind, restored_defaults):
    model, ids = expanding(kind), token_ids(2, 96)
    want = model(ids).logits
    torch.set_default_device("meta")
    torch.testing.assert_close(model(ids).logits, want, rtol=0, atol=0)


@pytest.mark.parametrize("kind", representatives(k for k in ALL_KINDS if k != "glm5_next"))
def test_fake_tensors_have_the_shapes_of_a_forward_and_of_a_decode_step(kind):
    # GLM-5.3-Flash: upstream's experts read numbers
    # of float32, upstream's experts have no fake results
    model, ids = expanding(kind).bfloat16(), token_ids(2, 96)
    with FakeTensorMode(allow_non_fake_inputs=True):
        output = model(ids, use_cache=True)
        step = model(ids[:, :1], cache=output[CACHE])
    assert output.logits.shape == (2, 96, 199) and step.logits.shape == (2, 1, 199)
    model, ids = model.to("meta"), ids.to("meta")
    output = model(ids, use_cache=True)
    step = model(ids[:, :1], cache=output[CACHE])
    assert output.logits.shape == (2, 96, 199) and step.logits.shape == (2, 1, 199)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", [kind for kind in ALL_KINDS if kind != "glm5_next"])
def test_training_without_numbers_takes_upstreams_path(kind, device, padded):
    model, ids = expanding(kind).bfloat16().to(device).train(), token_ids(2, 20).to(device)
    also = {"attention_mask": torch.ones_like(ids)} if padded else {}
    fake = FakeTensorMode(allow_non_fake_inputs=True) if device == "cpu" else nullcontext()
    with torch.enable_grad(), fake:
        output = model(ids, labels=ids, **also)
        output.loss.backward()
        models.use_custom_pypto(model, training="ops")
        with pytest.raises(ValueError, match="tensors must have numbers .*training="):
            model(ids, labels=ids)
    assert output.logits.shape == (2, 20, 199)


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_transforms_of_torch_func_see_upstreams_model(kind, mode, monkeypatch):
    for name in ("FEW_SCORES", "UPSTREAM_SCORES"):
        monkeypatch.setattr(models.training, name, 0)  # the ops wherever they can
    upstream = tiny_model(kind)
    upstream.set_experts_implementation("eager")
    patched = models.use_custom_pypto(copy.deepcopy(upstream))
    ids = token_ids(1, 20)

    def gradients(model):
        getattr(model, mode)()

        def loss(parameters):
            return torch.func.functional_call(model, parameters, (ids,), {"labels": ids}).loss

        return torch.func.grad(loss)({k: p.detach() for k, p in model.named_parameters()})

    torch.testing.assert_close(gradients(patched), gradients(upstream), rtol=0, atol=0)
    if mode == "train":
        models.use_custom_pypto(patched, training="ops")
        with pytest.raises(ValueError, match="transforms of torch.func .*training="):
            gradients(patched)


@pytest.mark.parametrize("given", ["16k", "16", "19000B", " 19 K "])
def test_too_small_stacks_of_threads_are_rejected(given, monkeypatch):
    monkeypatch.setenv("OMP_STACKSIZE", given)
    with pytest.raises(ImportError, match="OMP_STACKSIZE must be at least 20K, .*; unset it"):
        threads.check_stack_size()
    for enough in ("20k", "1M", "20480B", "2g", "", "what"):
        monkeypatch.setenv("OMP_STACKSIZE", enough)
        threads.check_stack_size()


# ---- forward mode -----------------------------------------------------------------------------


def attention(query=None, key=None, **also):
    query = torch.randn(1, 2, 4, 64) if query is None else query
    key = torch.randn(1, 30, 1, 64) if key is None else key
    indices = torch.arange(8, dtype=torch.int32).expand(1, 2, 1, 8).contiguous()
    return custom_pypto.npu_sparse_flash_attention_pto(
        query, key, None, indices, 0.1, layout_kv="BSND", sparse_mode=0, **also
    )


def scores(query=None, key=None, weights=None):
    return custom_pypto.npu_lightning_indexer_pto(
        torch.randn(1, 2, 4, 64) if query is None else query,
        torch.randn(1, 30, 1, 64) if key is None else key,
        torch.rand(1, 2, 4) if weights is None else weights,
        layout_key="BSND",
        sparse_count=4,
        sparse_mode=0,
        return_value=True,
    )[1]


DIFFERENTIABLE = {
    "attention-query": (lambda x: attention(query=x), [1, 2, 4, 64]),
    "attention-key": (lambda x: attention(key=x), [1, 30, 1, 64]),
    "attention-sinks": (lambda x: attention(sinks=x), [4]),
    "indexer-query": (lambda x: scores(query=x), [1, 2, 4, 64]),
    "indexer-key": (lambda x: scores(key=x), [1, 30, 1, 64]),
    "indexer-weights": (lambda x: scores(weights=x), [1, 2, 4]),
}


@pytest.mark.parametrize("op, shape", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE)
def test_ops_reject_tangents(op, shape):
    x = torch.rand(shape)
    with pytest.raises(NotImplementedError, match=FORWARD_MODE):
        torch.func.jvp(op, (x,), (torch.ones_like(x),))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=FORWARD_MODE):
        op(forward_ad.make_dual(x, torch.ones_like(x)))
    op(x)  # without a tangent


@pytest.mark.parametrize("absorbed", [False, True], ids=["expanded", "absorbed"])
@pytest.mark.parametrize("kind", [kind for kind in ALL_KINDS if kind != "deepseek_v4"])
def test_a_model_rejects_tangents_or_has_upstreams(kind, absorbed):
    upstream = tiny_model(kind, index_topk=8 if absorbed else 96).requires_grad_(False)
    upstream.set_experts_implementation("eager")
    upstream.set_attn_implementation("eager")
    patched = models.use_custom_pypto(copy.deepcopy(upstream))
    embedded = upstream.get_input_embeddings()(token_ids(1, 96))

    def tangent(model):
        def logits(x):
            return model(inputs_embeds=x, use_cache=False).logits[:, -1]

        return torch.func.jvp(logits, (embedded,), (torch.ones_like(embedded),))[1]

    want = tangent(upstream)
    try:
        torch.testing.assert_close(tangent(patched), want, rtol=0, atol=1e-3 * want.abs().max())
    except NotImplementedError as error:
        # ours, or that of torch's dense attention where keys are expanded
        assert "forward-mode derivatives" in str(error) or "forward AD" in str(error)
