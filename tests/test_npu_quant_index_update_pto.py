import pytest
import torch
from cases import DTYPES, copied
from cases.npu_quant_index_update_pto import CACHES
from cases.npu_quant_index_update_pto import inputs as update_inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import reference
from torch._dynamo.testing import CompileCounterWithBackend

import custom_pypto

update = custom_pypto.npu_quant_index_update_pto
SLOTS = [torch.int32, torch.int64]


def written(op, x: dict) -> dict:
    """The caches after the call, on copies of them."""
    x = copied(x)
    assert op(**x) is None
    return {name: x[name] for name in CACHES}


def assert_same(got: dict, expected: dict) -> None:
    for name in CACHES:
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=0, equal_nan=True)


@settings(max_examples=100)
@given(
    st.sampled_from(DTYPES),
    st.sampled_from([16, 32, 128]),
    st.sampled_from([16, 48, 1024]),
    st.sampled_from(SLOTS),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_writes_what_the_reference_writes(dtype, dim, size, slots, hadamard, strided, seed):
    x = update_inputs(
        [3, 1, 0],
        [20, 5, 1],
        dim=dim,
        block_size=size,
        dtype=dtype,
        slot_dtype=slots,
        hadamard=hadamard,
        strided=strided,
        seed=seed,
    )
    torch.set_num_threads(1)  # as the reference: sums of a rotation in one order
    assert_same(written(update, x), written(reference.npu_quant_index_update_pto, x))


def test_rows_and_scales_are_those_of_npu_quant_rows_pto():
    x = update_inputs([2, 3], [20, 30], hadamard=True)
    got = written(update, x)
    rows, scales = custom_pypto.npu_quant_rows_pto(x["x"], hadamard=x["hadamard"])
    for slot, row, scale in zip(
        x["slots"].flatten().tolist(), rows.flatten(0, 1), scales.flatten(), strict=True
    ):
        if slot >= 0:
            assert torch.equal(got["cache"].view(-1, 32)[slot], row)
            assert got["scale_cache"].view(-1)[slot] == scale


def test_a_layer_of_a_pool_is_written_alone():
    x = update_inputs([3, 2], [20, 30])
    pools = {name: torch.stack([x[name]] * 3, 1) for name in CACHES}
    update(**x | {name: pool[:, 1] for name, pool in pools.items()})
    assert_same({name: pool[:, 1] for name, pool in pools.items()}, written(update, x))
    for other in (0, 2):
        assert_same({name: pool[:, other] for name, pool in pools.items()}, x)


@pytest.mark.parametrize("shape", [(), (0,), (4,), (2, 1, 2)], ids=str)
def test_takes_any_number_of_dims(shape):
    x = update_inputs([4], [20])
    rows = x["x"][0, : max(1, torch.Size(shape).numel())] if shape != (0,) else x["x"][0, :0]
    x |= dict(x=rows.reshape(*shape, 32), slots=x["slots"][0, : len(rows)].reshape(shape))
    assert_same(written(update, x), written(reference.npu_quant_index_update_pto, x))


def test_shapes_compile_at_most_twice_and_the_reader_sees_the_writes():
    def step(x, slots, cache, scale_cache, query, query_scale, weights, table, lengths):
        update(x, slots, cache, scale_cache)
        return custom_pypto.npu_quant_lightning_indexer_pto(
            query,
            cache,
            weights,
            query_scale,
            scale_cache,
            0,
            0,
            actual_seq_lengths_key=lengths,
            block_table=table,
            sparse_count=8,
        )

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, dynamic=True, fullgraph=True)
    for tokens in (2, 3, 5, 7, 11):
        x = update_inputs([tokens], [40])
        del x["hadamard"]
        query, query_scale = custom_pypto.npu_quant_rows_pto(torch.randn(1, 1, 4, 32))
        reads = (query, query_scale, torch.ones(1, 1, 4))
        reads += (torch.tensor([[0, 1, 2]]).int(), torch.tensor([48]).int())
        eager, traced = copied(x), copied(x)
        assert torch.equal(compiled(*traced.values(), *reads), step(*eager.values(), *reads))
        assert_same(traced, eager)
    assert counter.frame_count <= 2
