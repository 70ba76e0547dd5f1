"""What is put on a patched model counts: adapters, parametrizations and hooks of every projection;
what absorption cannot know is rejected."""

import copy

import peft
import pytest
import torch
from model_harness import (
    WRONG,
    assert_same,
    assert_same_gradients,
    in_steps,
    no_grad_and_one_thread,  # noqa: F401
    patched_model,
    unchanged,
    upstream_and_patched,
    whole_graph,
)
from peft.functional import delete_adapter, set_adapter
from tiny import KINDS, clear_case, query_projection, representatives, tiny_model, token_ids
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.utils import parametrize
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor

from custom_pypto import models
from custom_pypto.models import CACHE

TARGETS = {
    "kv_b_proj": ["kv_b_proj"],
    "other-projections": ["q_a_proj", "q_b_proj", "q_gate_proj", "kv_a_proj_with_mqa", "o_proj"],
    "indexer": ["wq_b", "wk", "weights_proj"],
    "all-linear": "all-linear",
}


def lora(targets=("kv_b_proj",), r=4, **options):
    targets = targets if isinstance(targets, str) else list(targets)
    return peft.LoraConfig(
        r=r, lora_alpha=2 * r, target_modules=targets, init_lora_weights=False, **options
    )


def with_adapter(model, config, name="default", seed=7):
    torch.manual_seed(seed)
    # as the model's own add_adapter, for which transformers 5.24 wants a newer peft
    peft.inject_adapter_in_model(config, model, name)
    set_adapter(model, name)
    return model.eval()


def logits(model, seed=1):
    """Of a prefill and two decode steps."""
    return in_steps(model, token_ids(2, 42, seed), 40)


def assert_same_logits(upstream, patched):
    assert_same(upstream, patched, logits)


def assert_matters(model, plain):
    assert (logits(model) - logits(plain)).abs().max() > WRONG


# ---- adapters ---------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("kind", representatives(KINDS))
def test_lora_counts_as_in_upstream(kind, targets, order):
    upstream, patched = with_adapter(tiny_model(kind), lora(targets)), tiny_model(kind)
    if order == "before":
        models.use_custom_pypto(with_adapter(patched, lora(targets)), block_size=16)
    else:
        with_adapter(models.use_custom_pypto(patched, block_size=16), lora(targets))
    assert_matters(upstream, tiny_model(kind))
    assert_same_logits(upstream, patched)
    assert_same_logits(upstream, models.use_transformers(patched))


@pytest.mark.parametrize("kind", representatives(KINDS))
def test_generation_with_lora_equals_upstream(kind):
    def generate(model, seed):
        return model.generate(token_ids(2, 20, seed), max_new_tokens=8, do_sample=False)

    upstream, patched = upstream_and_patched(kind)
    for model in (upstream, patched):
        with_adapter(model, lora("all-linear"))
    assert_same(upstream, patched, generate)


@pytest.mark.parametrize("kind", representatives(KINDS))
def test_adapters_can_be_chosen_joined_disabled_and_merged(kind):
    upstream, patched = upstream_and_patched(kind)
    plain = copy.deepcopy(upstream)
    for model in (upstream, patched):
        with_adapter(model, lora(), "a", seed=7)
        with_adapter(model, lora(r=2, use_rslora=True), "b", seed=8)

    def tuned(model):
        return [m for m in model.modules() if isinstance(m, peft.tuners.lora.Linear)]

    def both(change):
        for model in (upstream, patched):
            change(model)
        assert_same_logits(upstream, patched)

    both(lambda model: set_adapter(model, "a"))
    both(lambda model: set_adapter(model, ["a", "b"]))
    assert_matters(upstream, plain)
    both(lambda model: [layer.merge() for layer in tuned(model)])
    both(
        lambda model: [layer.enable_adapters(False) for layer in tuned(model)]
    )  # the merged ones too, in the next forward
    assert_same_logits(plain, patched)
    both(lambda model: [layer.enable_adapters(True) for layer in tuned(model)])
    assert_matters(patched, plain)
    both(lambda model: [delete_adapter(model, name, "lora_") for name in ("a", "b")])
    assert_same_logits(plain, patched)


@pytest.mark.parametrize("kind", representatives(KINDS))
def test_a_peft_model_around_a_patched_one_works_and_merges(kind):
    tuned = []
    for model in upstream_and_patched(kind):
        torch.manual_seed(7)
        tuned.append(peft.get_peft_model(model, lora("all-linear")).eval())
    assert_same_logits(*tuned)
    with pytest.raises(TypeError, match=r"got peft.*PeftModel; pass its get_base_model\(\)"):
        models.use_custom_pypto(tuned[0])
    models.use_transformers(tuned[1].get_base_model())
    assert_same_logits(*tuned)
    models.use_custom_pypto(tuned[1].get_base_model(), block_size=16)
    assert_same_logits(*(model.merge_and_unload() for model in tuned))


@pytest.mark.parametrize("kind", representatives(KINDS))
def test_lora_in_bfloat16_is_as_close_to_float32_as_upstream(kind):
    def difference(model):
        model = with_adapter(model, lora()).to(torch.bfloat16)
        return (logits(model).float() - exact).abs().mean()

    exact = logits(with_adapter(tiny_model(kind, index_topk=64), lora()))
    upstream_error = difference(tiny_model(kind, index_topk=64))
    assert difference(patched_model(kind, index_topk=64)) <= 1.2 * upstream_error


@pytest.mark.slow
@pytest.mark.parametrize("kind", representatives(KINDS))
def test_a_decode_step_with_lora_is_one_graph(kind):
    patched = with_adapter(patched_model(kind), lora(["kv_b_proj", query_projection(kind)]))
    options = {"max_new_tokens": 6, "do_sample": False}
    seed, want = clear_case(lambda seed: patched.generate(token_ids(2, 20, seed), **options))
    options["compile_config"] = whole_graph("aot_eager")
    assert torch.equal(patched.generate(token_ids(2, 20, seed), **options), want)


@pytest.mark.parametrize("kind", representatives(KINDS))
def test_training_of_an_adapter_gives_upstream_gradients(kind):
    assert_same_gradients(*(with_adapter(model, lora()) for model in upstream_and_patched(kind)))


# ---- parametrizations -------------------------------------------------------------------------


class Louder(nn.Module):
    def forward(self, weight):
        return 1.3 * weight


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("kind", representatives(KINDS))
def test_a_parametrization_counts_as_in_upstream(kind, order):
    def parametrized(model):
        for layer in model.model.layers:
            for name in ("kv_b_proj", query_projection(kind)):
                module = getattr(layer.self_attn, name)
                parametrize.register_parametrization(module, "weight", Louder())
        return model

    upstream, patched = parametrized(tiny_model(kind)), tiny_model(kind)
    if order == "before":
        models.use_custom_pypto(parametrized(patched), block_size=16)
    else:
        parametrized(models.use_custom_pypto(patched, block_size=16))
    assert_matters(upstream, tiny_model(kind))
    assert_same_logits(upstream, patched)


# ---- hooks ------------------------------------------------------------------------------------

CALLED = "q_a_proj q_a_layernorm {query_projection} kv_a_proj_with_mqa kv_a_layernorm o_proj"
CALLED_IN_INDEXER = "indexer.wq_b indexer.wk indexer.k_norm indexer.weights_proj"


@pytest.mark.parametrize("name", ["", *CALLED.split(), *CALLED_IN_INDEXER.split()])
@pytest.mark.parametrize("kind", representatives(KINDS))
def test_hooks_are_called_as_in_upstream(kind, name):
    def louder(module, args, output):
        if isinstance(output, tuple):
            return (1.3 * output[0], *output[1:])
        return 1.3 * output

    def hooked(model):
        for i in (0, 2):
            attention = model.model.layers[i].self_attn
            # all elements alike, where a norm or ReLU would cancel that in the ranking
            module = name.format(query_projection=query_projection(kind))
            attention.get_submodule(module).register_forward_hook(louder)
        return model

    assert_same_logits(hooked(tiny_model(kind)), hooked(patched_model(kind)))


# ---- rejections -------------------------------------------------------------------------------


def of_layer(path, change):
    return lambda model: change(model.model.layers[2].self_attn.get_submodule(path))


def replaced(make):
    def apply(model):
        attention = model.model.layers[2].self_attn
        attention.kv_b_proj = make(attention.kv_b_proj)

    return apply


def as_two_tensors(linear):
    linear.weight = nn.Parameter(TwoTensor(linear.weight.data, linear.weight.data.clone()))
    return linear


def with_bias(linear):
    other = nn.Linear(linear.in_features, linear.out_features)
    other.weight = linear.weight
    return other


def quantized(linear):
    dynamic = torch.ao.nn.quantized.dynamic.Linear
    linear.qconfig = torch.ao.quantization.default_dynamic_qconfig
    return dynamic.from_float(linear)


def hooked(module):
    module.register_forward_hook(lambda *_: None)


def other_forward(module):
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **kwargs)


def another_class(module):
    module.__class__ = type("Mine", (type(module),), {})


KV_B = (
    r"use_custom_pypto: kv_b_proj of layer {} must be a plain torch.nn.Linear \(.*\), got {}; .*{}"
)
IA3 = peft.IA3Config(target_modules=["kv_b_proj"], feedforward_modules=[])
HOOK = KV_B.format(2, "Linear with a forward hook", "remove its hook")
INDEXER = r"use_custom_pypto: the indexer of layer 2 must be a plain .*Indexer \(.*\), got .*{}"
OBSTACLES = {
    "hook": (of_layer("kv_b_proj", hooked), HOOK),
    "pre-hook": (
        of_layer("kv_b_proj", lambda m: m.register_forward_pre_hook(lambda *_: None)),
        HOOK,
    ),
    "weight-norm-of-old": (of_layer("kv_b_proj", nn.utils.spectral_norm), HOOK),
    "forward": (
        of_layer("kv_b_proj", other_forward),
        KV_B.format(2, "Linear with a replaced forward", "use_transformers"),
    ),
    "bias": (replaced(with_bias), KV_B.format(2, "one with a bias", "use_transformers")),
    "another-module": (
        replaced(lambda linear: nn.Sequential(linear)),
        KV_B.format(2, "Sequential of torch.nn.modules.container", "use_transformers"),
    ),
    "quantized-module": (
        replaced(quantized),
        KV_B.format(2, "Linear of torch.ao.nn.quantized.dynamic.*", "dequantize it"),
    ),
    "tensor-subclass": (
        replaced(as_two_tensors),
        KV_B.format(2, "one with a TwoTensor", "dequantize it"),
    ),
    "dora": (
        lambda model: with_adapter(model, lora(use_dora=True)),
        KV_B.format(0, "a LoRA of DoraLinearVariant", "merge its adapter .merge_and_unload"),
    ),
    "other-adapter": (
        lambda model: with_adapter(model, IA3),
        KV_B.format(0, "Linear of peft.tuners.ia3.layer", "merge its adapter .merge_and_unload"),
    ),
    "indexer-hook": (of_layer("indexer", hooked), INDEXER.format("with a forward hook")),
    "indexer-forward": (
        of_layer("indexer", other_forward),
        INDEXER.format("with a replaced forward"),
    ),
    "indexer-class": (of_layer("indexer", another_class), INDEXER.format("Mine of .*")),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("change, message", OBSTACLES.values(), ids=OBSTACLES)
@pytest.mark.parametrize("kind", representatives(KINDS))
def test_what_absorption_would_pass_over_is_rejected(kind, change, message):
    patched = patched_model(kind)
    ids = token_ids(1, 20)
    cache = patched(ids)[CACHE]
    change(patched)
    for past in (None, cache):
        with unchanged(cache), pytest.raises(TypeError, match=message):
            patched(ids[:, :1], cache=past)
    # the remedy, in the message, and the same rejection before a patch
    models.use_transformers(patched)(ids)
    with pytest.raises(TypeError, match=message):
        models.use_custom_pypto(patched)


@pytest.mark.parametrize("kind", representatives(KINDS))
def test_adapters_for_each_sequence_are_rejected(kind):
    # peft hands them to its layers by hooks
    tuned = peft.get_peft_model(patched_model(kind), lora()).eval()
    with pytest.raises(TypeError, match="kv_b_proj of layer 0 .* with a forward hook"):
        tuned(token_ids(2, 8), adapter_names=["default", "__base__"])


@pytest.mark.parametrize("kind", representatives(KINDS))
def test_an_adapter_of_a_projection_that_ranks_share_is_rejected(kind):
    model = with_adapter(patched_model(kind), lora())
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        base = model.model.layers[1].self_attn.kv_b_proj.base_layer
        mesh = init_device_mesh("cpu", (2,))
        base.weight = nn.Parameter(distribute_tensor(base.weight, mesh, [Shard(0)]))
        message = "kv_b_proj of layer 1 must have no adapter while .* expert_parallel=True alone"
        with pytest.raises(TypeError, match=message):
            model(token_ids(1, 4))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", representatives(KINDS))
def test_dropout_in_training_mode_is_rejected_where_the_ops_would_run(kind):
    model = patched_model(kind).train()
    cache = models.PagedCache(model, 1, 32)
    model(token_ids(1, 4), cache=cache)
    with_adapter(model, lora(lora_dropout=0.5)).train()
    with pytest.raises(TypeError, match="got a LoRA with dropout in training mode"):
        model(token_ids(1, 4), cache=cache)
    model.eval()(token_ids(1, 4), cache=cache)
    attention = model.model.layers[1].self_attn
    attention.attention_dropout = 0.5  # upstream reads it, and not the config, in each forward
    model(token_ids(1, 4), cache=cache)
    attention.training = True  # as upstream: its own mode, not the model's
    for options in ({"cache": cache}, {"use_cache": False}):
        with pytest.raises(
            ValueError, match="attention_dropout must be 0 .*, got 0.5; call .*eval"
        ):
            model(token_ids(1, 4), **options)
