"""Activations that layers with weights in int8 round to int8, too (W8A8): of the op, and of models
loaded with them."""

import itertools
import math

import pytest
import torch
from cases import DTYPES, rejection
from numerics import reference
from processes import at_the_end_of_memory, in_a_process
from tiny import tiny_model, token_ids

import custom_pypto
from custom_pypto import models
from custom_pypto.reference import MODULES
from custom_pypto.weight_formats import WEIGHT_FORMATS

linear = custom_pypto.weight_only_linear
# the most tokens that are never rounded, and the least that are
EXACT, ROUNDED = 16, 17


def made(*shape: int, rows: int = 40, dtype: torch.dtype = torch.bfloat16) -> dict:
    g = torch.Generator().manual_seed(5)
    weight, scales = WEIGHT_FORMATS["int8"].quantize(torch.randn(shape, generator=g))
    x = torch.randn(rows, shape[-1], generator=g).to(dtype)
    return dict(x=x, weight=weight, scales=scales, int8_x=True)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.view(torch.uint8).equal(b.view(torch.uint8))


def assert_equals_the_reference(call: dict) -> None:
    got, want = linear(**call), reference.weight_only_linear(**call)
    assert MODULES["weight_only_linear"].error(got, want, call, call)[0] <= 1


# whole tiles, and rows and values that fill none
SHAPES = [(64, 128, 32), (70, 160, 17), (33, 1088, 50), (200, 64, 100), (1, 4224, 40)]


@pytest.mark.parametrize("rows, columns, tokens", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_result_equals_the_reference(dtype, rows, columns, tokens):
    assert_equals_the_reference(made(rows, columns, rows=tokens, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_equal_the_reference(dtype):
    call = made(3, 70, 192, rows=90, dtype=dtype)
    call["experts"] = torch.randint(-1, 4, (90, 2))
    call["experts"][:60, 0] = 1  # the others have few
    assert_equals_the_reference(call)
    # of a row for each expert
    call["x"] = call["x"][:, None] * torch.tensor([1, 0.25], dtype=dtype)[:, None]
    assert_equals_the_reference(call)


def test_a_row_is_rounded_by_its_own_largest_value():
    call = made(70, 128)
    call["x"][3] *= 2.0**100
    call["x"][5] *= 2.0**-90
    call["x"][7] = 0
    assert_equals_the_reference(call)
    assert linear(**call)[7].eq(0).all()


def test_few_tokens_are_exact():
    call = made(4, 70, 128, rows=ROUNDED)
    call["experts"] = torch.randint(0, 4, (ROUNDED, 3))
    exact = call | {"int8_x": False}
    assert not same_bits(linear(**call), linear(**exact))
    for given in (call, exact):
        given["x"], given["experts"] = given["x"][:EXACT], given["experts"][:EXACT]
    assert same_bits(linear(**call), linear(**exact))
    # tokens count, not their rows
    rows = call["x"][:, None].expand(-1, 3, -1).contiguous()
    assert same_bits(linear(**call | {"x": rows}), linear(**exact | {"x": rows}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_nan_or_infinite_values_stay_in_their_row(value, dtype):
    call = made(70, 128, dtype=dtype)
    clean = linear(**call)
    call["x"][1, 33] = value
    got, others = linear(**call), torch.arange(len(clean)) != 1
    assert got[1].isnan().all()
    assert same_bits(got[others], clean[others])


@pytest.mark.parametrize("columns", [2**17, 2**17 + 64])
def test_the_largest_values_of_long_rows_overflow_nothing(columns):
    weight = torch.full((18, columns), -128, dtype=torch.int8)
    x = torch.full((ROUNDED, columns), -1.0, dtype=torch.bfloat16)
    got = linear(x, weight, torch.ones(18), int8_x=True)
    assert torch.equal(got, torch.full_like(got, 128 * columns))


def test_bits_do_not_depend_on_threads():
    call, bits, threads = made(300, 1024, rows=70), [], torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            bits.append(linear(**call))
    finally:
        torch.set_num_threads(threads)
    assert all(same_bits(one, bits[0]) for one in bits)


def test_one_row_has_one_expert_without_dims():
    call = made(3, 70, 128, rows=1)
    x, expert = call["x"][0], torch.tensor(2)
    want = linear(**call | dict(x=call["x"], experts=expert[None, None]))[0, 0]
    assert same_bits(linear(**call | dict(x=x, experts=expert)), want)


def wrong_at_the_end_of_memory() -> list:
    wrong = []
    for rows, columns, tokens in itertools.product((1, 17, 70), (64, 160, 576), (17, 40)):
        call = made(rows, columns, rows=tokens)
        there = {n: at_the_end_of_memory(call[n]) for n in ("x", "weight", "scales")}
        if not same_bits(linear(**call | there), linear(**call)):
            wrong.append((rows, columns, tokens))
    return wrong


def test_nothing_behind_a_tensor_is_read():
    assert in_a_process(wrong_at_the_end_of_memory) == []


def test_other_weights_are_rejected():
    for kind in WEIGHT_FORMATS.keys() - {"int8"}:
        weight, scales = WEIGHT_FORMATS[kind].quantize(torch.randn(64, 64))
        call = dict(x=torch.randn(20, 64), weight=weight, scales=scales, int8_x=True)
        assert rejection(linear, call) == (
            "weight_only_linear: int8_x must be False for a weight that is not int8, got True"
        )


# ---- models -------------------------------------------------------------------------------------


@pytest.fixture(scope="module", name="saved")
def saved_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    tiny_model().save_pretrained(path)
    return path


@torch.no_grad()
def logits(model, tokens):
    return model(token_ids(1, tokens), use_cache=False).logits


@pytest.mark.parametrize("weights", ["int8", {"experts": "int8"}, {"rest": "int8"}], ids=str)
def test_prompts_of_a_model_have_rounded_activations(weights, saved):
    options = dict(dtype=torch.float32, weights=weights)
    plain = models.load(saved, **options)
    rounded = models.load(saved, activations="int8", **options)
    assert torch.equal(logits(rounded, EXACT), logits(plain, EXACT))
    assert not torch.equal(logits(rounded, 40), logits(plain, 40))
    kinds = {name: m.kind for name, m in plain.named_modules() if getattr(m, "kind", None)}
    rounding = {name for name, m in rounded.named_modules() if getattr(m, "int8_x", False)}
    assert rounding == kinds.keys() and {*kinds.values()} == {"int8"}


def test_a_saved_model_in_int8_is_loaded_with_them(saved, tmp_path):
    model = models.load(saved, weights="int8", activations="int8")
    model.save_pretrained(tmp_path)
    again = models.load(tmp_path, activations="int8")
    assert torch.equal(logits(again, 40), logits(model, 40))
    assert not torch.equal(logits(models.load(tmp_path), 40), logits(model, 40))


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(activations="fp8"), "activations must be 'int8' or None, got 'fp8'"),
        (dict(activations="int8"), "for a model without weights in int8.*pass weights='int8'"),
        (dict(activations="int8", weights="int4"), "for weights in int4.*pass weights='int8'"),
        (dict(activations="int8", weights="int8", memory="1GB"), "must be None with memory"),
    ],
)
def test_what_they_do_not_work_with_is_rejected(options, message, saved):
    with pytest.raises(ValueError, match=f"load: .*{message}"):
        models.load(saved, **options)


def test_a_batch_invariant_model_cannot_have_them(saved):
    model = models.load(saved, weights="int8", activations="int8")
    with pytest.raises(ValueError, match="rounds activations.*load the model without activations"):
        models.use_custom_pypto(model, batch_invariant=True)
    model = models.use_custom_pypto(models.load(saved, weights="int8"), batch_invariant=True)
    model.model.layers[0].self_attn.o_proj.int8_x = True
    with pytest.raises(TypeError, match="must not call weight_only_linear with int8_x"):
        logits(model, 4)
