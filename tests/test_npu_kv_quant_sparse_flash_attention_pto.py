import numpy as np
import pytest
import torch
from cases import LAYOUT_IDS, LAYOUTS, int32
from cases.npu_kv_quant_sparse_flash_attention_pto import inputs, quantized
from cases.npu_programs import HALF
from numerics import assert_close_to_rows, reference

from custom_pypto import npu_kv_quant_sparse_flash_attention_pto as attend
from custom_pypto import npu_sparse_flash_attention_pto
from custom_pypto.reference.npu_kv_quant_sparse_flash_attention_pto import dequantized_latents
from custom_pypto.rows import latents


def unquantized(x: dict) -> dict:
    """The call of npu_sparse_flash_attention_pto on the dequantized rows."""
    names = ("key_quant_mode", "value_quant_mode", "rope_head_dim")
    names += ("key_dequant_scale", "value_dequant_scale")
    rest = {name: value for name, value in x.items() if name not in names}
    query, latent = x["query"], x["query"].size(-1) - x["rope_head_dim"]
    key, key_rope = dequantized_latents(x["key"], latent, query.dtype)
    copied = latents.dequantized_latents(x["key"], latent, query.dtype)  # of the models
    torch.testing.assert_close(copied, (key, key_rope), rtol=0, atol=0, equal_nan=True)
    ropes = dict(query_rope=query[..., latent:], key_rope=key_rope)
    return rest | dict(query=query[..., :latent], key=key) | ropes


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("layout_query, layout_kv", LAYOUTS, ids=LAYOUT_IDS)
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(dict(), id="few"),
        pytest.param(dict(hostile=True, sparse_mode=0), id="hostile"),
        pytest.param(dict(latent=256, rope=32, heads=17, strided=True), id="other-dims-strided"),
    ],
)
def test_equals_the_unquantized_op_on_the_dequantized_rows(
    arguments, layout_query, layout_kv, dtype
):
    layouts = dict(layout_query=layout_query, layout_kv=layout_kv)
    x = inputs([2, 5], [40, 33], dtype=dtype, **layouts, **arguments)
    got = attend(**x)
    assert torch.equal(got, npu_sparse_flash_attention_pto(**unquantized(x)))
    assert_close_to_rows(got, reference.npu_kv_quant_sparse_flash_attention_pto(**x))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    "lengths_query, lengths_key, K",
    [
        pytest.param([1], [3000], 2048, id="decode-in-parts"),
        pytest.param([70], [300], 200, id="dense"),
        pytest.param([30], [3000], 40, id="gather"),
    ],
)
def test_equals_it_in_every_kind_of_task(lengths_query, lengths_key, K, dtype):
    x = inputs(
        lengths_query, lengths_key, sparse_count=K, heads=8, block_size=128, dtype=dtype, **REAL
    )
    expected = npu_sparse_flash_attention_pto(**unquantized(x))
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(attend(**x), expected)


REAL = dict(latent=512, rope=64)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_any_int8_and_any_scale_are_dequantized_alike(dtype):
    g = torch.Generator().manual_seed(0)
    x = inputs([40], [60], heads=4, sparse_count=50, dtype=dtype)
    key = x["key"]
    key[..., :128] = torch.randint(-128, 128, (*key.shape[:-1], 128), generator=g)
    special = [0.0, -1.0, torch.nan, torch.inf, -torch.inf, 1e-40, 3e38, 5e-8, 511.0]
    choice = torch.randint(len(special), key.shape[:-1], generator=g)
    scales = torch.where(
        torch.rand(choice.shape, generator=g) < 0.3, torch.tensor(special)[choice], 1
    )
    key[..., -4:] = scales.unsqueeze(-1).view(torch.int8)
    key[..., 128:160] = torch.randn(*key.shape[:-1], 16, generator=g).to(dtype).view(torch.int8)
    for indices in (x["sparse_indices"], x["sparse_indices"].clamp(max=3)):
        call = x | dict(sparse_indices=indices)
        got, expected = attend(**call), npu_sparse_flash_attention_pto(**unquantized(call))
        assert ((got == expected) | (got.isnan() & expected.isnan())).all()


def test_a_row_is_nope_rope_and_scales():
    """Against bytes that numpy lays out."""
    rows = 16
    values = np.arange(rows * 128, dtype=np.int64).reshape(rows, 128) % 256 - 128
    ropes = torch.arange(rows * 16).view(rows, 16).bfloat16() / 8
    scales = np.linspace(0.01, 2, rows, dtype="<f4")
    layout = np.dtype([("nope", "i1", 128), ("rope", "<u2", 16), ("scale", "<f4")])
    table = np.zeros(rows, layout)
    table["nope"], table["scale"] = values, scales
    table["rope"] = ropes.view(torch.int16).numpy().view(np.uint16)
    assert layout.itemsize == 164
    cache = torch.frombuffer(bytearray(table.tobytes()), dtype=torch.int8).view(1, rows, 1, 164)
    query = torch.zeros(1, rows, 1, 144, dtype=torch.bfloat16)
    query[0, :, 0, 128] = 1  # logits are the first RoPE dims
    out = attend(
        query,
        cache,
        None,
        torch.arange(rows, dtype=torch.int32).view(1, rows, 1, 1),
        1.0,
        2,
        2,
        actual_seq_lengths_kv=int32([rows]),
        block_table=int32([[0]]),
        sparse_mode=0,
        rope_head_dim=16,
    )
    expected = torch.from_numpy(values * scales[:, None].astype(np.float64)).float().bfloat16()
    assert torch.equal(out[0, :, 0], expected)
    both = attend(
        query,
        cache,
        None,
        int32([[0, 9]]).view(1, 1, 1, 2).expand(1, rows, 1, 2),
        1.0,
        2,
        2,
        actual_seq_lengths_kv=int32([rows]),
        block_table=int32([[0]]),
        sparse_mode=0,
        rope_head_dim=16,
    )
    weights = torch.softmax(ropes[[0, 9], 0].double(), 0)
    assert_close_to_rows(both[0, 0, 0], (weights @ expected[[0, 9]].double()).bfloat16())


def test_rounding_to_int8_is_a_small_error():
    from cases.npu_sparse_flash_attention_pto import inputs as unquantized_inputs

    x = unquantized_inputs([4], [300], sparse_count=200, heads=8, dtype=torch.bfloat16, **REAL)
    key, rope = (x[name].nan_to_num(0) for name in ("key", "key_rope"))
    x |= dict(key=key, key_rope=rope)
    exact = npu_sparse_flash_attention_pto(**x).float()
    for name in ("sinks", "value"):
        x.pop(name)
    query = torch.cat([x.pop("query"), x.pop("query_rope")], -1)
    x |= dict(query=query, key=quantized(x["key"], x.pop("key_rope")), value=None)
    got = attend(**x, key_quant_mode=2, value_quant_mode=2).float()
    assert 0 < (got - exact)[:, :4].norm() / exact[:, :4].norm() < 0.015


def test_value_may_be_the_key():
    x = inputs([2], [40])
    for op in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        assert torch.equal(op(**x | dict(value=x["key"])), attend(**x))
