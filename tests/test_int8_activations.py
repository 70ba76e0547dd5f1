"""Activations that layers with weights in int8 or 4 bits round to int8 (W8A8, W4A8): of the op, and
of models loaded with them."""

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
# the most tokens of a step, and the least of a prompt
FEW, MANY = 16, 17
# for so many tokens x is rounded; for int8 in a prompt alone
ROUNDED = {"int8": MANY, "int4": FEW, "fp4": FEW}
every_kind = pytest.mark.parametrize("kind", ROUNDED)


def made(
    *shape: int, kind: str = "int8", rows: int = 40, dtype: torch.dtype = torch.bfloat16
) -> dict:
    g = torch.Generator().manual_seed(5)
    weight, scales = WEIGHT_FORMATS[kind].quantize(torch.randn(shape, generator=g))
    x = torch.randn(rows, shape[-1], generator=g).to(dtype)
    return dict(x=x, weight=weight, scales=scales, int8_x=True)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.view(torch.uint8).equal(b.view(torch.uint8))


def assert_equals_the_reference(call: dict) -> None:
    got, want = linear(**call), reference.weight_only_linear(**call)
    assert MODULES["weight_only_linear"].error(got, want, call, call)[0] <= 1


# whole tiles and units, and rows and values that fill none
SHAPES = [(64, 128, 32), (70, 160, 17), (33, 1088, 50), (200, 64, 100), (1, 4224, 40)]
SHAPES_OF_STEPS = [(64, 128, 1), (70, 160, 16), (33, 1088, 5), (200, 64, 2), (19, 4224, 9)]
CASES = [("int8", shape) for shape in SHAPES]
CASES += [(kind, shape) for kind in ("int4", "fp4") for shape in SHAPES_OF_STEPS + SHAPES]


@pytest.mark.parametrize("kind, shape", CASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_result_equals_the_reference(dtype, kind, shape):
    *of_weight, tokens = shape
    assert_equals_the_reference(made(*of_weight, kind=kind, rows=tokens, dtype=dtype))


@pytest.mark.parametrize("tokens", [1, 6, FEW, 70])
@pytest.mark.parametrize("groups", [1, 3, 16])
@pytest.mark.parametrize("group", [None, 32, 64, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_that_are_their_own_rounding_have_exact_products(dtype, group, groups, tokens):
    """Of weights of int4, or with no group of fp4."""
    g = torch.Generator().manual_seed(groups)
    columns = (group or 32) * groups
    weight = torch.randint(0, 256, (50, columns // 2), dtype=torch.uint8, generator=g)
    if group is None:
        exponents = torch.randint(100, 150, (50, groups), dtype=torch.uint8, generator=g)
        scales = exponents.view(torch.float8_e8m0fnu)
    else:
        scales = torch.randn(50, groups, 2, generator=g).bfloat16()
    x = torch.randint(-127, 128, (tokens, columns), generator=g).float().unflatten(-1, (-1, 32))
    x[..., 5] = 127
    x *= 2.0 ** torch.randint(-20, 20, (tokens, columns // 32, 1), generator=g)
    call = dict(x=x.flatten(-2).to(dtype), weight=weight, scales=scales)
    got, want = linear(**call, int8_x=True), reference.weight_only_linear(**call)
    # float32 sums alone: not by what `int8_x` allows
    assert MODULES["weight_only_linear"].error(got, want, call, call)[0] <= 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_kind
def test_experts_equal_the_reference(kind, dtype):
    tokens = 90
    call = made(3, 70, 192, kind=kind, rows=tokens, dtype=dtype)
    call["experts"] = torch.randint(-1, 4, (tokens, 2))
    call["experts"][: tokens * 2 // 3, 0] = 1  # the others have few
    assert_equals_the_reference(call)
    # of a row for each expert
    call["x"] = call["x"][:, None] * torch.tensor([1, 0.25], dtype=dtype)[:, None]
    assert_equals_the_reference(call)


@every_kind
def test_a_row_is_rounded_by_its_own_largest_value(kind):
    call = made(70, 128, kind=kind, rows=ROUNDED[kind])
    call["x"][3] *= 2.0**100
    call["x"][5] *= 2.0**-90
    call["x"][7] = 0
    assert_equals_the_reference(call)
    assert linear(**call)[7].eq(0).all()


@every_kind
def test_the_number_of_tokens_says_what_is_rounded(kind):
    call = made(4, 70, 128, kind=kind)
    call["experts"] = torch.randint(0, 4, (MANY, 3))
    for tokens in (FEW, MANY):
        given = call | dict(x=call["x"][:tokens], experts=call["experts"][:tokens])
        exact = given | {"int8_x": False}
        rounds = kind != "int8" or tokens == MANY
        assert same_bits(linear(**given), linear(**exact)) == (not rounds)
        # tokens count, not their rows
        rows = given["x"][:, None].expand(-1, 3, -1).contiguous()
        assert same_bits(linear(**given | {"x": rows}), linear(**given))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@every_kind
def test_nan_or_infinite_values_stay_in_their_row(kind, value, dtype):
    call = made(70, 128, kind=kind, rows=ROUNDED[kind], dtype=dtype)
    clean = linear(**call)
    call["x"][1, 33] = value
    got, others = linear(**call), torch.arange(len(clean)) != 1
    assert got[1].isnan().all()
    assert same_bits(got[others], clean[others])


@pytest.mark.parametrize("columns", [2**17, 2**17 + 64])
def test_the_largest_values_of_long_rows_overflow_nothing(columns):
    weight = torch.full((18, columns), -128, dtype=torch.int8)
    x = torch.full((MANY, columns), -1.0, dtype=torch.bfloat16)
    got = linear(x, weight, torch.ones(18), int8_x=True)
    assert torch.equal(got, torch.full_like(got, 128 * columns))


@pytest.mark.parametrize(
    "kind, tokens", [("int8", 70), *itertools.product(("int4", "fp4"), (3, 70))]
)
def test_bits_do_not_depend_on_threads(kind, tokens):
    call, bits, threads = made(300, 1024, kind=kind, rows=tokens), [], torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            bits.append(linear(**call))
    finally:
        torch.set_num_threads(threads)
    assert all(same_bits(one, bits[0]) for one in bits)


@every_kind
def test_one_row_has_one_expert_without_dims(kind):
    call = made(3, 70, 128, kind=kind, rows=1)
    x, expert = call["x"][0], torch.tensor(2)
    want = linear(**call | dict(x=call["x"], experts=expert[None, None]))[0, 0]
    assert same_bits(linear(**call | dict(x=x, experts=expert)), want)


def wrong_at_the_end_of_memory() -> list:
    wrong = []
    shapes = itertools.product(ROUNDED, (1, 17, 70), (64, 160, 576, 1024), (1, 5, 17, 40))
    for kind, rows, columns, tokens in shapes:
        call = made(rows, columns, kind=kind, rows=tokens)
        there = {n: at_the_end_of_memory(call[n]) for n in ("x", "weight", "scales")}
        if not same_bits(linear(**call | there), linear(**call)):
            wrong.append((kind, rows, columns, tokens))
    return wrong


def test_nothing_behind_a_tensor_is_read():
    assert in_a_process(wrong_at_the_end_of_memory) == []


def test_other_weights_are_rejected():
    for kind in WEIGHT_FORMATS.keys() - ROUNDED.keys():
        weight, scales = WEIGHT_FORMATS[kind].quantize(torch.randn(64, 64))
        call = dict(x=torch.randn(20, 64), weight=weight, scales=scales, int8_x=True)
        assert rejection(linear, call) == (
            "weight_only_linear: int8_x must be False for a weight that has neither int8 nor 4 "
            "bits, got True"
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


@pytest.mark.parametrize(
    "weights, kind",
    [("int8", "int8"), ({"experts": "int8"}, "int8"), ({"rest": "int8"}, "int8"), ("int4", "int4")],
    ids=str,
)
def test_activations_of_a_model_are_rounded(weights, kind, saved):
    options = dict(dtype=torch.float32, weights=weights)
    plain = models.load(saved, **options)
    rounded = models.load(saved, activations="int8", **options)
    for tokens in (FEW, MANY):
        rounds = kind != "int8" or tokens == MANY
        assert torch.equal(logits(rounded, tokens), logits(plain, tokens)) == (not rounds)
    kinds = {name: m.kind for name, m in plain.named_modules() if getattr(m, "kind", None)}
    rounding = {name for name, m in rounded.named_modules() if getattr(m, "int8_x", False)}
    assert rounding == kinds.keys() and {*kinds.values()} == {kind}


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
        (dict(activations="int8"), "for a model without weights in int8 or int4 or fp4, got"),
        (dict(activations="int8", weights="stored"), "got 'int8'; pass weights='int8' or 'int4'"),
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
