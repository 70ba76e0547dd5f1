"""What the ops on an NPU share: launches, PyPTO kernels, limits and the words of refusals."""

import functools
import importlib
import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from ..descriptions import HALF, OPS, spelled
from ..requirements import pypto_problem

Launch = Callable[[Callable, Sequence[Tensor], Sequence[Tensor]], None]
Arguments = SimpleNamespace  # of a call, each by its name in the schema


def on_device(kernel: Callable, tensors: Sequence[Tensor], written: Sequence[Tensor]) -> None:
    """Launches the kernel on the current stream of the tensors' device."""
    with torch.npu.device(tensors[0].device):
        kernel(*tensors)


@functools.cache
def program(op: str):
    """The module of an op's PyPTO program; PyPTO is looked for and imported when first needed."""
    if problem := pypto_problem():
        raise RuntimeError(
            f"{op}: {problem['what']} to run on an NPU; {problem['remedy']}, "
            "or move the tensors to the CPU, whose kernels need no PyPTO"
        )
    return importlib.import_module(f"custom_pypto.kernels.{op}")


def kernel(op: str, **facts) -> Callable:
    """The PyPTO kernel of an op for the static facts of a call."""
    return program(op).kernel(**facts)


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def ready_on_host(op: str, **control: Tensor | None) -> bool:
    """Whether lengths, block tables and slots are final before the launch, by the caller's word.

    ``CUSTOM_PYPTO_READY_ON_HOST=1`` lets PyPTO's control flow read them before the work queued
    ahead of the kernel is done. It is wrong wherever an op on the device computes them, as
    ``lengths += 1`` does, and therefore off by default; such an op would copy a strided one.
    """
    ready = os.environ.get("CUSTOM_PYPTO_READY_ON_HOST", "0") == "1"
    for argument, tensor in control.items():
        require(
            not ready or tensor is None or tensor.is_contiguous(),
            op,
            argument,
            "contiguous with CUSTOM_PYPTO_READY_ON_HOST=1",
            f"strides {None if tensor is None else tensor.stride()}",
            "pass it contiguous, or unset the variable",
        )
    return ready


def require(condition: bool, op: str, argument: str, expected: str, got, remedy: str) -> None:
    if not condition:
        raise RuntimeError(f"{op}: {argument} must be {expected} on an NPU, got {got}; {remedy}")


def require_dtype(op: str, argument: str, tensor: Tensor) -> None:
    dtypes = OPS[op].dtypes.get(argument, HALF)
    require(
        name(tensor.dtype) in dtypes,
        op,
        f"{argument}.dtype",
        spelled(dtypes),
        name(tensor.dtype),
        "convert it, or run on the CPU",
    )


def require_paged(op: str, argument: str, layout: str) -> None:
    require(
        layout == "PA_BSND",
        op,
        argument,
        "PA_BSND",
        layout,
        "keep the keys in a paged cache with a block table",
    )


def require_contiguous(op: str, argument: str, cache: Tensor | None) -> None:
    require(
        cache is None or cache.is_contiguous(),
        op,
        argument,
        "contiguous",
        f"strides {None if cache is None else cache.stride()}",
        "give it a cache of its own instead of a part of a wider row",
    )


def require_heads(op: str, query: Tensor, most: int) -> None:
    heads = query.size(-2)
    argument = f"query.size({query.dim() - 2})"
    require(heads <= most, op, argument, f"at most {most}", heads, "run on the CPU")


def require_sortable(op: str, sparse_count: int, keys: int) -> None:
    """What PyPTO's sort takes: longer rows of candidates do not fit the vector cores' memory."""
    require(
        sparse_count <= 4096 or keys <= 8192,
        op,
        "sparse_count",
        f"at most 4096 for a block table of {keys} keys, more than 8192,",
        sparse_count,
        "select fewer keys, or run on the CPU",
    )


def require_checkable(op: str, table_width: int, keys: int, blocks: int) -> None:
    """A row of the table is checked at once, in float32, which is exact up to 2^24."""
    require(
        table_width <= 32768,
        op,
        "block_table.size(1)",
        "at most 32768",
        table_width,
        "use larger blocks or a smaller table",
    )
    require(
        keys + blocks <= 2**24 - 2**13,
        op,
        "block_table",
        "of fewer than 16 million keys and cache blocks together",
        f"{keys} keys and {blocks} blocks",
        "use a smaller table or cache",
    )


def rows(tensor: Tensor) -> Tensor:
    """``[..., W]`` as ``[rows, W]``."""
    return tensor.contiguous().view(-1, tensor.size(-1))


def query_lengths(lengths: Tensor | None, layout: str, tokens: int, otherwise: Tensor) -> Tensor:
    """What the kernels take: lengths, or prefix sums that do not decrease."""
    if lengths is None:
        return otherwise.contiguous()  # of the right shape, and not read
    if layout == "TND":
        return lengths.clamp(0, tokens).cummax(0).values
    return lengths.contiguous()
