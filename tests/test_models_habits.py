"""Habits of those who generate, tune and update models: upstream's result, or an error."""

import copy
import tempfile

import pytest
import torch
from model_harness import TOLERANCES, no_grad_and_one_thread  # noqa: F401
from peft import (
    LoraConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    get_peft_model,
    inject_adapter_in_model,
)
from tiny import (
    ALL_KINDS,
    KINDS,
    OWN,
    clear_case,
    representatives,
    tiny_model,
    token_ids,
)
from training_harness import assert_near, checkpointed
from transformers.integrations.peft import MIN_PEFT_VERSION

from custom_pypto import models
from custom_pypto.models import CACHE
from custom_pypto.models.weights.modules import convert, stored_parameters
from custom_pypto.requirements import installed_version, numbers

WITH_DRAFTS = [*KINDS, *(kind for kind in ("mistral_large4", "hy_v4_vl") if kind in OWN)]
# the pinned one is the newest of the package index
OLD_PEFT = numbers(installed_version("peft")) < numbers(MIN_PEFT_VERSION)


def pair(kind, **options):
    upstream = tiny_model(kind)
    return upstream, models.use_custom_pypto(copy.deepcopy(upstream), **options)


# ---- gradients in evaluation mode -------------------------------------------------------------


@pytest.mark.parametrize(
    "names", ["q(_a)?_proj", "q(_b|_gate)?_proj", "kv(_b)?_proj", "o(_b)?_proj"]
)
@pytest.mark.parametrize("kind", representatives(ALL_KINDS))
def test_adapters_of_any_one_projection_have_gradients_in_evaluation_mode(kind, names):
    """Those of queries leave the keys of a cache without one."""
    upstream, ids = tiny_model(kind), token_ids(2, 24)
    torch.manual_seed(3)
    lora = LoraConfig(r=4, target_modules=rf".*self_attn\.{names}", init_lora_weights=False)
    inject_adapter_in_model(lora, upstream, "lora")
    for name, parameter in upstream.named_parameters():
        parameter.requires_grad_("lora" in name)
    gradients = []
    for model in (upstream, models.use_custom_pypto(copy.deepcopy(upstream))):
        with torch.enable_grad():
            model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0] and gradients[0].keys() == gradients[1].keys()
    assert_near(gradients[1], gradients[0], kind)


# ---- generate() feeds more than max_length ----------------------------------------------------


@pytest.mark.parametrize("kind", WITH_DRAFTS)
def test_prompt_lookup_may_draft_past_the_last_token(kind):
    upstream, patched = pair(kind, block_size=16)
    total, drafts = 48, 10  # whole blocks, so that rounding leaves no room

    def generate(model, seed):
        half = token_ids(1, 20, seed)
        ids = torch.cat([half, half], 1)
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=total - 40,
            do_sample=False,
            prompt_lookup_num_tokens=drafts,
        )

    seed, want = clear_case(lambda seed: generate(upstream, seed))
    assert torch.equal(generate(patched, seed), want)
    cache = models.PagedCache(patched, 1, total, block_size=16)
    ids = token_ids(1, 40)
    with pytest.raises(ValueError, match="max_cache_len of at least 57"):
        patched.generate(ids, cache=cache, max_new_tokens=8, prompt_lookup_num_tokens=drafts)


def tuned(model, config):
    torch.manual_seed(0)
    sizes = dict(num_virtual_tokens=20, token_dim=96, num_layers=3, num_attention_heads=4)
    return get_peft_model(model, config(task_type="CAUSAL_LM", **sizes)).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_tuning_generates(kind):
    upstream, patched = (tuned(x, PromptTuningConfig) for x in pair(kind, block_size=16))

    def generate(model, seed):
        ids = token_ids(2, 20, seed)
        mask = torch.ones_like(ids)
        return model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False)

    if OLD_PEFT:
        message = f"prompt tuning needs the peft .* asks for, {MIN_PEFT_VERSION} or newer, got 0"
        with pytest.raises(ValueError, match=message):
            generate(patched, 1)
        return
    seed, want = clear_case(lambda seed: generate(upstream, seed))
    assert torch.equal(generate(patched, seed), want)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_soft_prompts_that_cannot_be_honoured_are_rejected_by_name():
    ids = token_ids(2, 20)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0  # behind the virtual tokens
    call = dict(input_ids=ids, attention_mask=mask, max_new_tokens=2)
    padded = "0 after a 1 in columns 20 to 24 .*prompt tuning"
    with pytest.raises(ValueError, match="needs the peft" if OLD_PEFT else padded):
        tuned(pair("deepseek_v32")[1], PromptTuningConfig).generate(**call)
    with pytest.raises(TypeError, match=f"{CACHE} must be .*prefix tuning"):
        tuned(pair("deepseek_v32")[1], PrefixTuningConfig)(input_ids=ids)


# ---- gradient checkpointing -------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_generate_while_layers_are_checkpointed_gives_the_tokens_of_evaluation(kind, reentrant):
    _, model = pair(kind)

    def generate(seed=1):
        ids = token_ids(2, 30, seed)
        mask = torch.ones_like(ids)
        return model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)

    seed, want = clear_case(generate)
    checkpointed(model.train(), reentrant)
    if kind == "glm5_next":
        with pytest.raises(ValueError, match="checkpointing must be off .*linear attention"):
            generate(seed)
        return
    assert torch.equal(generate(seed), want)


@pytest.mark.skipif("mistral_large4" not in OWN, reason="needs a newer transformers")
@pytest.mark.parametrize("training", ["auto", "ops"])
def test_reentrant_checkpoints_that_lose_a_gradient_are_rejected(training):
    _, model = pair("mistral_large4", training=training)
    checkpointed(model.train(), reentrant=True)
    ids = token_ids(1, 20)
    with torch.enable_grad(), pytest.raises(ValueError, match="use_reentrant=False .*got True"):
        model(ids, labels=ids)


# ---- weights that change ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_two():
    """Plain models with different weights in bfloat16, and a folder with the first."""
    old = tiny_model().bfloat16()
    new = copy.deepcopy(old)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in new.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter += 0.3 * parameter.std() * noise
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        old.save_pretrained(first)
        new.save_pretrained(second)
        yield first, second, new


LOADS = {
    "strict": {},
    "not-strict": {"strict": False},
    "assign": {"assign": True},
}


@pytest.mark.parametrize("options", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("weights", ["int8", "int4", "stored"])
def test_plain_weights_that_are_loaded_are_rounded(of_two, weights, options):
    first, second, new = of_two
    ids = token_ids(1, 20)
    want = models.load(second, weights=weights)(ids).logits
    model = models.load(first, weights=weights)
    assert (model(ids).logits - want).abs().max() > 1
    past = model(ids, use_cache=True)[CACHE]
    copied = copy.deepcopy(model)
    model.load_state_dict(new.state_dict(), **options)
    assert torch.equal(model(ids).logits, want)
    past.reset()  # a cache of before computes with the new weights
    assert torch.equal(model(ids, cache=past).logits, want)
    # a copy has its own weights, and the same rule
    assert not torch.equal(copied(ids).logits, want)
    copied.load_state_dict(new.state_dict(), **options)
    assert torch.equal(copied(ids).logits, want)


@pytest.mark.parametrize("write", ["copy_", "data", "set_", "lerp_"])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_plain_weights_written_by_name_never_become_codes(of_two, weights, write):
    first, _, new = of_two
    model = models.load(first, weights=weights)
    stored = stored_parameters(model)
    name = next(name for name in sorted(stored) if name.endswith("o_proj.weight"))
    parameter, plain = model.get_parameter(name), new.get_parameter(name)
    with pytest.raises((RuntimeError, TypeError)):
        if write == "copy_":
            parameter.copy_(plain)
        elif write == "data":
            parameter.data.copy_(plain)
        elif write == "set_":
            parameter.set_(plain)
        else:
            parameter.lerp_(plain, 0.1)
    with pytest.raises(RuntimeError, match="weight_only_linear"):
        plain = {name: plain}
        torch.func.functional_call(model, plain, (token_ids(1, 4),))


def test_plain_weights_are_rejected_before_anything_is_loaded_where_no_rounding_is_defined(of_two):
    _, _, new = of_two
    model = tiny_model().bfloat16()
    convert(model, {"model.layers.2.self_attn.o_proj": "fp8"})
    before = model.model.embed_tokens.weight.clone()
    for strict in (True, False):
        with pytest.raises(ValueError, match="o_proj.weight must be in fp8 with its scales, got"):
            model.load_state_dict(new.state_dict(), strict=strict)
    assert torch.equal(model.model.embed_tokens.weight, before)


@pytest.mark.parametrize("change", ["copy_", "data", "set_", "assign", "ema", "functional_call"])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_plain_and_absorbed_weights_change_at_once(kind, change):
    upstream, patched = pair(kind)
    ids, new = token_ids(1, 20), copy.deepcopy(upstream)
    past = patched(ids, use_cache=True)[CACHE]
    for parameter in new.parameters():
        parameter.mul_(1.1)
    want, state = new(ids).logits, dict(new.named_parameters())
    if change == "assign":
        patched.load_state_dict(new.state_dict(), assign=True)
    elif change == "functional_call":
        got = torch.func.functional_call(patched, state, (ids,)).logits
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCES[kind])
        return
    else:
        for name, parameter in patched.named_parameters():
            value = state[name].detach().clone()
            if change == "copy_":
                parameter.copy_(value)
            elif change == "data":
                parameter.data = value
            elif change == "set_":
                parameter.set_(value)
            else:
                parameter.lerp_(value, 1.0)
    past.reset()
    for options in ({}, {"cache": past}):
        got = patched(ids, **options).logits
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCES[kind])


# ---- numbers and dtypes as text ---------------------------------------------------------------


OF_THE_PATCH = {
    "block_size": (dict(block_size="128"), TypeError, "block_size must be an int, got str '128'"),
    "coefficient": (
        dict(indexer_loss="sparse", indexer_loss_coefficient="1"),
        ValueError,
        "indexer_loss_coefficient must be a number of at least 0, got '1'",
    ),
    "coefficient-alone": (
        dict(indexer_loss_coefficient=None),
        ValueError,
        "indexer_loss_coefficient must be a number of at least 0, got None",
    ),
    "kv_dtype": (dict(kv_dtype="fp8"), ValueError, "kv_dtype must be torch.int8 or None .*'fp8'"),
}


@pytest.mark.parametrize("call, error, message", OF_THE_PATCH.values(), ids=OF_THE_PATCH)
def test_an_option_of_another_type_is_named(call, error, message):
    with pytest.raises(error, match=f"^use_custom_pypto: {message}"):
        models.use_custom_pypto(tiny_model(), **call)


@pytest.mark.parametrize("name, given", [("batch_size", 1.0), ("max_cache_len", "4096")])
def test_a_size_of_a_cache_of_another_type_is_named(name, given):
    sizes = {"batch_size": 1, "max_cache_len": 16} | {name: given}
    message = f"^PagedCache: {name} must be an int, got {type(given).__name__} {given!r}$"
    with pytest.raises(TypeError, match=message):
        models.PagedCache(models.use_custom_pypto(tiny_model()), **sizes)


def test_the_dtypes_of_a_cache_go_by_their_names():
    model = tiny_model(kv_lora_rank=128).bfloat16()
    models.use_custom_pypto(model, kv_dtype="int8")
    cache = models.PagedCache(model, 1, 16, index_dtype="int8")
    assert cache.dtypes == {"index_dtype": torch.int8, "kv_dtype": torch.int8}
    assert models.PagedCache(model, 1, 16, kv_dtype="bfloat16").dtypes["kv_dtype"] == torch.bfloat16
