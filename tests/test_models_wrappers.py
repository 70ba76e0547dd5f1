"""A patch finds attentions by their class, inside of others' wrappers, and happens whole or not."""

import copy

import pytest
import torch
from accelerate.utils import compile_regions
from model_harness import TOLERANCES, no_grad_and_one_thread, trace  # noqa: F401
from processes import python
from repository import REPOSITORY
from tiny import ALL_KINDS, tiny_model, token_ids
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import FSDPModule

from custom_pypto import models
from custom_pypto.models import CACHE
from custom_pypto.models.patched import text_model


def checkpointed(model):
    """torch's wrapper, as accelerate's ``fsdp_activation_checkpointing`` puts it around layers."""
    layers = list(text_model(model).layers)
    apply_activation_checkpointing(model, check_fn=lambda module: any(module is x for x in layers))
    return model


def compiled(model):
    layers = text_model(model).layers
    for i, layer in enumerate(layers):
        layers[i] = torch.compile(layer, backend="eager")
    return model


def attentions_checkpointed(model):
    inside = [layer.self_attn for layer in text_model(model).layers]
    apply_activation_checkpointing(model, check_fn=lambda module: any(module is x for x in inside))
    return model


WRAPPERS = {
    "checkpoint_wrapper": checkpointed,
    "checkpoint_wrapper-of-attentions": attentions_checkpointed,
    "OptimizedModule": compiled,
    "compile_regions": lambda model: compile_regions(model, backend="eager"),
}


@pytest.mark.parametrize("first", ["patched", "wrapped"])
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_wrapped_layers_are_patched(wrap, first):
    upstream, ids = tiny_model(num_hidden_layers=2), token_ids(2, 30)
    want = upstream(ids).logits
    model = copy.deepcopy(upstream)
    if first == "patched":
        model = wrap(models.use_custom_pypto(model))
    else:
        model = models.use_custom_pypto(wrap(model))
    output = model(ids[:, :29], use_cache=True)
    step = model(ids[:, 29:], cache=output[CACHE])
    got = torch.cat([output.logits, step.logits], 1)
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCES["deepseek_v32"])
    models.use_transformers(model)
    assert not any("custom_pypto" in type(x).__module__ for x in model.modules())


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_checkpointed_layers_train(kind):
    upstream = tiny_model(kind).train()
    patched = models.use_custom_pypto(copy.deepcopy(upstream), training="ops")
    ids = token_ids(2, 30)
    found = []
    for model in (upstream, checkpointed(patched)):
        with torch.enable_grad():
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        grads = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        found.append(torch.stack([loss.detach(), *grads]))
    # by the rounding of sums of gradients over layers and tokens; a lost path moves norms by 1e-1
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)


# ---- whole or not at all ----------------------------------------------------------------------


def with_hook(model):
    model.model.layers[1].self_attn.kv_b_proj.register_forward_hook(lambda *args: None)


def with_backward_hook(model):
    model.model.layers[1].self_attn.kv_b_proj.register_full_backward_hook(lambda *args: None)


def with_other_forward(model):
    attention = model.model.layers[2].self_attn
    attention.forward = lambda *args, **kwargs: type(attention).forward(attention, *args, **kwargs)


def with_other_attention(model):
    layer = model.model.layers[2]
    layer.self_attn.__class__ = type("Attention", (type(layer.self_attn),), {})


def with_a_layer_less(model):
    del model.model.layers[1]


def with_a_layer_twice(model):
    model.model.layers[1] = model.model.layers[0]


CHANGES = [with_hook, with_backward_hook, with_other_forward, with_other_attention]
CHANGES += [with_a_layer_less, with_a_layer_twice]


@pytest.mark.parametrize("already", [False, True], ids=["stock", "patched"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_rejected_patch_leaves_the_model_as_it_was(change, already):
    model = tiny_model()
    if already:
        models.use_custom_pypto(model, block_size=32)
    change(model)
    before = trace(model)
    with pytest.raises((TypeError, ValueError), match="the attention of|kv_b_proj of layer 1"):
        models.use_custom_pypto(model, block_size=64)
    assert trace(model) == before
    if already:
        assert model.model._custom_pypto.cache["block_size"] == 32


@pytest.mark.parametrize("change", [with_backward_hook, with_a_layer_less, with_a_layer_twice])
def test_what_comes_after_the_patch_is_rejected_by_a_forward(change):
    model = models.use_custom_pypto(tiny_model())
    change(model)
    with pytest.raises((TypeError, ValueError), match="layer_idx=1, got|with a backward hook"):
        model(token_ids(1, 8))
    models.use_transformers(model)(token_ids(1, 8), use_cache=False)


WIDTHS = {"kv_lora_rank": 40, "qk_rope_head_dim": 8, "index_head_dim": 40, "index_topk": 2049}


@pytest.mark.parametrize("name", WIDTHS)
def test_a_width_that_no_op_takes_is_rejected_by_the_name_of_its_attribute(name):
    model = tiny_model(**{name: WIDTHS[name]})
    before = trace(model)
    with pytest.raises(ValueError, match=f"config.{name} must be .*, got {WIDTHS[name]}"):
        models.use_custom_pypto(model)
    assert trace(model) == before


def test_a_model_of_fsdp2_is_patched_again_and_undone():
    model = tiny_model()
    plain, of_layer = type(model), type(model.model.layers[0])
    models.use_custom_pypto(model)
    for module in (model, *model.model.layers):  # the classes that fully_shard gives them
        own = type(module)
        module.__class__ = type(f"FSDP{own.__name__}", (FSDPModule, own), {})
    models.use_custom_pypto(model, block_size=32)
    with models.record_indices(model, experts=True) as record:
        model(token_ids(1, 20))
    assert record.experts[1].shape == (1, 20, 2)
    models.use_transformers(model)
    assert not hasattr(model.model, "_custom_pypto")
    assert all(type(layer).__bases__ == (FSDPModule, of_layer) for layer in model.model.layers)
    with pytest.raises(TypeError, match="model must be a .*, got .*Other"):
        model.__class__ = type("Other", (plain,), {})
        models.use_custom_pypto(model)


RELOADED = """
import copy, importlib, sys
import torch
from tiny import tiny_model, token_ids
import custom_pypto
from custom_pypto import models

upstream, ids = tiny_model(num_hidden_layers=2), token_ids(1, 40)
patched = models.use_custom_pypto(copy.deepcopy(upstream))

def check(model):
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, upstream(ids).logits, rtol=0, atol=5e-5)
        model.generate(ids, max_new_tokens=2)

for name in [name for name in sys.modules if name.startswith("custom_pypto")]:
    importlib.reload(sys.modules[name])
from custom_pypto import models as again
check(patched)
check(again.use_custom_pypto(copy.deepcopy(upstream)))
check(again.use_custom_pypto(patched))
again.use_transformers(patched)
assert type(patched.model.layers[0].self_attn) is type(upstream.model.layers[0].self_attn)
for name in [name for name in sys.modules if name.startswith("custom_pypto")]:
    del sys.modules[name]
from custom_pypto import models as anew
check(anew.use_custom_pypto(copy.deepcopy(upstream)))
"""


@pytest.mark.slow
def test_modules_can_be_reloaded_and_imported_again():
    result = python("-c", RELOADED, path=[REPOSITORY, REPOSITORY / "tests"])
    assert result.returncode == 0, result.stderr
