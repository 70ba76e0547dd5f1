"""Arguments of ``npu_lightning_indexer_grad_pto``."""

import functools

import torch

from custom_pypto.reference.npu_lightning_indexer_grad_pto import with_gradient

from . import npu_lightning_indexer_pto as forward
from .hostile import Maker
from .npu_sparse_flash_attention_pto import some_indices
from .rejections import Op, none, strided_rows, table

OP = "npu_lightning_indexer_grad_pto"
WEIGHT = 5


def inputs(
    lengths_query: list[int],
    lengths_key: list[int],
    *,
    seed: int = 0,
    hostile: bool = False,
    dy_dtype: torch.dtype | None = None,
    **keywords,
) -> dict:
    """``hostile``: indices of any kind in place of the indexer's own."""
    call = forward.inputs(lengths_query, lengths_key, seed=seed, **keywords)
    g = torch.Generator().manual_seed(seed + 1)
    shape = *call["query"].shape[:-2], 1, call["sparse_count"]
    dy = torch.randn(shape, generator=g).to(dy_dtype or call["query"].dtype)
    x = with_gradient(call, dy)
    if hostile:
        indices = x["sparse_indices"]
        longest = max(lengths_key) // call["cmp_ratio"]
        rows = indices.flatten(0, -3)
        rows[:] = some_indices(len(rows), longest, indices.size(-1), 0, True, g)
    # beside an index without a key nothing is read
    x["dy"] = dy.masked_fill(x["sparse_indices"] == -1, torch.nan)
    return x


on_npu = functools.partial(inputs, dim=128, dtype=torch.bfloat16)


def not_default() -> dict:
    x = forward.not_default()
    del x["return_value"]
    g = torch.Generator().manual_seed(1)
    shape = *x["query"].shape[:-2], 1, x["sparse_count"]
    x = with_gradient(x, torch.randn(shape, generator=g).to(x["query"].dtype))
    # a key that the first sequence has with another ratio only
    x["sparse_indices"][..., 0] = 4
    return x


def random_call(m: Maker) -> dict:
    call = forward.random_call(m)
    K = call["sparse_count"] = min(call["sparse_count"], 64)
    shape = *call["query"].shape[:-2], 1, K
    dy = m.tensor(shape, m.floats(m.rng.choice([m.dtype, torch.float32])))
    x = with_gradient(call, dy)
    if m.rng.random() < 0.5:
        most = max(call["key"].shape[:-2], default=0)
        x["sparse_indices"] = m.tensor(shape, m.ints(-1, most))
    return x


def rejected() -> list:
    def call(layout_query: str, layout_key: str) -> dict:
        return inputs([3, 2], [40, 33], layout_query=layout_query, layout_key=layout_key)

    pa, bsnd, tnd = call("BSND", "PA_BSND"), call("BSND", "BSND"), call("TND", "TND")
    row = table(OP, pa)
    op = Op(row, "layout_key", "actual_seq_lengths_key", pa, bsnd, tnd, call("TND", "PA_BSND"))
    optional = ["block_table", "actual_seq_lengths_key", "actual_seq_lengths_query"]
    lengths = "actual_seq_lengths_query must be an int32 tensor: inclusive prefix sums of query"
    dy, indices = pa["dy"], pa["sparse_indices"]
    as_indices = "(as sparse_indices), got"
    return [
        row("layout must be 'BSND' or 'TND', got 'BNSD'", layout="BNSD"),
        row("layout_key must be 'PA_BSND' or 'BSND' (layout), got 'TND'", layout_key="TND"),
        row(f"{lengths} tokens [B], for 'TND', got None", tnd, actual_seq_lengths_query=None),
        row("cmp_ratio must be 1 to 128 (tokens per key), got 0", cmp_ratio=0),
        *forward.rejected_dims(op),
        *forward.rejected_weights(op),
        row("dy must be of shape that of sparse_indices, got [4, 1, 8]", dy=dy[0]),
        row(f"dy.size(1) must be 4 {as_indices} 2", dy=dy[:, :2]),
        row(f"dy.size(3) must be 8 {as_indices} 4", dy=dy[..., :4]),
        row("dy.dtype must be float32 (dtype of query), got float64", dy=dy.double()),
        row(
            "sparse_indices.dtype must be int32 (positions), got int64",
            sparse_indices=indices.long(),
        ),
        row("sparse_indices.size(1) must be 4 (as query), got 2", sparse_indices=indices[:, :2]),
        *strided_rows(row, pa, ["key"]),
        *none(row, pa, optional),
    ]


def unsupported_on_npu() -> list:
    x = on_npu([2, 2], [20, 5])
    row = table(OP, x)
    return [
        row(
            "query.dtype must be bfloat16 or float16 on an NPU, got float32; convert it",
            on_npu([2], [20], dtype=torch.float32),
        ),
        row("query.size(2) must be at most 64 on an NPU, got 65", on_npu([2], [5], heads=65)),
        row("key must be contiguous on an NPU, got strides", on_npu([2, 2], [20, 5], strided=True)),
        row(
            "block_table.size(1) must be at most 8192 on an NPU, got 8193",
            block_table=x["block_table"].new_zeros(2, 2**13 + 1),
        ),
    ]


def graph_calls() -> dict[str, list[dict]]:
    """As autograd calls the op, which names the layout of the keys, and as torch_npu's."""
    packed = on_npu([3, 1], [50, 4], layout_query="TND", layout_key="TND", dtype=torch.float16)
    del packed["layout_key"]
    float32 = dict(weights_dtype=torch.float32, dy_dtype=torch.float32)
    return {
        "sizes": [
            on_npu([2, 1], [20, 5]),
            on_npu([3, 3, 2], [50, 2, 8], heads=7, dim=48, block_size=32),
        ],
        "packed": [packed],
        "compressed": [not_default()],
        "no-query-lengths": [
            on_npu([3, 3], [20, 5], layout_key="BSND", **float32)
            | dict(actual_seq_lengths_query=None, actual_seq_lengths_key=None)
        ],
    }
