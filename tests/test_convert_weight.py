"""Weights of a checkpoint have the values of the plain formula, in each format of a model."""

import itertools

import pytest
import torch
from cases import rejection
from processes import at_the_end_of_memory, in_a_process
from torch import Tensor

from custom_pypto import layer_ops
from custom_pypto.reference import layer_ops as reference

E8M0 = torch.float8_e8m0fnu
QUANTIZED = [torch.float8_e4m3fn, torch.int8]
PLAIN = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
FLOATS = [torch.bfloat16, torch.float16, torch.float32]
ROUNDED = [torch.int8, torch.uint8]
G = 32  # values of int4 that share scale and zero


def convert_weight(weight, scales=None, block=None, out=None, out_scales=None):
    return layer_ops.convert_weight(weight, scales, block, out, out_scales)


def assert_formula_gives(given: dict, result: dict) -> None:
    """To the bit."""
    want = {name: None if x is None else x.clone() for name, x in result.items()}
    reference.convert_weight(given["weight"], given.get("scales"), given.get("block"), **want)
    for got, other in zip(result.values(), want.values(), strict=True):
        assert_same_bits(got, other)


def columns_of(weight: Tensor) -> int:
    return weight.size(1) * (2 if weight.dtype == torch.int8 else 1)


def memory_for(rows: int, columns: int, dtype: torch.dtype) -> dict[str, Tensor | None]:
    """For the result; all of it is written."""
    width = columns // 2 if dtype == torch.uint8 else columns
    out, scales = torch.full((rows, width), 77).to(dtype), None
    if dtype == torch.int8:
        scales = torch.full((rows,), 77.0)
    if dtype == torch.uint8:
        scales = torch.full((rows, columns // G, 2), 77.0).bfloat16()
    return dict(out=out, out_scales=scales)


def any_of(shape, dtype: torch.dtype) -> Tensor:
    """Random bits: zeros of both signs, subnormals, infinities and NaN are among them."""
    bytes_of = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(256, bytes_of).to(torch.uint8).view(dtype)


def some_of(shape, dtype: torch.dtype) -> Tensor:
    """Numbers that are neither infinite nor NaN, rows of zeros and of one value among them."""
    values = torch.randn(shape)
    values[::5] = 0.0
    values[1::5] = -1e30 if dtype in (torch.float32, torch.float64) else -3.0
    return values.to(dtype)


def call(weight_dtype, rows, columns, scales_dtype, block, make=any_of) -> dict:
    width = columns // 2 if weight_dtype == torch.int8 else columns
    if weight_dtype in PLAIN:
        return dict(weight=make((rows, width), weight_dtype))
    grid = [-(-size // length) for size, length in zip((rows, columns), block, strict=True)]
    scales = make(grid, scales_dtype)
    return dict(weight=any_of((rows, width), weight_dtype), scales=scales, block=block)


def assert_same_bits(got: Tensor | None, want: Tensor | None) -> None:
    """But for sign and payload of NaN, which differ from one CPU to another."""
    if want is None:
        return
    if want.is_floating_point():
        assert got.isnan().equal(want.isnan())
        got, want = (
            got.nan_to_num(0, torch.inf, -torch.inf),
            want.nan_to_num(0, torch.inf, -torch.inf),
        )
    assert got.view(torch.uint8).equal(want.view(torch.uint8))


def assert_converted(given: dict, dtype: torch.dtype) -> None:
    weight = given["weight"]
    result = memory_for(len(weight), columns_of(weight), dtype)
    convert_weight(**given, **result)
    assert_formula_gives(given, result)


# rows, columns, block: whole blocks; partial last ones; ones that start inside of vectors
CASES = [
    (256, 128, (128, 128)),
    (150, 416, (128, 128)),
    (33, 160, (1, 32)),
    (37, 96, (16, 10)),
    (3, 32, (64, 256)),
]


@pytest.mark.parametrize("make", [any_of, some_of])
@pytest.mark.parametrize("dtype", FLOATS + ROUNDED, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("weight_dtype", QUANTIZED + PLAIN, ids=str)
def test_values_are_those_of_the_formula_to_the_bit(weight_dtype, case, dtype, make):
    *shape, block = case
    scales = [torch.float32, torch.bfloat16, torch.float16, E8M0]
    for scales_dtype in scales if weight_dtype in QUANTIZED else [None]:
        assert_converted(call(weight_dtype, *shape, scales_dtype, block, make), dtype)


@pytest.mark.parametrize("scale", [1.0, -0.0, 2.0**-149, 1.5 * 2.0**127, torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("weight_dtype", QUANTIZED, ids=str)
def test_every_byte_times_every_scale_is_the_product_in_float32(weight_dtype, dtype, scale):
    weight = torch.arange(256).to(torch.uint8).view(2, 128).view(weight_dtype)
    columns = 256 if weight_dtype == torch.int8 else 128
    scales = torch.tensor([[scale]])
    assert_converted(dict(weight=weight, scales=scales, block=(2, columns)), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_each_half_is_kept_and_neighbours_round_to_even(dtype):
    halves = torch.arange(2**16).to(torch.int16).view(256, 256).view(dtype)
    assert_converted(dict(weight=halves), dtype)
    middle = halves.float().double()
    between = (middle[:, :-1] + middle[:, 1:]) / 2
    for values in (between, between.nextafter(middle[:, 1:]), between.nextafter(middle[:, :-1])):
        assert_converted(dict(weight=values.float()), dtype)


@pytest.mark.parametrize("columns", range(1, 40))
def test_rows_of_any_length_are_converted(columns):
    for dtype in FLOATS:
        given = call(torch.float8_e4m3fn, 3, columns, torch.float32, (2, 16))
        assert_converted(given, dtype)
        assert_converted(call(torch.int8, 3, 2 * columns, torch.float32, (1, 32)), dtype)
        assert_converted(call(torch.float32, 3, columns, None, None), dtype)


def test_parts_of_memory_are_converted_and_the_rest_is_kept():
    weight, out = torch.randn(7, 100), torch.full((9, 100), 77.0)
    convert_weight(weight[::2, 8:40], out=out[1:9:2, 4:36])
    want = torch.full((9, 100), 77.0)
    want[1:9:2, 4:36] = weight[::2, 8:40]
    assert out.equal(want)


def test_bits_do_not_depend_on_the_number_of_threads():
    given = call(torch.float8_e4m3fn, 1500, 416, torch.float32, (128, 128))
    weight = given["weight"]
    for threads, dtype in itertools.product((1, 2, 5, 40), FLOATS + ROUNDED):
        torch.set_num_threads(threads)
        result = memory_for(len(weight), columns_of(weight), dtype)
        convert_weight(**given, **result)
        assert_formula_gives(given, result)


def test_without_rows_or_columns_nothing_is_written():
    for rows, columns in ((0, 32), (4, 0)):
        convert_weight(torch.zeros(rows, columns), out=torch.zeros(rows, columns))
    given = call(torch.int8, 0, 64, E8M0, (1, 32))
    convert_weight(**given, **memory_for(0, 64, torch.int8))


def wrong_at_the_end_of_memory() -> list:
    wrong = []
    for source, dtype, columns in itertools.product(
        QUANTIZED + PLAIN, FLOATS + ROUNDED, (2, 14, 32, 50, 96)
    ):
        if dtype in ROUNDED and columns % 32:
            continue
        given = call(source, 5, columns, torch.float32, (2, 22))
        results = memory_for(5, columns, dtype), memory_for(5, columns, dtype)
        there = {
            name: at_the_end_of_memory(x) if isinstance(x, Tensor) else x
            for name, x in (given | results[0]).items()
        }
        convert_weight(**there)
        convert_weight(**given, **results[1])
        same = there["out"].view(torch.uint8).equal(results[1]["out"].view(torch.uint8))
        if not same:
            wrong.append((source, dtype, columns))
    return wrong


def test_nothing_behind_a_tensor_is_read_or_written():
    assert in_a_process(wrong_at_the_end_of_memory) == []


def test_the_op_passes_opcheck():
    given = call(torch.int8, 40, 64, torch.float32, (1, 32), some_of)  # torch adds no float8
    op = torch.ops.custom_pypto.convert_weight.default
    for dtype in (torch.bfloat16, torch.int8, torch.uint8):
        torch.library.opcheck(op, (*given.values(), *memory_for(40, 64, dtype).values()))


FP8 = dict(
    weight=torch.zeros(4, 64, dtype=torch.float8_e4m3fn), scales=torch.ones(2, 2), block=(2, 32)
)
OUT = dict(out=torch.zeros(4, 64))
INT8 = memory_for(4, 64, torch.int8)
INT4 = memory_for(4, 64, torch.uint8)
RESULTS = (
    "out.dtype and out_scales.dtype must be float32 and None, float16 and None, bfloat16 and None, "
    "int8 and float32, uint8 and bfloat16, got"
)
REJECTED = {
    "weight.dtype must be float8_e4m3fn or int8 (with scales), got float32": FP8
    | OUT
    | dict(weight=torch.zeros(4, 64)),
    "weight.dtype must be float32, bfloat16, float16 or float64 (without scales), got int8": OUT
    | dict(weight=torch.zeros(4, 64, dtype=torch.int8)),
    "weight must be of shape [N, K], or [N, K / 2] of int8, got [4, 64, 1]": OUT
    | dict(weight=torch.zeros(4, 64, 1)),
    "weight.stride(-1) must be 1": OUT | dict(weight=torch.zeros(64, 4).T),
    "block must be there if scales are, else None, got None": FP8 | OUT | dict(block=None),
    "block must be there if scales are, else None, got a block without scales": OUT
    | dict(weight=torch.zeros(4, 64), block=(2, 32)),
    "block must be two positive sizes": FP8 | OUT | dict(block=(2, 0)),
    "block[1] must be even for weight in int8": FP8
    | OUT
    | dict(weight=torch.zeros(4, 32, dtype=torch.int8), block=(2, 33)),
    "scales.dtype must be float32, bfloat16, float16 or float8_e8m0fnu, got float64": FP8
    | OUT
    | dict(scales=torch.ones(2, 2).double()),
    "scales.size(0) must be 2 (blocks of weight, the last one may be shorter), got 1": FP8
    | OUT
    | dict(scales=torch.ones(1, 2)),
    "scales.size(1) must be 3 (blocks of weight": FP8 | OUT | dict(block=(2, 30)),
    f"{RESULTS} float64 and None": FP8 | dict(out=torch.zeros(4, 64).double()),
    "out.size(1) must be 64 (K of weight), got 32": FP8 | dict(out=torch.zeros(4, 32)),
    "out.size(1) must be 32 (K / 2, two values per byte), got 64": FP8
    | INT4
    | dict(out=torch.zeros(4, 64, dtype=torch.uint8)),
    "out.stride(-1) must be 1": FP8 | dict(out=torch.zeros(64, 4).T),
    f"{RESULTS} int8 and None": FP8 | INT8 | dict(out_scales=None),
    f"{RESULTS} float32 and float32": FP8 | OUT | dict(out_scales=torch.zeros(4)),
    f"{RESULTS} int8 and bfloat16": FP8 | INT8 | dict(out_scales=torch.zeros(4).bfloat16()),
    "out_scales must be of shape [N, K / G, 2] for out in uint8, got [4]": FP8
    | INT4
    | dict(out_scales=torch.zeros(4).bfloat16()),
    "out_scales.size(-2) must be K / G, for a G that is a multiple of 32, got 4": FP8
    | INT4
    | dict(out_scales=torch.zeros(4, 4, 2).bfloat16()),
    "out_scales must be contiguous, got strides [2]": FP8
    | INT8
    | dict(out_scales=torch.zeros(8)[::2]),
    "K of weight must be a multiple of 32 for out in int8, got 48": INT8
    | dict(weight=torch.zeros(4, 48), out=torch.zeros(4, 48, dtype=torch.int8)),
}


@pytest.mark.parametrize("message", REJECTED)
def test_wrong_arguments_are_rejected_by_name(message):
    assert f"convert_weight: {message}" in rejection(convert_weight, REJECTED[message])
