"""Arguments of ``npu_sparse_lightning_indexer_grad_kl_loss_pto``."""

import functools

import torch

from custom_pypto.reference.index_training import attention_statistics, with_selection

from . import in_a_wider_row, index_kl
from .hostile import Maker
from .npu_sparse_flash_attention_pto import some_indices
from .rejections import none, table

OP = "npu_sparse_lightning_indexer_grad_kl_loss_pto"
WEIGHT = 4


def inputs(
    lengths_query: list[int],
    lengths_key: list[int],
    *,
    sparse_count: int = 8,
    hostile: bool = False,
    seed: int = 0,
    **keywords,
) -> dict:
    """``hostile``: indices of any kind in place of the indexer's own."""
    call = index_kl.inputs(lengths_query, lengths_key, seed=seed, **keywords)
    if not hostile:
        return with_selection(call, sparse_count)
    g = torch.Generator().manual_seed(seed + 1)
    tokens = call["query"].shape[:-2]
    longest = max(lengths_key) // call["cmp_ratio"]
    indices = some_indices(tokens.numel(), longest, sparse_count, 0, True, g)
    indices = indices.view(*tokens, 1, sparse_count)
    return call | attention_statistics(call, indices) | dict(sparse_indices=indices)


on_npu = functools.partial(inputs, dtype=torch.bfloat16)


def not_default() -> dict:
    x = inputs([2, 3], [12, 20], dtype=torch.float16, sparse_mode=0, cmp_ratio=4)
    # a key that the first sequence has with another ratio only
    x["sparse_indices"][..., 0] = 4
    return x | attention_statistics(x, x["sparse_indices"])


def random_call(m: Maker) -> dict:
    call, rng = index_kl.random_call(m), m.rng
    count = rng.choice([1, 2, 7, 16, 40])
    if rng.random() < 0.5:
        return with_selection(call, count)
    most = max(call["key"].shape[:-2], default=0)
    indices = m.tensor((*call["query"].shape[:-2], 1, count), m.ints(-1, most))
    return call | attention_statistics(call, indices) | dict(sparse_indices=indices)


def rejected() -> list:
    bsnd, tnd = (inputs([3, 2], [40, 33], layout=layout) for layout in ("BSND", "TND"))
    row = table(OP, bsnd)
    indices = bsnd["sparse_indices"]
    return [
        *index_kl.rejected(row, bsnd, tnd),
        row(
            "sparse_indices.dtype must be int32 (positions), got int64",
            sparse_indices=indices.long(),
        ),
        row("sparse_indices.size(1) must be 4 (as query), got 2", sparse_indices=indices[:, :2]),
        row(
            "sinks must be None (sinks are in the statistics), got a tensor; omit them "
            "(softmax_max and softmax_sum hold them)",
            sinks=torch.zeros(4),
        ),
        *none(row, bsnd, ["query_rope", "key_rope"]),
    ]


def unsupported_on_npu() -> list:
    x = on_npu([2, 2], [20, 5])
    row = table(OP, x)
    strides = "{} must be contiguous on an NPU, got strides"
    return [
        row("query.size(1) must be at most 128 on an NPU, got 129", on_npu([2], [5], heads=129)),
        row(
            "query_index.size(1) must be at most 64 on an NPU, got 65",
            on_npu([2], [5], index_heads=65),
        ),
        row(strides.format("key"), on_npu([2, 2], [20, 5], strided=True)),
        *(
            row(strides.format(name), **{name: in_a_wider_row(x[name])})
            for name in ("key_rope", "key_index")
        ),
    ]


def graph_calls() -> dict[str, list[dict]]:
    """Lengths are constants of a graph."""
    float32 = dict(weights_dtype=torch.float32, rope=0, layout="BSND")
    return {
        "packed": [on_npu([3, 1], [50, 4])],
        "by-sequence": [on_npu([3, 3], [20, 5], heads=7, index_heads=5, layout="BSND")],
        "compressed": [not_default()],
        "no-lengths": [
            on_npu([3, 3], [20, 5], **float32) | dict(actual_seq_qlen=None, actual_seq_klen=None)
        ],
    }
