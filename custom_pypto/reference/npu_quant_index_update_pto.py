import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .checks import BLOCK
from .npu_quant_rows_pto import error as rows_error
from .npu_quant_rows_pto import hadamard_matrix, index_rows, npu_quant_rows_pto
from .npu_sparse_attention_pto import write_cache


def npu_quant_index_update_pto(
    x: Tensor,
    slots: Tensor,
    cache: Tensor,
    scale_cache: Tensor,
    *,
    hadamard: Tensor | None = None,
) -> None:
    rows, scales = npu_quant_rows_pto(x, hadamard=hadamard)
    write_cache(cache, rows, slots)
    write_cache(scale_cache.unsqueeze(-1), scales, slots)


def checks(dtypes: list[torch.dtype]) -> Iterator[tuple]:
    for dtype in dtypes:
        for shape in ([1], [131], [4, 2]):
            yield dtype, f"slots {shape}", _arguments(shape, dtype)
        yield (
            dtype,
            "slots [40], hadamard",
            _arguments([40], dtype) | dict(hadamard=hadamard_matrix(128).to(dtype)),
        )


def _arguments(shape: list[int], dtype: torch.dtype) -> dict:
    g = torch.Generator().manual_seed(1)
    x = index_rows(*shape, 128).to(dtype)
    blocks = 3
    slots = torch.randperm(blocks * BLOCK, generator=g)[: math.prod(shape)]
    slots[5::6] = -1  # padding
    return dict(
        x=x,
        slots=slots.view(shape),
        cache=torch.randint(-128, 128, (blocks, BLOCK, 1, 128), generator=g).to(torch.int8),
        scale_cache=torch.rand(blocks, BLOCK, 1, generator=g).half() + 1,
    )


def error(got: None, expected: None, mine: dict, theirs: dict) -> tuple[float, float]:
    """That of the written rows; infinite if another one has changed."""
    written, wanted = ((c["cache"].squeeze(2), c["scale_cache"].squeeze(2)) for c in (mine, theirs))
    slots = theirs["slots"].flatten().long()
    rest = torch.ones(wanted[1].numel(), dtype=torch.bool)
    rest[slots[slots >= 0]] = False
    for a, b in zip(written, wanted, strict=True):
        if not a.flatten(0, 1)[rest].equal(b.flatten(0, 1)[rest]):
            return torch.inf, 0.0
    return rows_error(written, wanted, mine, theirs)
