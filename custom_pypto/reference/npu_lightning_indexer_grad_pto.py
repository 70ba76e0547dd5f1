from collections.abc import Iterator

import torch
from torch import Tensor

from . import npu_lightning_indexer_pto as forward
from .checks import of_sequences
from .index_training import Indexer, Magnitudes, arguments
from .sequences import selected_rows

# arguments of the forward that have another name here
RENAMED = {"layout_query": "layout"}


def npu_lightning_indexer_grad_pto(
    query: Tensor,
    key: Tensor,
    dy: Tensor,
    sparse_indices: Tensor,
    weights: Tensor,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    layout: str = "BSND",
    sparse_mode: int = 3,
    *,
    layout_key: str | None = None,
    block_table: Tensor | None = None,
    cmp_ratio: int = 1,
) -> tuple[Tensor, ...]:
    """By autograd in float64."""
    call = locals()
    indexer, total = Indexer(query, key, weights), torch.zeros((), dtype=torch.float64)
    gradients = dy.double().flatten(0, -3)[:, 0]
    for row, slots, columns in _selected(call):
        total = total + indexer.scores(row, slots) @ gradients[row, columns]
    return indexer.gradients(total)


def _selected(call: dict) -> Iterator[tuple[int, Tensor, Tensor]]:
    layout = call.get("layout", "BSND")
    return selected_rows(
        call["query"],
        call["key"],
        call["sparse_indices"],
        layout_query=layout,
        layout_kv=call.get("layout_key") or layout,
        actual_seq_lengths_query=call.get("actual_seq_lengths_query"),
        actual_seq_lengths_kv=call.get("actual_seq_lengths_key"),
        block_table=call.get("block_table"),
        sparse_mode=call.get("sparse_mode", 3),
        cmp_ratio=call.get("cmp_ratio", 1),
    )


def with_gradient(call: dict, dy: Tensor) -> dict:
    """The arguments of the gradient of a call of ``npu_lightning_indexer_pto``, whose scores have
    the gradient ``dy``."""
    call = dict(layout_query="BSND", layout_key="PA_BSND") | call
    indices = forward.npu_lightning_indexer_pto(**call)
    del call["sparse_count"]
    renamed = {RENAMED.get(name, name): x for name, x in call.items()}
    return renamed | dict(sparse_indices=indices, dy=dy)


def _with_gradient(call: dict) -> dict:
    g = torch.Generator().manual_seed(5)
    shape = *call["query"].shape[:-2], 1, call["sparse_count"]
    return with_gradient(call, torch.randn(shape, generator=g).to(call["query"].dtype))


def checks(dtypes: list[torch.dtype]) -> Iterator[tuple]:
    sizes = [([1], 1, 16), ([300, 0, 700], 1, 128), ([131, 5], 4, 16)]
    yield from of_sequences(dtypes, sizes, lambda *x: _with_gradient(forward.arguments(*x)))
    compressed = [([2050, 3], 2, 128)]
    more = ", cmp_ratio 4"
    yield from of_sequences(
        dtypes, compressed, lambda *x: _with_gradient(forward.compressed(*x)), more
    )
    for dtype in dtypes:
        yield dtype, "packed, tokens [1, 2], keys [2100, 2500], K 2048", _packed(dtype)


def _packed(dtype: torch.dtype) -> dict:
    """Within the limits of torch_npu's op."""
    x = arguments(dtype, [1, 2], [2100, 2500])
    call = dict(query=x["query_index"], key=x["key_index"], weights=x["weights"].to(dtype))
    lengths = dict(actual_seq_lengths_query=[1, 3], actual_seq_lengths_key=[2100, 4600])
    call |= {name: torch.tensor(n, dtype=torch.int32) for name, n in lengths.items()}
    return _with_gradient(call | dict(layout_query="TND", layout_key="TND", sparse_count=2048))


def error(got: tuple, expected: tuple, mine: dict, theirs: dict) -> tuple[float, float]:
    """Relative to the sum of the magnitudes of the terms of an element."""
    magnitudes = Magnitudes(theirs["query"], theirs["key"], theirs["weights"])
    gradients = theirs["dy"].double().abs().flatten(0, -3)[:, 0]
    for row, slots, columns in _selected(theirs):
        magnitudes.add(row, slots, gradients[row, columns])
    return magnitudes.error(got, expected)
