"""A ``kv_b_proj`` that another library has quantized: a weight alone is dequantized by the patch,
and put back afterwards; anything else is rejected with the remedy.

The libraries are optional. What the patch does is also tested on a subclass of a weight that says
what torchao's says of itself.
"""

import copy
import logging

import peft
import pytest
import torch
from model_harness import (
    assert_close,
    in_steps,
    no_grad_and_one_thread,  # noqa: F401
    trace,
    whole_graph,
)
from tiny import KINDS, clear_case, tiny_model, token_ids
from torch import nn
from torch.utils._pytree import tree_map_only

from custom_pypto import models
from custom_pypto.models import dequantization, foreign_weights

QUANTIZED_AGAIN = r"call models.use_custom_pypto\(model\) again, which dequantizes it"


class Int8Rows(torch.Tensor):
    """int8 and a scale per row: torchao's class of this name keeps them so, and says the same."""

    def __new__(cls, data, scales):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scales.dtype)

    def __init__(self, data, scales):
        self.data_, self.scales, self.act_quant_kwargs = data, scales, None

    def __tensor_flatten__(self):
        return ["data_", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(**inner)

    def dequantize(self):
        return self.data_ * self.scales

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(args[0].data_.clone(), args[0].scales.clone())
        args, kwargs = tree_map_only(cls, cls.dequantize, (args, kwargs or {}))
        return func(*args, **kwargs)


Int8Rows.__module__, Int8Rows.__name__ = "torchao.quantization", "Int8Tensor"


def projections(model):
    return [layer.self_attn.kv_b_proj for layer in model.model.layers]


def as_int8_rows(model):
    for linear in projections(model):
        weight = linear.weight.detach()
        scales = weight.abs().amax(1, keepdim=True) / 127
        rows = Int8Rows((weight / scales).round().to(torch.int8), scales)
        linear.weight = nn.Parameter(rows, requires_grad=False)
    return model


def by_torchao(config, **options):
    def quantize(model):
        torchao = pytest.importorskip("torchao.quantization")
        torchao.quantize_(model, getattr(torchao, config)(**options))
        return model

    return quantize


def by_quanto(weights, frozen=True, **options):
    def quantize(model):
        quanto = pytest.importorskip("optimum.quanto")
        quanto.quantize(model, weights=weights, exclude="lm_head", **options)
        if frozen:
            quanto.freeze(model)
        return model

    return quantize


def by_bitsandbytes(**options):
    def quantize(model):
        bnb = pytest.importorskip("bitsandbytes")
        for attention in (layer.self_attn for layer in model.model.layers):
            for name in ("kv_b_proj", "o_proj"):
                plain = getattr(attention, name)
                cls = bnb.nn.Linear4bit if options else bnb.nn.Linear8bitLt
                sizes = plain.in_features, plain.out_features
                other = cls(*sizes, bias=False, **options or dict(has_fp16_weights=False))
                other.load_state_dict(plain.state_dict())
                setattr(attention, name, other.to("cpu").eval())
        return model

    return quantize


WEIGHT_ALONE = {
    "subclass": as_int8_rows,
    "torchao-int8": by_torchao("Int8WeightOnlyConfig"),
    "torchao-fp8": by_torchao("Float8WeightOnlyConfig"),
    "torchao-int4-in-int8": by_torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4),
    "quanto-int8": by_quanto("qint8"),
    "quanto-fp8": by_quanto("qfloat8"),
    "bitsandbytes-nf4": by_bitsandbytes(quant_type="nf4"),
    "bitsandbytes-fp4-double": by_bitsandbytes(quant_type="fp4", compress_statistics=True),
}
INPUTS_TOO = {
    "torchao-dynamic": (
        by_torchao("Int8DynamicActivationInt8WeightConfig"),
        "a Int8Tensor that does not quantize the weight alone; .*modules_to_not_convert=",
    ),
    "quanto-activations": (by_quanto("qint8", activations="qint8"), 'QLinear .*exclude="'),
    "quanto-not-frozen": (by_quanto("qint8", frozen=False), 'QLinear .*exclude="'),
    "bitsandbytes-8bit": (by_bitsandbytes(), "Linear8bitLt .*llm_int8_skip_modules="),
}
weight_alone = pytest.mark.parametrize("quantize", WEIGHT_ALONE.values(), ids=WEIGHT_ALONE)


def logits(model, seed=1):
    return in_steps(model, token_ids(2, 42, seed), 40)


def assert_same_logits(quantized, patched):
    seed, want = clear_case(lambda seed: logits(quantized, seed))
    assert_close(logits(patched, seed), want, quantized.config.model_type)


@weight_alone
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_alone_is_dequantized_and_gives_upstreams_logits(kind, quantize):
    quantized = quantize(tiny_model(kind))
    patched = models.use_custom_pypto(quantize(tiny_model(kind)), block_size=16)
    assert {(type(p), type(p.weight)) for p in projections(patched)} == {(nn.Linear, nn.Parameter)}
    assert_same_logits(quantized, patched)


@weight_alone
def test_the_quantized_modules_come_back_as_they_were(quantize):
    model = quantize(tiny_model())
    before, originals, want = trace(model), projections(model), logits(model)
    for _ in range(2):  # patched twice: options are set anew
        models.use_custom_pypto(model, block_size=16)
    models.use_transformers(model)
    assert trace(model) == before
    assert all(now is then for now, then in zip(projections(model), originals, strict=True))
    assert torch.equal(logits(model), want)


@weight_alone
def test_a_state_dict_in_between_has_the_plain_weight_once(quantize):
    model = models.use_custom_pypto(quantize(tiny_model()), block_size=16)
    names = [name for name in model.state_dict() if ".kv_b_proj." in name]
    assert names == [f"model.layers.{i}.self_attn.kv_b_proj.weight" for i in range(3)]
    assert sum("kv_b_proj" in name for name, _ in model.named_parameters()) == 3


@weight_alone
def test_quantizing_after_the_patch_is_rejected_until_patched_again(quantize):
    patched = quantize(models.use_custom_pypto(tiny_model(), block_size=16))
    with pytest.raises(TypeError, match=f"kv_b_proj of layer 0 .*{QUANTIZED_AGAIN}"):
        patched(token_ids(1, 8))
    models.use_custom_pypto(patched, block_size=16)
    assert_same_logits(quantize(tiny_model()), patched)


@pytest.mark.parametrize("quantize, message", INPUTS_TOO.values(), ids=INPUTS_TOO)
@pytest.mark.parametrize("order", ["before", "after"])
def test_inputs_that_are_quantized_too_are_rejected_with_the_remedy(quantize, message, order):
    message = f"kv_b_proj of layer 0 .* got .*{message}.*kv_b_proj"
    if order == "before":
        model = quantize(tiny_model())
        before = trace(model)
        with pytest.raises(TypeError, match=message):
            models.use_custom_pypto(model)
        assert trace(model) == before
    else:
        model = quantize(models.use_custom_pypto(tiny_model(), block_size=16))
        with pytest.raises(TypeError, match=message):
            model(token_ids(1, 8))


@pytest.mark.parametrize("ignore", [["lm_head"], ["lm_head", "re:.*kv_b_proj"]], ids=len)
def test_compressed_tensors_are_rejected_with_their_remedy(ignore):
    lifecycle = pytest.importorskip("compressed_tensors.quantization")
    weights = lifecycle.QuantizationArgs(num_bits=4, group_size=32, strategy="group")
    scheme = lifecycle.QuantizationScheme(targets=["Linear"], weights=weights)
    config = lifecycle.QuantizationConfig(config_groups={"all": scheme}, ignore=ignore)
    model = tiny_model(q_lora_rank=64)
    lifecycle.apply_quantization_config(model, config)
    for projection in projections(model):  # as its first forward does, of ignored modules, too
        lifecycle.lifecycle.forward.set_forward_quantized(projection)
    with pytest.raises(TypeError, match=r"kv_b_proj of layer 0 .*\(dequantize=True\)"):
        models.use_custom_pypto(model)


def test_a_rejected_model_keeps_its_quantized_modules():
    model = as_int8_rows(tiny_model())
    model.model.layers[2].self_attn.kv_b_proj.register_forward_hook(lambda *_: None)
    originals = projections(model)
    with pytest.raises(TypeError, match="kv_b_proj of layer 2 .* with a forward hook"):
        models.use_custom_pypto(model)
    assert all(now is then for now, then in zip(projections(model), originals, strict=True))


def test_one_line_of_the_log_names_layers_library_and_memory(caplog):
    model = as_int8_rows(tiny_model())
    with caplog.at_level(logging.WARNING, "custom_pypto"):
        models.use_custom_pypto(model)
    nbytes = sum(p.weight.nbytes for p in projections(model))
    assert caplog.messages == [
        "kv_b_proj of layers 0 to 2, quantized by torchao, is dequantized to float32 "
        f"({nbytes / 1e6:.1f} MB), because its weight is absorbed; models.use_transformers(model) "
        "puts it back"
    ]


def test_layers_are_named_in_runs():
    assert dequantization.named([4]) == "layer 4"
    assert dequantization.named([0, 1, 2, 7, 9, 10]) == "layers 0 to 2 and 7 and 9 to 10"


def test_a_weight_that_changed_after_the_patch_is_kept(caplog):
    model = models.use_custom_pypto(as_int8_rows(tiny_model()), block_size=16)
    first, second, third = projections(model)
    second.weight.mul_(2)
    model.model.layers[2].self_attn.kv_b_proj = other = copy.deepcopy(third)
    models.use_transformers(model)
    now = projections(model)
    assert type(now[0].weight) is Int8Rows and now[1] is second and now[2] is other
    assert "kv_b_proj of layer 1 stays plain" in caplog.text


def test_a_copy_of_a_patched_model_has_quantized_modules_of_its_own():
    model = models.use_custom_pypto(as_int8_rows(tiny_model()), block_size=16)
    copied = models.use_transformers(copy.deepcopy(model))
    assert {type(p.weight) for p in projections(copied)} == {Int8Rows}
    assert {type(p.weight) for p in projections(model)} == {nn.Parameter}
    assert torch.equal(logits(copied), logits(models.use_transformers(model)))


def test_lora_after_the_patch_counts_and_stays_when_the_modules_come_back():
    config = peft.LoraConfig(r=4, target_modules=["kv_b_proj"], init_lora_weights=False)
    patched = models.use_custom_pypto(as_int8_rows(tiny_model()), block_size=16)
    torch.manual_seed(7)
    peft.inject_adapter_in_model(config, patched)
    seed, want = clear_case(lambda seed: logits(patched.eval(), seed))
    restored = models.use_transformers(patched)
    assert {type(p.base_layer.weight) for p in projections(restored)} == {Int8Rows}
    assert_close(logits(restored, seed), want)


def test_another_dtype_after_the_patch_holds_for_the_modules_that_come_back():
    quantize = by_torchao("Int8WeightOnlyConfig")
    model = models.use_custom_pypto(quantize(tiny_model()), block_size=16).bfloat16()
    models.use_transformers(model)
    assert {type(p.weight).__name__ for p in projections(model)} == {"Int8Tensor"}
    assert logits(model).dtype == torch.bfloat16


def test_a_weight_packed_for_avx512_bf16_is_unpacked_in_a_copy():
    functional = pytest.importorskip("bitsandbytes.functional")
    linear = projections(by_bitsandbytes(quant_type="nf4")(tiny_model().bfloat16()))[0]
    want = foreign_weights.dequantized_projection(linear, "bitsandbytes")
    # what the forward does on such a CPU
    linear.weight.data, linear.weight.quant_state = functional._convert_weight_packed_for_cpu(
        linear.weight.data, linear.weight.quant_state
    )
    packed = linear.weight.data
    got = foreign_weights.dequantized_projection(linear, "bitsandbytes")
    assert linear.weight.data is packed or torch.equal(linear.weight.data, packed)
    # its scales are rounded to bfloat16, and so is the product
    torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=0)


@pytest.mark.slow
def test_a_decode_step_of_a_dequantized_model_is_one_graph():
    model = models.use_custom_pypto(as_int8_rows(tiny_model()), block_size=16)
    options = {"max_new_tokens": 6, "do_sample": False}
    seed, want = clear_case(lambda seed: model.generate(token_ids(2, 20, seed), **options))
    options["compile_config"] = whole_graph("aot_eager")
    assert torch.equal(model.generate(token_ids(2, 20, seed), **options), want)
