"""The parts of cache rows, by name: each has a pool ``[blocks, rows per block, 1, width]`` of its
own, or the parts lie side by side in one."""

from typing import NamedTuple

import torch
from torch import Tensor

Pools = dict[str, Tensor]


class Part(NamedTuple):
    width: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.width * self.dtype.itemsize


def row_bytes(parts: dict[str, Part]) -> int:
    return sum(part.nbytes for part in parts.values())


def side_by_side(cache: Tensor, parts: dict[str, Part]) -> Pools:
    """The pools that share ``cache [blocks, rows per block, bytes of a row]``, of any dtype."""
    found = cache.view(torch.int8).split([part.nbytes for part in parts.values()], -1)
    return {
        name: values.view(part.dtype).unsqueeze(-2)
        for (name, part), values in zip(parts.items(), found, strict=True)
    }


def write(pool: Tensor, slots: Tensor, rows: Tensor) -> None:
    """``pool[slot] = row``.

    Args:
        slots: ``[rows]`` of the flattened pool; on an NPU ``[rows, 2]``, block and row.
    """
    width, rows = pool.size(-1), rows.to(pool.dtype)  # autocast computes in another dtype
    if pool.device.type == "npu":
        # in place in every graph mode; torchair may copy a pool to view it, and cannot convert
        # index_copy_
        torch.ops.npu.npu_scatter_nd_update_(pool, slots, rows.reshape(-1, 1, width))
    elif pool.is_contiguous() and not torch.compiler.is_compiling():
        pool.view(-1, width).index_copy_(0, slots, rows.reshape(-1, width))
    else:  # torch 2.10 compiles a write through a view to a copy of the pool
        size = pool.size(1)
        pool[slots // size, slots % size] = rows.reshape(-1, 1, width)


def flat(slots: Tensor, pool: Tensor) -> Tensor:
    """Those of an NPU as on other devices."""
    return slots if slots.ndim == 1 else slots[:, 0] * pool.size(1) + slots[:, 1]


def first_rows(pool: Tensor, block_table: Tensor, count: int) -> Tensor:
    """A copy of the first rows of each sequence, ``[B, count, width]``."""
    blocks = -(-count // pool.size(1))
    return pool[block_table[:, :blocks]].flatten(1, 3)[:, :count]
