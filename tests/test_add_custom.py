import pytest
import torch
from cases import on_meta
from torch._dynamo.testing import CompileCounterWithBackend

import custom_pypto
from custom_pypto import reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES = [(), (0,), (1,), (63,), (3, 0, 5), (7, 11, 13), (100_003,)]


def pair(shape, dtype=torch.float32):
    return dict(x=torch.randn(shape).to(dtype), y=torch.randn(shape).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_reference_bit_for_bit(shape, dtype):
    x = pair(shape, dtype)
    got, meta = custom_pypto.add_custom(**x), custom_pypto.add_custom(**on_meta(x))
    assert got.dtype == dtype
    assert torch.equal(got, reference.add_custom(**x))
    assert (meta.shape, meta.dtype, meta.device.type) == (got.shape, got.dtype, "meta")


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda x: x.t(), id="transposed"),
        pytest.param(lambda x: x[::2, 1::3], id="every-other"),
        pytest.param(lambda x: x[0].expand(5, -1), id="expanded"),
    ],
)
def test_reads_strided_operands_in_their_order(view):
    a, b = torch.randn(6, 9), torch.randn(6, 9)
    dense = view(b).contiguous()
    assert torch.equal(custom_pypto.add_custom(view(a), dense), view(a) + dense)
    assert torch.equal(custom_pypto.add_custom(dense, view(a)), dense + view(a))
    assert torch.equal(custom_pypto.add_custom(view(a), view(b)), view(a) + view(b))


def test_adds_infinities_and_nan_as_numbers():
    a = torch.tensor([torch.inf, torch.inf, torch.nan, -0.0])
    b = torch.tensor([1.0, -torch.inf, 1.0, -0.0])
    torch.testing.assert_close(custom_pypto.add_custom(a, b), a + b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(3,), (2, 3)], ids=str)
def test_gradient_is_that_of_the_sum(shape):
    a, b = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(custom_pypto.add_custom, (a, b))


def test_one_operand_used_twice_gets_both_gradients():
    a = torch.randn(4, 5, requires_grad=True)
    once = custom_pypto.add_custom(a, a)
    custom_pypto.add_custom(once, a).sum().backward()
    assert torch.equal(a.grad, torch.full((4, 5), 3.0))


def test_operand_that_needs_no_gradient_gets_none():
    a, b = torch.randn(4, requires_grad=True), torch.randn(4)
    custom_pypto.add_custom(a, b).sum().backward()
    assert torch.equal(a.grad, torch.ones(4))
    assert b.grad is None


def test_gradient_of_an_expanded_gradient_is_right():
    a, b = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    custom_pypto.add_custom(a, b).sum().backward()  # sum() sends one number, expanded: strides 0
    assert torch.equal(a.grad, torch.ones(3, 4))
    assert torch.equal(b.grad, torch.ones(3, 4))


def test_backward_returns_two_gradients_that_share_no_memory():
    grad = torch.randn(4, 5)
    first, second = torch.ops.custom_pypto.add_custom_backward(grad)
    assert torch.equal(first, grad)
    assert torch.equal(second, grad)
    kept = grad.clone()
    first.zero_()
    assert torch.equal(second, kept)
    assert torch.equal(grad, kept)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ops_with_gradients_are_registered_as_torch_expects(dtype):
    a, b = (torch.randn(3, 5).to(dtype).requires_grad_() for _ in range(2))
    torch.library.opcheck(torch.ops.custom_pypto.add_custom.default, (a, b))
    torch.library.opcheck(torch.ops.custom_pypto.add_custom_backward.default, (a.detach(),))


def test_forward_and_backward_of_five_shapes_compile_at_most_twice():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(custom_pypto.add_custom, backend=counter, dynamic=True, fullgraph=True)
    for shape in [(2, 3), (4, 5), (6, 7), (8, 3), (16, 33)]:
        a, b = (torch.randn(shape, requires_grad=True) for _ in range(2))
        got = compiled(a, b)
        assert torch.equal(got, a + b)
        got.sum().backward()
        assert torch.equal(a.grad, torch.ones(shape))
    assert counter.frame_count <= 2
