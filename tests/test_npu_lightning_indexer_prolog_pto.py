import pytest
import torch
from cases import DTYPES, copied
from cases.npu_lightning_indexer_prolog_pto import (
    CACHES,
    as_the_recipe_passes_them,
)
from cases.npu_lightning_indexer_prolog_pto import inputs as prolog_inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import reference
from torch._dynamo.testing import CompileCounterWithBackend

import custom_pypto

prolog = custom_pypto.npu_lightning_indexer_prolog_pto


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)  # as the reference: sums in one order


def results(op, x: dict) -> list:
    """Outputs and caches of a call on copies."""
    x = copied(x)
    return [*op(**x), *(x[name] for name in CACHES)]


def assert_same(got: list, expected: list) -> None:
    for mine, other in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)


def identity(x: dict, dim: int = 32) -> dict:
    """The call with a query latent that is the query of one head, and no rotation by a matrix."""
    eye = torch.eye(dim)
    return x | dict(wq_b=eye, hadamard_q=eye, hadamard_k=eye)


@settings(max_examples=100)
@given(
    st.sampled_from(DTYPES),
    st.sampled_from([(16, 16), (32, 16), (32, 32), (128, 64)]),
    st.sampled_from([1, 3, 64]),
    st.sampled_from([torch.int32, torch.int64]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_equals_the_reference(dtype, dims, heads, slot_dtype, w8a8, strided, seed):
    sizes = dict(dim=dims[0], rope=dims[1], heads=heads, dtype=dtype, slot_dtype=slot_dtype)
    x = prolog_inputs([3, 1, 2], [20, 5, 1], w8a8=w8a8, strided=strided, seed=seed, **sizes)
    assert_same(results(prolog, x), results(reference.npu_lightning_indexer_prolog_pto, x))


def test_many_tokens_equal_the_reference():
    x = prolog_inputs([2500], [2600], heads=2, dtype=torch.bfloat16, w8a8=True)
    assert_same(results(prolog, x), results(reference.npu_lightning_indexer_prolog_pto, x))


def test_rotates_the_two_halves_of_the_first_dims():
    """Not neighbours, as in the recipe's operator of this name: the model pairs i with i + R/2."""
    x = identity(prolog_inputs([3], [20], q_rank=32, heads=1))
    angle = torch.tensor([0.3, 0.7, 1.1])
    x["cos_idx_rope"], x["sin_idx_rope"] = (
        f(angle)[:, None].repeat(1, 16) for f in (torch.cos, torch.sin)
    )
    x["q_norm"] = torch.nn.functional.one_hot(torch.tensor([2, 2, 20]), 32).float()
    query, scale, *_ = results(prolog, x)
    rows = query[:, 0] * scale[:, 0].float()
    expected = torch.zeros(3, 32)
    for token in (0, 1):
        expected[token, 2], expected[token, 2 + 8] = angle[token].cos(), angle[token].sin()
    expected[2, 20] = 1  # behind the R dims
    # half a step of 127, and the rounding of the scale to float16
    torch.testing.assert_close(rows, expected, rtol=0, atol=0.5 / 127 + 2**-11)


def test_weights_are_scaled_by_heads_and_dims():
    x = prolog_inputs([3], [20])
    weights = results(prolog, x)[2]
    token, projection = x["token_x"].double(), x["weights_proj"].double() * 4**-0.5 * 32**-0.5
    terms = token.abs() @ projection.abs()  # their sum, in any order, and its rounding to float16
    exact = token @ projection
    bound = len(projection) * 2**-24 * terms + 2**-11 * exact.abs() + 2**-25
    assert ((weights.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("value", [-128, 127])
def test_sums_of_bytes_are_exact(value):
    """In float32 alone a sum of more than 1024 such products would be rounded."""
    x = prolog_inputs([3], [20], q_rank=1536, heads=1, w8a8=True)
    x |= dict(hadamard_q=torch.eye(32), sin_idx_rope=torch.zeros(3, 16))
    x |= dict(cos_idx_rope=torch.ones(3, 16))
    x["q_norm"].fill_(-128)
    x["wq_b"].fill_(value)
    x["wq_b"][0] = torch.arange(-127, -95)  # the last digits of the sums differ
    x["q_norm_scale"], x["wq_b_scale"] = torch.ones(3), torch.ones(32)
    exact = (x["q_norm"].long() @ x["wq_b"].long()).float()
    # float32 rows are quantized without a loss that this test could not see
    x["wq_b_scale"] = 1 / exact[0].abs()
    rows = results(prolog, x)[0][:, 0]
    assert torch.equal(rows, torch.full_like(rows, 127) * exact.sign().to(torch.int8))
    assert_same(results(prolog, x), results(reference.npu_lightning_indexer_prolog_pto, x))


def test_takes_the_shapes_that_the_recipe_passes():
    x = prolog_inputs([5], [20], dtype=torch.bfloat16, w8a8=True)
    plain = x | {name: x[name].float() for name in ("cos_idx_rope", "sin_idx_rope")}
    got, expected = results(prolog, as_the_recipe_passes_them(x)), results(prolog, plain)
    assert got[-1].shape == (*expected[-1].shape, 1)
    assert_same([*got[:-1], got[-1].squeeze(-1)], expected)


def test_shapes_compile_at_most_twice_and_the_reader_sees_the_writes():
    def step(x: dict, table, lengths):
        query, scale, weights = prolog(**x)
        return custom_pypto.npu_quant_lightning_indexer_pto(
            query,
            x["idx_k_cache"],
            weights,
            scale.squeeze(-1),
            x["idx_k_scale_cache"],
            0,
            0,
            actual_seq_lengths_query=torch.tensor([len(query)], dtype=torch.int32),
            actual_seq_lengths_key=lengths,
            block_table=table,
            layout_query="TND",
            sparse_count=8,
        )

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, dynamic=True, fullgraph=True)
    for tokens in (2, 3, 5, 7, 11):
        x = prolog_inputs([tokens], [40])
        reads = torch.tensor([[0, 1, 2]]).int(), torch.tensor([48]).int()
        eager, traced = copied(x), copied(x)
        assert torch.equal(compiled(traced, *reads), step(eager, *reads))
        assert_same([traced[name] for name in CACHES], [eager[name] for name in CACHES])
    assert counter.frame_count <= 2


def test_no_tokens():
    x = prolog_inputs([0], [20])
    query, scale, weights, *caches = results(prolog, x)
    assert (query.shape, scale.shape, weights.shape) == ((0, 4, 32), (0, 4, 1), (0, 4))
    assert_same(caches, [x[name] for name in CACHES])
