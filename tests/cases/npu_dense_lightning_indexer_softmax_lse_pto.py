"""Arguments of ``npu_dense_lightning_indexer_softmax_lse_pto``."""

import functools

import torch

from custom_pypto.reference.npu_dense_lightning_indexer_softmax_lse_pto import of_indexer

from . import index_kl
from .hostile import Maker
from .rejections import MODE, WINDOW, WINDOW_REMEDY, each, none, strided_rows, table

OP = "npu_dense_lightning_indexer_softmax_lse_pto"
WEIGHT = 3


def inputs(lengths_query: list[int], lengths_key: list[int], **keywords) -> dict:
    return of_indexer(index_kl.inputs(lengths_query, lengths_key, **keywords))


on_npu = functools.partial(inputs, dtype=torch.bfloat16)


def not_default() -> dict:
    return inputs([2, 3], [12, 20], dtype=torch.float16, sparse_mode=0, cmp_ratio=4)


def random_call(m: Maker) -> dict:
    return of_indexer(index_kl.random_call(m))


def rejected() -> list:
    bsnd, tnd = (inputs([3, 2], [40, 33], layout=layout) for layout in ("BSND", "TND"))
    row = table(OP, bsnd)
    index, keys = bsnd["query_index"], bsnd["key_index"]
    sums = "a list of int: inclusive prefix sums of"
    return [
        row("layout must be 'BSND' or 'TND', got 'PA_BSND'", layout="PA_BSND"),
        row(f"{MODE}1", sparse_mode=1),
        row("cmp_ratio must be 1 to 128 (tokens per key), got 0", cmp_ratio=0),
        row(
            f"actual_seq_qlen must be {sums} query tokens, for 'TND', got None",
            tnd,
            actual_seq_qlen=None,
        ),
        row(f"actual_seq_klen must be {sums} keys, for 'TND', got None", tnd, actual_seq_klen=None),
        row(
            "query_index must be of shape [B, S1, N1, D] (layout 'BSND'), got [4, 3]",
            query_index=index[0, :, :, 0],
        ),
        row("key_index.size(0) must be 2 (B of query), got 1", key_index=keys[:1]),
        row(
            "key_index.size(2) must be 1 (N2: one key head), got 2",
            key_index=keys.repeat(1, 1, 2, 1),
        ),
        row("key_index.size(3) must be 48 (D of query_index), got 16", key_index=keys[..., :16]),
        row(
            "query_index.size(3) must be a positive multiple of 16, got 24",
            **each(bsnd, ("query_index", "key_index"), lambda x: x[..., :24]),
        ),
        row(
            "query_index.dtype must be bfloat16, float16 or float32, got float64",
            query_index=index.double(),
        ),
        row(
            "weights.size(2) must be 3 (shape of query_index without D), got 2",
            weights=bsnd["weights"][..., :2],
        ),
        *(
            row(f"{name} must be {WINDOW}, got 0; {WINDOW_REMEDY}", **{name: 0})
            for name in ("pre_tokens", "next_tokens")
        ),
        *strided_rows(row, bsnd, ["key_index"]),
        *none(row, bsnd),
    ]


def unsupported_on_npu() -> list:
    return index_kl.unsupported_on_npu(table(OP, on_npu([2, 2], [20, 5])), on_npu)


def graph_calls() -> dict[str, list[dict]]:
    return index_kl.graph_calls(on_npu)
