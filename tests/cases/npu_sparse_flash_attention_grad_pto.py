"""Arguments of ``npu_sparse_flash_attention_grad_pto``."""

import functools

import torch

from custom_pypto.reference.npu_sparse_flash_attention_grad_pto import with_gradient

from . import in_a_wider_row
from . import npu_sparse_flash_attention_pto as forward
from .hostile import Maker
from .rejections import Op, none, strided_rows, table

OP = "npu_sparse_flash_attention_grad_pto"
WEIGHT = 5


def inputs(lengths_query: list[int], lengths_key: list[int], *, seed: int = 0, **keywords) -> dict:
    call = forward.inputs(lengths_query, lengths_key, seed=seed, **keywords)
    g = torch.Generator().manual_seed(seed + 1)
    d_out = torch.randn(call["query"].shape, generator=g).to(call["query"].dtype)
    return with_gradient(call, d_out)


on_npu = functools.partial(inputs, dtype=torch.bfloat16)


def not_default() -> dict:
    x = forward.not_default()
    g = torch.Generator().manual_seed(1)
    return with_gradient(x, torch.randn(x["query"].shape, generator=g).to(x["query"].dtype))


def random_call(m: Maker) -> dict:
    call = forward.random_call(m)
    width = call["query"].size(-1) + (0 if call["query_rope"] is None else 32)
    # larger logits have errors that an exponential shows
    call["scale_value"] = m.rng.random() * width**-0.5 + 1e-3
    if call["sinks"] is not None:
        call["sinks"] = call["sinks"].clamp(-9, 9)
    return with_gradient(call, m.tensor(call["query"].shape))


def rejected() -> list:
    def call(layout_query: str, layout_kv: str) -> dict:
        return inputs([3, 2], [40, 33], layout_query=layout_query, layout_kv=layout_kv)

    pa, bsnd, tnd = call("BSND", "PA_BSND"), call("BSND", "BSND"), call("TND", "TND")
    row = table(OP, pa)
    op = Op(row, "layout_kv", "actual_seq_kvlen", pa, bsnd, tnd, call("TND", "PA_BSND"))
    optional = ["block_table", "actual_seq_kvlen", "actual_seq_qlen", "query_rope", "key_rope"]
    layout = "layout must be 'BSND' or 'TND', got 'BNSD'"
    tnd_keys = "layout_kv must be 'PA_BSND' or 'BSND' (layout), got 'TND'"
    lengths = "actual_seq_qlen must be an int32 tensor: inclusive prefix sums of query tokens [B], "
    return [
        row(layout, layout="BNSD"),
        row(tnd_keys, layout_kv="TND"),
        row(f"{lengths}for 'TND', got None", tnd, actual_seq_qlen=None),
        *forward.rejected_dims(op),
        *forward.rejected_values(op),
        *forward.rejected_indices(op),
        *forward.rejected_ropes(op),
        *forward.rejected_sinks(op),
        *forward.rejected_keywords(op),
        *rejected_of_the_output(op),
        *rejected_statistics(op),
        *strided_rows(row, pa, ["key"]),
        *none(row, pa, optional),
    ]


def rejected_of_the_output(op: Op) -> list:
    rows = []
    for name in ("d_out", "out"):
        x = op.pa[name]
        for message, value in (
            (" must be of shape that of query, got [4, 4, 32]", x[0]),
            (".size(1) must be 4 (as query), got 2", x[:, :2]),
            (".size(3) must be 32 (as query), got 16", x[..., :16]),
            (".dtype must be float32 (dtype of query), got bfloat16", x.bfloat16()),
        ):
            rows.append(op.row(f"{name}{message}", **{name: value}))
    return rows


def rejected_statistics(op: Op) -> list:
    of = "(of the forward, with return_softmax_lse=True)"
    rows = []
    for name in ("softmax_max", "softmax_sum"):
        x, packed = op.pa[name], op.tnd[name]
        for message, value in (
            (" must be of shape [B, N2, S1, N1], got [1, 4, 4]", x[0]),
            (".size(0) must be 2 (B of query), got 1", x[:1]),
            (".size(3) must be 4 (N1 of query), got 3", x[..., :3]),
            (".size(2) must be 4 (S1 of query), got 2", x[:, :, :2]),
            (f".dtype must be float32 {of}, got float64", x.double()),
        ):
            rows.append(op.row(f"{name}{message}", **{name: value}))
        tokens = f"{name}.size(1) must be 6 (T1 of query), got 5"
        rows.append(op.row(tokens, op.tnd, **{name: packed[:, :5]}))
    return rows


def unsupported_on_npu() -> list:
    x = on_npu([2, 2], [20, 5])
    row = table(OP, x)
    strides = "{} must be contiguous on an NPU, got strides"
    return [
        row("query.size(2) must be at most 128 on an NPU, got 129", on_npu([2], [5], heads=129)),
        row(strides.format("key"), on_npu([2, 2], [20, 5], strided=True)),
        row(strides.format("key_rope"), key_rope=in_a_wider_row(x["key_rope"])),
        row(
            "block_table.size(1) must be at most 8192 on an NPU, got 8193",
            block_table=x["block_table"].new_zeros(2, 2**13 + 1),
        ),
    ]


def graph_calls() -> dict[str, list[dict]]:
    """As autograd calls the op, which names the layout of the keys, and as torch_npu's."""
    small = on_npu([2, 1], [20, 5])
    large = on_npu([3, 3, 2], [50, 2, 8], heads=7, latent=48, rope=32, block_size=32)
    # one compilation has one scale
    large["scale_value"] = small["scale_value"]
    packed = on_npu([3, 1], [50, 4], layout_query="TND", layout_kv="TND", dtype=torch.float16)
    del packed["layout_kv"]
    return {
        "sizes": [small, large],
        "packed": [packed],
        "values-and-sinks": [not_default()],
        "no-query-lengths": [
            on_npu([3, 3], [20, 5], rope=0, layout_kv="BSND")
            | dict(actual_seq_qlen=None, actual_seq_kvlen=None)
        ],
    }
