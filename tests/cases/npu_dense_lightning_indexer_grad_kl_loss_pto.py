"""Arguments of ``npu_dense_lightning_indexer_grad_kl_loss_pto``."""

import functools

import torch

from custom_pypto.reference.npu_dense_lightning_indexer_grad_kl_loss_pto import with_statistics

from . import index_kl
from .hostile import Maker
from .rejections import none, table

OP = "npu_dense_lightning_indexer_grad_kl_loss_pto"
WEIGHT = 4


def inputs(lengths_query: list[int], lengths_key: list[int], **keywords) -> dict:
    return with_statistics(index_kl.inputs(lengths_query, lengths_key, **keywords))


on_npu = functools.partial(inputs, dtype=torch.bfloat16)


def not_default() -> dict:
    return inputs([2, 3], [12, 20], dtype=torch.float16, sparse_mode=0, cmp_ratio=4)


def random_call(m: Maker) -> dict:
    return with_statistics(index_kl.random_call(m))


def rejected() -> list:
    bsnd, tnd = (inputs([3, 2], [40, 33], layout=layout) for layout in ("BSND", "TND"))
    row = table(OP, bsnd)
    rows = index_kl.rejected(row, bsnd, tnd)
    of = "(of npu_dense_lightning_indexer_softmax_lse_pto)"
    for name in ("softmax_max_index", "softmax_sum_index"):
        x = bsnd[name]
        for message, value in (
            (" must be of shape [B, 1, S1], got [1, 4]", x[0]),
            (".size(0) must be 2 (B of query), got 1", x[:1]),
            (".size(1) must be 1 (N2: one key head), got 2", x.repeat(1, 2, 1)),
            (".size(2) must be 4 (S1 of query), got 2", x[..., :2]),
            (f".dtype must be float32 {of}, got float64", x.double()),
        ):
            rows.append(row(f"{name}{message}", **{name: value}))
        tokens = f"{name}.size(1) must be 6 (T1 of query), got 5"
        rows.append(row(tokens, tnd, **{name: tnd[name][:, :5]}))
    return [*rows, *none(row, bsnd, ["query_rope", "key_rope"])]


def unsupported_on_npu() -> list:
    return index_kl.unsupported_on_npu(table(OP, on_npu([2, 2], [20, 5])), on_npu)


def graph_calls() -> dict[str, list[dict]]:
    return index_kl.graph_calls(on_npu)
