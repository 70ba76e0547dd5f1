import itertools
import math

import pytest
import torch
from cases import DTYPES, INT_MAX, INT_MIN, rejection
from numerics import reference
from processes import at_the_end_of_memory, in_a_process
from torch import Tensor
from torch.nn.functional import pad

import custom_pypto
from custom_pypto.reference import MODULES
from custom_pypto.weight_formats import WEIGHT_FORMATS

linear = custom_pypto.weight_only_linear
# rows of x in float32: the most that meet a stored weight, the least that meet a widened one
MOST_STORED, MANY = 16, 17
ROWS = pytest.mark.parametrize("rows", [1, 2, MOST_STORED, MANY], ids=lambda rows: f"{rows}-rows")
KINDS = pytest.mark.parametrize("kind", WEIGHT_FORMATS)


def made(kind: str, *shape: int, seed: int = 0, rows: int = 3, dtype=torch.float32) -> dict:
    g = torch.Generator().manual_seed(seed)
    weight, scales = WEIGHT_FORMATS[kind].quantize(torch.randn(shape, generator=g))
    x = torch.randn(rows, shape[-1], generator=g).to(dtype)
    return dict(x=x, weight=weight, scales=scales)


def transposed(call: dict) -> dict:
    return call | dict(weight=call["weight"].mT.contiguous().mT)


def error(got: Tensor, call: dict) -> float:
    """1 is the most that is allowed."""
    expected = reference.weight_only_linear(**call)
    return MODULES["weight_only_linear"].error(got, expected, call, call)[0]


def assert_equals_the_reference(call: dict) -> None:
    assert error(linear(**call), call) <= 1


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.view(torch.uint8).equal(b.view(torch.uint8))


def matrix(rows: int, weight: Tensor, scales: Tensor | None) -> Tensor:
    """The weight's values: products with ``rows`` rows of the identity at a time, whose ones are
    exact in 16 bits."""
    identity = torch.eye(weight.size(-1) * (2 if weight.dtype == torch.uint8 else 1))
    parts = pad(identity, (0, 0, 0, -len(identity) % rows)).split(rows)
    return torch.cat([linear(part, weight, scales) for part in parts])[: len(identity)].T


def e4m3(byte: int) -> float:
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = 2.0 ** (exponent - 7) * (1 + mantissa / 8) if exponent else 2.0**-6 * mantissa / 8
    return -value if byte >> 7 else value


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
BYTES = torch.arange(256).to(torch.uint8)


@ROWS
def test_each_byte_of_e4m3_equals_the_reference_and_the_format(rows):
    weight = BYTES.view(8, 32).view(torch.float8_e4m3fn)
    expected = torch.tensor([e4m3(byte) for byte in range(256)]).view(8, 32)
    assert expected.max() == 480  # 0x7F, which torch has as NaN
    for scale in (1.0, 2.0**-100, 3.0):
        scales = torch.full((1, 1), scale)
        assert matrix(rows, weight, scales).equal(expected * scale)
        assert reference.weight_only_linear(torch.eye(32), weight, scales).T.equal(expected * scale)


@ROWS
def test_each_int8_equals_the_reference_and_the_format(rows):
    weight = BYTES.view(torch.int8).view(8, 32)
    scales = torch.tensor([1.0, 0.5, 3.0, 2.0**-126, 0.0, -1.0, 2.0**100, 0.25])
    assert matrix(rows, weight, scales).equal(weight.float() * scales[:, None])


@ROWS
@pytest.mark.parametrize("dim", [32, 64])
def test_each_value_of_e2m1_equals_the_reference_and_the_format(rows, dim):
    nibbles = torch.arange(dim) % 16
    weight = (nibbles[::2] | nibbles[1::2] << 4).to(torch.uint8)[None]
    scales = torch.full((1, dim // 32), 128, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    expected = torch.tensor([E2M1[n] for n in nibbles.tolist()])[None]
    assert matrix(rows, weight, scales).equal(2 * expected)


@ROWS
@pytest.mark.parametrize("dim", [32, 64])
def test_each_scale_of_e8m0_equals_the_reference_and_the_format(rows, dim):
    # a half, one, and their negatives: finite for each scale
    weight = torch.tensor([0x21, 0xA9] * (dim // 4), dtype=torch.uint8).expand(256, -1)
    value = torch.tensor([0.5, 1.0, -0.5, -1.0]).repeat(dim // 4)
    scales = torch.stack([BYTES, BYTES.flip(0)][: dim // 32], -1)
    exact = value.double() * torch.exp2(scales.double() - 127).repeat_interleave(32, -1)
    is_nan = (scales == 255).any(-1)  # of a row: 0 times NaN is NaN
    got = matrix(rows, weight, scales.view(torch.float8_e8m0fnu))
    assert got[is_nan].isnan().all() and is_nan.sum() == dim // 32
    assert got[~is_nan].equal(exact[~is_nan].float())


@ROWS
@pytest.mark.parametrize(("dim", "groups"), [(32, 1), (64, 1), (64, 2), (128, 1), (128, 2)])
def test_each_of_4_bits_equals_the_reference_and_the_format(rows, dim, groups):
    nibbles = torch.arange(dim) % 16
    weight = (nibbles[::2] | nibbles[1::2] << 4).to(torch.uint8).repeat(3, 1)
    scales = torch.tensor([[0.5, 3.0], [2.0, -1.0], [1.0, 0.0], [4.0, 0.25], [0.0, 7.0], [-1.0, 8]])
    scales = scales[: 3 * groups].view(3, groups, 2).bfloat16()
    scale, zero = scales.float().repeat_interleave(dim // groups, 1).unbind(-1)
    assert matrix(rows, weight, scales).equal((nibbles - 8) * scale + zero)


@ROWS
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
def test_each_finite_bfloat16_equals_the_reference_and_the_format(rows, turned):
    bits = torch.arange(2**16).to(torch.int16).view(torch.bfloat16)
    weight = bits[bits.float().isfinite() & (bits.float().abs() >= 2**-126)]
    weight = weight[: len(weight) // 32 * 32].view(-1, 32)
    stored = weight.mT.contiguous().mT if turned else weight
    assert matrix(rows, stored, None).equal(weight.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@ROWS
@KINDS
@pytest.mark.parametrize("shape", [(1, 32), (192, 96), (576, 160), (65, 1056), (37, 4224)], ids=str)
def test_result_equals_the_reference(shape, kind, rows, dtype):
    call = made(kind, *shape, rows=rows, dtype=dtype)
    assert_equals_the_reference(call)
    if kind == "bfloat16":
        assert_equals_the_reference(transposed(call))


@KINDS
@pytest.mark.parametrize("panels", [2, 3, 4, 5, 6, 7, 9, 16])
def test_panels_of_16_rows_in_bfloat16_equals_the_reference(panels, kind):
    for shape in [(37, 1056), (6, 75, 160)]:
        call = made(kind, *shape, rows=16 * panels - 3, dtype=torch.bfloat16)
        if len(shape) == 3:
            call["experts"] = torch.arange(len(call["x"]) * 2).reshape(-1, 2) % 7 - 1
        assert_equals_the_reference(call)


@ROWS
@pytest.mark.parametrize("block_size", [32, 96, 128, 256, 1024])
def test_blocks_that_end_early_equals_the_reference(rows, block_size):
    g = torch.Generator().manual_seed(1)
    for shape in ((576, 160), (192, 1056), (33, 96)):
        weight = torch.randn(shape, generator=g).to(torch.float8_e4m3fn)
        scales = 1 + torch.rand([-(-n // block_size) for n in shape], generator=g)
        x = torch.randn(rows, shape[1], generator=g)
        assert_equals_the_reference(dict(x=x, weight=weight, scales=scales, block_size=block_size))


@ROWS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", [32, 64, 96, 128, 192, 256, 4224, 8448])
def test_groups_of_4_bits_equals_the_reference(rows, group, dtype):
    g = torch.Generator().manual_seed(group)
    dim = max(group, 384) if 384 % group == 0 else group
    weight = torch.randint(256, (21, dim // 2), generator=g).to(torch.uint8)
    scales = torch.randn(21, dim // group, 2, generator=g).bfloat16()
    x = torch.randn(rows, dim, generator=g).to(dtype)
    assert_equals_the_reference(dict(x=x, weight=weight, scales=scales))


@pytest.mark.parametrize("rows", [1, 3, 16, 17, 32, 33])
@pytest.mark.parametrize("dim", [96, 160, 1056])
def test_scales_of_e8m0_far_apart_equals_the_reference(rows, dim):
    g = torch.Generator().manual_seed(rows)
    weight = torch.randint(256, (75, dim // 2), generator=g).to(torch.uint8)
    scales = torch.randint(60, 180, (75, dim // 32), generator=g).to(torch.uint8)
    scales[0], scales[1], scales[2, 0], scales[3, 0] = 20, 230, 1, 239
    scales[3, 1:] = 1  # below the range of bfloat16 beside 239
    x = torch.randn(rows, dim, generator=g).bfloat16()
    scales[70, 1] = 255
    call = dict(x=x, weight=weight, scales=scales.view(torch.float8_e8m0fnu))
    assert linear(**call)[:, 70].isnan().all()
    scales[70, 1] = 0
    assert_equals_the_reference(call)


@KINDS
@pytest.mark.parametrize("rows", [MOST_STORED, MANY])
def test_scales_of_the_neighbour_are_seen(kind, rows):
    call = made(kind, 256, 384, rows=rows)
    if kind == "bfloat16":
        return assert_neighbour(call, "weight", 0)
    for dim in range(min(call["scales"].dim(), 2)):
        assert_neighbour(call, "scales", dim)


def assert_neighbour(call: dict, name: str, dim: int) -> None:
    assert error(linear(**call | {name: call[name].roll(1, dim)}), call) > 1


@ROWS
def test_a_zero_that_cancels_a_row_leaves_rounding_of_float32_only(rows):
    # x is rounded; what is subtracted is a sum of the same rounded values
    g = torch.Generator().manual_seed(0)
    weight = torch.full((5, 256), 0x88, dtype=torch.uint8)
    scales = torch.tensor([1.0, 0.0]).bfloat16().expand(5, 4, 2)
    x = torch.randn(rows, 512, generator=g)
    assert linear(x, weight, scales).abs().max() < 2**-22 * 8 * x.abs().sum(-1).max()


@KINDS
def test_rows_give_the_same_however_many_there_are(kind):
    for call in [made(kind, 130, 1056, rows=600)] + [transposed(made(kind, 130, 96, rows=600))] * (
        kind == "bfloat16"
    ):
        x = call["x"]
        few = torch.cat([linear(**call | dict(x=part)) for part in x.split(MOST_STORED)])
        for rows in (1, 2, 3, 4, 7, MOST_STORED):
            parts = [linear(**call | dict(x=part)) for part in x[:112].split(rows)]
            assert same_bits(torch.cat(parts), few[:112]), rows
        for rows in (MANY, 600):
            assert error(linear(**call | dict(x=x[:rows])), call | dict(x=x[:rows])) <= 1
        assert error(few, call) <= 1


@KINDS
@pytest.mark.parametrize("rows", [1, MOST_STORED, MANY, 600])
def test_bits_do_not_depend_on_the_number_of_threads(kind, rows):
    calls = [made(kind, n, 1056, rows=rows) for n in (70, 700)]
    if kind == "bfloat16":
        calls.append(transposed(calls[-1]))
    calls.append(made(kind, 5, 70, 96, rows=rows))
    calls[-1]["experts"] = torch.randint(-1, 6, (rows, 3))
    for call in calls:
        results = []
        for threads in (1, 2, 5, 40):
            torch.set_num_threads(threads)
            results.append(linear(**call))
        assert all(same_bits(one, results[0]) for one in results)


@ROWS
@KINDS
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_nan_or_infinite_values_of_x_stay_in_their_row(value, kind, rows):
    call = made(kind, 70, 160, rows=rows + 2)
    calls = [call, transposed(call)] if kind == "bfloat16" else [call]
    for call in calls:
        clean = linear(**call)
        for column in (0, 33, 159):
            x = call["x"].clone()
            x[1, column] = value
            got = linear(**call | dict(x=x))
            assert not got[1].isfinite().any()
            others = torch.arange(len(x)) != 1
            assert same_bits(got[others], clean[others])


@ROWS
@pytest.mark.parametrize("kind", [kind for kind in WEIGHT_FORMATS if kind != "bfloat16"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_nan_or_infinite_scales_stay_in_their_rows(value, kind, rows):
    call = made(kind, 300, 160, rows=rows)
    clean, scales = linear(**call), call["scales"].clone()
    if kind == "fp4":
        scales.view(torch.uint8)[200, 3] = 255  # NaN; e8m0 has no infinity
    else:
        scales[1 if kind == "fp8" else 200].view(-1)[-1] = value
    touched = torch.zeros(300, dtype=torch.bool)
    touched[128 : 256 if kind == "fp8" else 128] = kind == "fp8"
    touched[200] = True
    got = linear(**call | dict(scales=scales))
    assert not got[:, touched].isfinite().any()
    assert same_bits(got[:, ~touched].contiguous(), clean[:, ~touched].contiguous())


@ROWS
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_nan_or_infinite_values_of_bfloat16_stay_in_their_row(value, rows):
    call = made("bfloat16", 70, 160, rows=rows)
    call["weight"][69, 100] = value
    for given in (call, transposed(call)):
        clean = linear(**given | dict(weight=given["weight"].nan_to_num(1, 1, 1)))
        got = linear(**given)
        assert not got[:, 69].isfinite().any()
        assert same_bits(got[:, :69].contiguous(), clean[:, :69].contiguous())


@KINDS
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_experts_are_those_of_the_ids_and_others_give_zeros(kind, dtype):
    call = made(kind, 4, 70, 160, rows=5)
    x, weight, scales = call.values()
    of_int64 = [-(2**63), 2**63 - 1, 2**32, 2**32 + 1] if dtype == torch.int64 else []
    wild = [INT_MIN, INT_MIN + 1, -5, -1, 4, 5, INT_MAX - 1, INT_MAX, *of_int64]
    experts = torch.tensor([[0, 3, 1], [2, 2, 0], *[[e, 1, e] for e in wild]], dtype=dtype)
    x = x[torch.arange(len(experts)) % 5]
    got = linear(x, weight, scales, experts=experts)
    assert got.shape == (len(experts), 3, 70)
    for row, ids, out in zip(x, experts.tolist(), got, strict=True):
        for e, one in zip(ids, out, strict=True):
            if 0 <= e < 4:
                assert same_bits(one, linear(row, weight[e], None if scales is None else scales[e]))
            else:
                assert one.eq(0).all()
    each = x[:, None].expand(-1, 3, -1)
    assert same_bits(linear(each, weight, scales, experts=experts), got)
    assert same_bits(linear(x[0], weight, scales, experts=experts[0]), got[0])


@KINDS
def test_experts_of_many_rows_equals_the_reference(kind):
    call = made(kind, 3, 70, 160, rows=90)
    call["experts"] = torch.randint(-1, 4, (90, 2))
    call["experts"][:60, 0] = 1  # the others have few
    assert_equals_the_reference(call)


@KINDS
def test_without_rows_or_experts_there_is_nothing_or_zeros(kind):
    x, weight, scales = made(kind, 3, 40, 96, rows=4).values()

    def run(x, weight, scales, experts):
        return linear(x, weight, scales, experts=torch.zeros(experts, dtype=torch.int64))

    assert run(x, weight, scales, (4, 0)).shape == (4, 0, 40)
    assert run(x[:0], weight, scales, (0, 2)).shape == (0, 2, 40)
    of_none = None if scales is None else scales[:0]
    assert run(x, weight[:0], of_none, (4, 2)).equal(torch.zeros(4, 2, 40))
    of_no_row = None if scales is None else scales[:, :0]
    assert run(x, weight[:, :0], of_no_row, (4, 2)).shape == (4, 2, 0)


def test_a_weight_that_is_expanded_to_more_experts_than_memory_counts_is_taken():
    x, weight, _ = made("bfloat16", 1, 40, 96).values()
    experts = torch.tensor([[0, 2**40 - 1, 2**40]] * 3)
    got = linear(x, weight.expand(2**40, -1, -1), experts=experts)
    assert same_bits(got[:, 0], got[:, 1]) and got[:, 2].eq(0).all()
    assert same_bits(got[:, 0].contiguous(), linear(x, weight[0]))


def test_rejects_more_columns_than_the_kernels_count():
    x = torch.zeros(1, 1).expand(1, 2**30 + 32)
    weight = torch.zeros(1, 1, dtype=torch.bfloat16).expand(1, 2**30 + 32)
    assert rejection(linear, dict(x=x, weight=weight)) == (
        "weight_only_linear: x.size(-1) must be a positive multiple of 32 up to 2**30 (K), got "
        f"{2**30 + 32}"
    )


def wrong_at_the_end_of_memory() -> list:
    wrong = []
    sizes = itertools.product(WEIGHT_FORMATS, (1, 7, 16, 70), (32, 96, 160, 192), (1, 5, 17))
    for kind, rows, columns, of_x in sizes:
        call = made(kind, rows, columns, rows=of_x)
        with_experts = made(kind, 2, rows, columns, rows=of_x)
        with_experts["experts"] = torch.tensor([[1, 2, 0]] * of_x)
        for given in (call, with_experts, *[transposed(call)] * (kind == "bfloat16")):
            there = {name: at_the_end_of_memory(x) for name, x in given.items()}
            if not same_bits(linear(**there), linear(**given)):
                wrong.append((kind, rows, columns, of_x))
    return wrong


def test_nothing_behind_a_tensor_is_read():
    assert in_a_process(wrong_at_the_end_of_memory) == []
