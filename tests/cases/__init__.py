"""Inputs of the ops. ``<op>.py`` makes the keyword arguments of one call of that op:

- ``inputs``: seeded ones of given lengths; ``on_npu``: the same of sizes and dtype of an NPU;
- ``not_default``: ones with no attribute at its default;
- ``random_call``: random hostile ones; ``WEIGHT``: how often;
- ``rejected``: ones that break a rule; ``unsupported_on_npu``: only a limit of the NPU kernel;
- ``graph_calls``: the calls of each compilation; of several calls, sizes are symbols.

Data that an op must not read is poisoned: NaN in query and key rows past a sequence's length and in
unused blocks, and block ids from INT_MIN to INT_MAX past a sequence's last block.
"""

import importlib
from collections.abc import Callable
from itertools import accumulate
from types import ModuleType

import torch
from torch import Tensor

from custom_pypto.schemas import overload

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
LAYOUTS = [("BSND", "PA_BSND"), ("TND", "PA_BSND"), ("BSND", "BSND"), ("TND", "TND")]
LAYOUT_IDS = ["-".join(layouts) for layouts in LAYOUTS]
# query tokens and keys of sequences, in calls that compile at most twice
FIVE_SHAPES = [
    ([2, 3], [50, 33]),
    ([4, 5, 1], [70, 90, 20]),
    ([1, 2, 3, 4], [40, 130, 17, 260]),
    ([6, 2, 3, 4, 5], [40, 31, 1, 2, 300]),
    ([8, 2, 3, 4, 5, 6], [40, 0, 1, 2, 3, 500]),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def int32(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def prefix_sums(lengths: list[int]) -> Tensor:
    return int32(list(accumulate(lengths)))


def token_counts(lengths: list[int], layout: str) -> Tensor:
    """The lengths in the form of this layout: counts, or prefix sums."""
    return prefix_sums(lengths) if layout == "TND" else int32(lengths)


def visible_keys(row: int, len_q: int, len_k: int, sparse_mode: int) -> int:
    """The number of keys that query ``row`` of a sequence sees."""
    return len_k if sparse_mode == 0 else min(max(len_k - len_q + row + 1, 0), len_k)


def place(rows: list[Tensor], layout: str, padding: int, fill: float = torch.nan) -> Tensor:
    """The rows of each sequence in ``BSND`` or ``TND``, then ``padding`` or more of ``fill``."""
    if layout == "TND":
        return torch.cat([*rows, rows[0].new_full((padding, *rows[0].shape[1:]), fill)])
    longest = max(len(r) for r in rows) + padding
    placed = rows[0].new_full((len(rows), longest, *rows[0].shape[1:]), fill)
    for sequence, r in zip(placed, rows, strict=True):
        sequence[: len(r)] = r
    return placed


def block_tables(lengths: list[int], block_size: int, g: torch.Generator) -> tuple[Tensor, int]:
    """Shuffled block ids, invalid past the end, and the cache's number of blocks (2 unused)."""
    blocks = [-(-n // block_size) for n in lengths]
    total = sum(blocks) + 2
    ids = torch.randperm(total, generator=g, dtype=torch.int32)
    hostile = int32([INT_MIN, -1, 0, total, INT_MAX])
    table = hostile[torch.randint(5, (len(lengths), max(blocks) + 1), generator=g)]
    for row, owned in zip(table, ids[: sum(blocks)].split(blocks), strict=True):
        row[: len(owned)] = owned
    return table, total


def slots(table: Tensor, length: int, block_size: int) -> Tensor:
    """The slots of positions 0 … length-1 of the sequence with this row of the block table."""
    position = torch.arange(length)
    return table.long()[position // block_size] * block_size + position % block_size


def in_a_wider_row(x: Tensor) -> Tensor:
    """A view equal to ``x``, with all strides but the last larger than necessary."""
    fill = torch.nan if x.is_floating_point() else 1
    wide = x.new_full((len(x), 2, *x.shape[1:-1], x.size(-1) + 16), fill)
    wide[:, 1, ..., : x.size(-1)] = x
    return wide[:, 1, ..., : x.size(-1)]


def stored(rows: list[Tensor], layout: str, block_size: int, strided: bool, g: torch.Generator):
    """``(keys, lengths, block table or None)`` of the key rows ``[len, 1, W]`` of each sequence."""
    lengths = [len(r) for r in rows]
    table = None
    if layout == "PA_BSND":
        table, blocks = block_tables(lengths, block_size, g)
        keys = rows[0].new_full((blocks, block_size, 1, rows[0].size(-1)), torch.nan)
        for ids, r in zip(table, rows, strict=True):
            keys.view(-1, *r.shape[1:])[slots(ids, len(r), block_size)] = r
    else:
        keys = place(rows, layout, padding=2)
    if strided:
        keys = in_a_wider_row(keys)
    return keys, token_counts(lengths, layout), table


def random(shape: tuple, dtype: torch.dtype, g: torch.Generator, integers: bool = False) -> Tensor:
    """Normal, or integers of -2 … 2, whose products and sums are exact, with many ties."""
    if integers:
        return torch.randint(-2, 3, shape, generator=g).to(dtype)
    return torch.randn(shape, generator=g).to(dtype)


def of(op: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{op}")


def inputs_of(
    op: str,
    lengths_query: tuple[int, ...] = (2,),
    lengths_key: tuple[int, ...] = (20,),
    *,
    on_npu: bool = False,
    **keywords,
) -> dict:
    """Arguments of any op, for tests of properties of all ops."""
    make = of(op).on_npu if on_npu else of(op).inputs
    return make([*lengths_query], [*lengths_key], **keywords)


def not_default(op: str) -> dict:
    """A call of any op with every input given, and no attribute at its default, unless an NPU
    supports only that."""
    return of(op).not_default()


def written(op: str) -> list[str]:
    """The arguments that an op writes, by its schema."""
    arguments = overload(op)._schema.arguments
    return [x.name for x in arguments if x.alias_info and x.alias_info.is_write]


def changed(inputs: dict, change: Callable[[Tensor], Tensor]) -> dict:
    return {name: change(x) if isinstance(x, Tensor) else x for name, x in inputs.items()}


def copied(inputs: dict) -> dict:
    """The same values and strides in separate memory."""
    return changed(
        inputs, lambda x: torch.empty_strided(x.size(), x.stride(), dtype=x.dtype).copy_(x)
    )


def is_float8(x: Tensor) -> bool:
    return x.is_floating_point() and x.itemsize == 1


def without_nan(inputs: dict) -> dict:
    """The same with 1 for each NaN. Floats of 8 bits, where torch replaces none, must have none."""

    def replaced(x: Tensor) -> Tensor:
        if is_float8(x):
            assert not x.float().isnan().any()
            return x
        return x.nan_to_num(1)

    return changed(inputs, replaced)


def on_meta(inputs: dict) -> dict:
    """The same shapes, strides and dtypes without data; one tensor for arguments that are equal."""
    made: dict[tuple, Tensor] = {}

    def empty(x: Tensor) -> Tensor:
        new = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
        if x.layout != torch.strided or x.is_meta:
            return new
        memory = x.untyped_storage()._cdata, x.storage_offset()
        return made.setdefault((*memory, x.size(), x.stride(), x.dtype), new)

    return changed(inputs, empty)


def rejection(op: Callable, inputs: dict) -> str:
    """The message of the error with which ``op`` rejects ``inputs``: the same on CPU and Meta."""
    import pytest  # benchmarks take inputs from here, on machines without it

    messages = []
    for given in (inputs, on_meta(inputs)):
        with pytest.raises(RuntimeError) as rejected:
            op(**given)
        messages.append(str(rejected.value))
    assert messages[0] == messages[1], "CPU and Meta reject in different words"
    return messages[0]
