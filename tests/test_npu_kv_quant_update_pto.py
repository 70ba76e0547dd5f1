import pytest
import torch
from cases import copied
from cases.npu_kv_quant_sparse_flash_attention_pto import inputs as attention_inputs
from cases.npu_kv_quant_update_pto import inputs as update_inputs
from cases.npu_programs import HALF
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import reference
from torch._dynamo.testing import CompileCounterWithBackend

import custom_pypto

update = custom_pypto.npu_kv_quant_update_pto
SLOTS = [torch.int32, torch.int64]


def written(op, x: dict) -> torch.Tensor:
    """The cache after the call, on a copy of it."""
    x = copied(x)
    assert op(**x) is None
    return x["cache"]


@settings(max_examples=100)
@given(
    st.sampled_from(HALF),
    st.sampled_from([(128, 16), (256, 48), (512, 64)]),
    st.sampled_from([16, 48, 1024]),
    st.sampled_from(SLOTS),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_writes_what_the_reference_writes(dtype, dims, size, slots, strided, seed):
    x = update_inputs(
        [3, 1, 0],
        [20, 5, 1],
        latent=dims[0],
        rope=dims[1],
        block_size=size,
        dtype=dtype,
        slot_dtype=slots,
        strided=strided,
        seed=seed,
    )
    assert torch.equal(written(update, x), written(reference.npu_kv_quant_update_pto, x))


def test_a_row_holds_the_quantized_tiles_the_rope_and_the_scales():
    x = update_inputs([2, 3], [20, 30], latent=256)
    rows = written(update, x).flatten(0, 2)[x["slots"][1].long()]
    tiles = x["latent"][1].unflatten(-1, (2, 128)).float()
    scales = rows[:, -8:].contiguous().view(torch.float32)
    largest = tiles.abs().amax(-1).clamp(min=1e-4)
    assert torch.equal(scales, largest / 127)
    values = rows[:, :256].unflatten(-1, (2, 128)).float() * scales.unsqueeze(-1)
    assert ((values - tiles).abs() <= 0.5001 * scales.unsqueeze(-1)).all()
    assert torch.equal(rows[:, 256:288].contiguous().view(torch.bfloat16), x["rope"][1])
    zero = written(update, x | dict(latent=0 * x["latent"])).flatten(0, 2)[x["slots"][1].long()]
    assert not zero[:, :256].any()
    assert torch.equal(zero[:, -8:].contiguous().view(torch.float32), 0 * scales + 1e-4 / 127)


def test_the_reader_attends_to_what_was_written():
    x = attention_inputs([1], [40], sparse_count=1, sparse_mode=0)
    g = torch.Generator().manual_seed(1)
    latent, rope = torch.randn(128, generator=g).bfloat16(), torch.randn(16, generator=g).bfloat16()
    slot = int(x["block_table"][0, 1]) * 16 + 3  # position 19
    update(latent[None], rope[None], torch.tensor([slot]), x["key"])
    x["sparse_indices"].fill_(19)
    out = custom_pypto.npu_kv_quant_sparse_flash_attention_pto(**x)[0, 0]
    scale = latent.float().abs().max() / 127
    assert ((out.float() - latent.float()).abs() <= 0.5 * scale + 2**-8 * latent.abs()).all()


@pytest.mark.parametrize("shape", [(), (0,), (4,), (2, 1, 2)], ids=str)
def test_takes_any_number_of_dims(shape):
    x = update_inputs([4], [20])
    count = torch.Size(shape).numel()
    for name, dims in (("latent", (128,)), ("rope", (16,)), ("slots", ())):
        x[name] = x[name][0, :count].reshape((*shape, *dims))
    assert torch.equal(written(update, x), written(reference.npu_kv_quant_update_pto, x))


def test_shapes_compile_at_most_twice_and_the_reader_sees_the_writes():
    def step(x: dict, reads: dict):
        update(**x)
        return custom_pypto.npu_kv_quant_sparse_flash_attention_pto(**reads, key=x["cache"])

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, dynamic=True, fullgraph=True)
    for tokens in (21, 23, 29, 31, 37):  # that no other size equals
        x = update_inputs([tokens], [40])
        reads = attention_inputs([1], [40])
        blocks = x["cache"].size(0)
        reads["block_table"] = torch.arange(3, dtype=torch.int32)[None] % blocks
        del reads["key"]
        eager, traced = copied(x), copied(x)
        got, expected = compiled(traced, reads), step(eager, reads)
        assert torch.equal(got.nan_to_num(), expected.nan_to_num())
        assert torch.equal(traced["cache"], eager["cache"])
    assert counter.frame_count <= 2
