import pytest
import torch
from cases import DTYPES
from cases.npu_quant_rows_pto import inputs as rows_inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import reference

import custom_pypto
from custom_pypto.reference.npu_quant_rows_pto import dequantized_rows, hadamard_matrix
from custom_pypto.rows import index

quantize = custom_pypto.npu_quant_rows_pto


def assert_equal(got: tuple, expected: tuple) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine.nan_to_num(-1), theirs.nan_to_num(-1))


def row(*values: float, dim: int = 16) -> torch.Tensor:
    return torch.tensor(values + (0.0,) * (dim - len(values)))[None]


@settings(max_examples=200)
@given(
    st.sampled_from(DTYPES),
    st.sampled_from([16, 32, 48, 128, 1024]),
    st.integers(0, 70),
    st.integers(-40, 30),
    st.integers(0, 2**31),
)
def test_equals_the_reference_to_the_bit(dtype, dim, rows, exponent, seed):
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, dim, generator=g) * 2.0**exponent).to(dtype)
    assert_equal(quantize(x), reference.npu_quant_rows_pto(x))


def test_ties_between_two_steps_go_to_the_even_one():
    # 127 / 254 is 0.5: odd values lie between two steps, and ties go to the even one
    x = row(254, *range(1, 30, 2), dim=32)
    rows, scales = quantize(x)
    assert rows[0, 1:16].tolist() == [0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14]
    assert rows[0, 0] == 127 and scales[0] == 2


@pytest.mark.parametrize("place", range(16))
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_magnitude_becomes_127_wherever_it_is(place, sign):
    for largest in (1e-4, 0.0078125, 1.0, 3.0, 61_000.0):
        x = torch.linspace(-0.5, 0.5, 16)[None] * largest
        x[0, place] = sign * largest
        rows, scales = quantize(x)
        assert rows[0, place] == sign * 127 and rows.abs().max() == 127
        assert scales[0] == torch.tensor(largest / 127).half()


def test_a_row_of_zeros_has_a_positive_scale():
    for x in (row(), -row(), row(1e-12)):
        rows, scales = quantize(x)
        assert not rows.any() and 7e-7 < float(scales[0]) < 9e-7


def test_smaller_rows_than_the_least_maximum_are_rounded_to_its_steps():
    rows, _ = quantize(row(1e-5, -4e-5))
    assert rows[0, :2].tolist() == [13, -51]


def test_corruption_shows_in_the_scale():
    inf, nan = torch.inf, torch.nan
    for x, scale in ((row(1, inf), inf), (row(-inf, 1), inf), (row(nan, 1, inf), nan)):
        rows, scales = quantize(x)
        assert not rows.any()
        assert torch.equal(
            scales.nan_to_num(5.0, inf), torch.tensor([scale]).half().nan_to_num(5.0, inf)
        )
    other_rows, _ = quantize(torch.cat([row(nan), row(1)]))
    assert other_rows[1, 0] == 127


def test_the_error_is_at_most_half_a_step():
    x = torch.randn(100, 128, dtype=torch.float64)
    rows, scales = quantize(x.float())
    # and the rounding of the scale to float16, of at most 127 steps
    bound = (0.5 + 127 * 2**-11 + 1e-3) * scales.double()[:, None]
    assert ((dequantized_rows(rows, scales) - x).abs() <= bound).all()


@pytest.mark.parametrize("dim", [16, 32, 128])
def test_rotated_rows_have_the_same_products(dim):
    matrix = hadamard_matrix(dim)
    assert matrix.equal(index.hadamard_matrix(dim))  # what the models rotate by
    assert torch.allclose(matrix @ matrix.T, torch.eye(dim), atol=1e-6)
    x = torch.randn(40, dim)
    x[:, ::7] *= 30  # the outliers that rotation spreads
    exact = x.double() @ x.double().T
    errors = []
    for hadamard in (None, matrix):
        rows = dequantized_rows(*quantize(x, hadamard=hadamard))
        errors.append(float((rows @ rows.T - exact).norm() / exact.norm()))
    assert errors[1] < 0.02 and errors[1] < errors[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotated_rows_are_rounded_to_the_dtype_of_x(dtype):
    x = rows_inputs([5], [], dtype=dtype, hadamard=True)
    rotated = (x["x"].double() @ x["hadamard"].double()).to(dtype)
    got, expected = dequantized_rows(*quantize(**x)), dequantized_rows(*quantize(rotated))
    # sums may round to a neighbour, the largest one as well
    step = expected.abs().amax(-1, keepdim=True) * (1 / 127 + 2 * torch.finfo(dtype).eps)
    assert ((got - expected).abs() <= 1.01 * step).all()


@pytest.mark.parametrize("shape", [(16,), (0, 16), (3, 0, 16), (2, 3, 4, 16)], ids=str)
def test_takes_any_number_of_dims(shape):
    x = torch.randn(shape)
    rows, scales = quantize(x)
    assert rows.shape == shape and scales.shape == shape[:-1]
    assert_equal((rows, scales), reference.npu_quant_rows_pto(x))
