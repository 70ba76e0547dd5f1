"""Shared by the ops on an NPU: calls of PyPTO kernels, limits and their error messages."""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..descriptions import KERNELS, spelled
from ..requirements import pypto_problem, switched_on, warn_of_untested_pypto

Arguments = SimpleNamespace  # of a call, by their names in the schema


@dataclass(frozen=True)
class KernelCall:
    """The facts of an op's kernel and the tensors of its call, input of :func:`prepared`."""

    facts: Any  # a ``Facts`` of kernels/<op>.py
    tensors: dict[str, Tensor | None]  # by the kernel's names, in any order; None is not read


# runs a PyPTO kernel; takes tensors in the order of its signature
Launch = Callable[[Callable, dict[str, Tensor]], None]


def on_device(kernel: Callable, tensors: dict[str, Tensor]) -> None:
    """Launches the kernel on the current stream of the tensors' device."""
    in_order = tuple(tensors.values())
    with torch.npu.device(in_order[0].device):  # type: ignore[attr-defined]
        kernel(*in_order)


def prepared(op: str, call: KernelCall) -> tuple[Callable, dict[str, Tensor]]:
    """The arguments of a ``Launch``.

    Raises:
        TypeError: a tensor is missing, or the kernel has none of that name.
    """
    from ..kernels.pypto_versions import signature  # with PyPTO, which may be missing

    kernel = program(op).kernel(call.facts)
    dtypes, tensors = signature(kernel), {}
    for argument in call.tensors:
        if argument not in dtypes:
            raise TypeError(f"{op}: the kernel has no tensor {argument}")
    like = next(tensor for tensor in call.tensors.values() if tensor is not None)
    for argument, dtype in dtypes.items():
        if argument not in call.tensors:
            raise TypeError(f"{op}: the kernel's tensor {argument} is missing")
        tensor = call.tensors[argument]
        if tensor is None:
            tensor = like.new_empty(1, 1, dtype=getattr(torch, dtype))
        tensors[argument] = tensor
    return kernel, tensors


@functools.cache
def program(op: str):
    """The module of an op's PyPTO program; PyPTO is looked for and imported when first needed."""
    if problem := pypto_problem():
        raise RuntimeError(
            f"{op}: an NPU {problem}, or move the tensors to the CPU, which needs no pypto"
        )
    warn_of_untested_pypto()
    return importlib.import_module(f"custom_pypto.kernels.{op}")


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Limits:
    """Rejects unsupported arguments on an NPU; the message names the argument and the remedy."""

    def __init__(self, op: str, arguments: Arguments):
        self.op, self.arguments = op, arguments

    def require(
        self, condition: bool, argument: str, expected: str, got, remedy: str = "run on the CPU"
    ) -> None:
        if not condition:
            raise RuntimeError(
                f"{self.op}: {argument} must be {expected} on an NPU, got {got}; {remedy}"
            )

    def dtype(self, argument: str) -> None:
        dtypes = KERNELS[self.op].dtypes_of(argument)
        given = name(getattr(self.arguments, argument).dtype)
        remedy = "convert it, or run on the CPU"
        self.require(given in dtypes, f"{argument}.dtype", spelled(dtypes), given, remedy)

    def paged(self, argument: str) -> None:
        layout = getattr(self.arguments, argument)
        remedy = "keep the keys in a paged cache with a block table"
        self.require(layout == "PA_BSND", argument, "'PA_BSND'", f"'{layout}'", remedy)

    def contiguous(
        self,
        *arguments: str,
        expected: str = "contiguous",
        remedy: str = "allocate it as a separate tensor, not as a view into wider rows",
    ) -> None:
        for argument in arguments:
            tensor = getattr(self.arguments, argument)
            if tensor is not None:
                strides = f"strides {tensor.stride()}"
                self.require(tensor.is_contiguous(), argument, expected, strides, remedy)

    def heads(self, most: int, argument: str = "query") -> None:
        query = getattr(self.arguments, argument)
        argument = f"{argument}.size({query.dim() - 2})"
        self.require(query.size(-2) <= most, argument, f"at most {most}", query.size(-2))

    def sortable(self, keys: int) -> None:
        """PyPTO's sort: longer rows of candidates do not fit the memory of the vector cores."""
        count = self.arguments.sparse_count
        expected = f"at most 4096 for a block table of {keys} keys (over 8192)"
        remedy = "select fewer keys, or run on the CPU"
        self.require(count <= 4096 or keys <= 8192, "sparse_count", expected, count, remedy)

    def checkable(self, keys: int, blocks: int) -> None:
        """A row of the table is checked at once, in float32, which is exact up to 2^24."""
        width = self.arguments.block_table.size(1)
        remedy = "use larger blocks or a smaller table"
        self.require(width <= 32768, "block_table.size(1)", "at most 32768", width, remedy)
        self.require(
            keys + blocks <= MOST_COUNTED,
            "block_table",
            "of fewer than 16 million keys and cache blocks in total",
            f"{keys} keys and {blocks} blocks",
            "use a smaller table or cache",
        )

    def countable(self, argument: str, keys: int) -> None:
        """Positions pass through float32, which is exact up to 2^24."""
        remedy = "pass fewer keys, or run on the CPU"
        self.require(keys <= MOST_COUNTED, argument, "of at most 16 million keys", keys, remedy)

    def ready_on_host(self, *control: str) -> bool:
        """Whether the caller guarantees that lengths, tables and slots are final before the launch.

        ``CUSTOM_PYPTO_READY_ON_HOST=1`` lets PyPTO's control flow read them before the work queued
        ahead of the kernel is done. That is wrong if an op on the device computes them, as
        ``lengths += 1`` does, and is therefore off by default. A strided tensor is rejected, since
        its contiguous copy would be such an op.
        """
        ready = switched_on("CUSTOM_PYPTO_READY_ON_HOST")
        if ready:
            expected = "contiguous with CUSTOM_PYPTO_READY_ON_HOST=1"
            remedy = "pass a contiguous tensor, or unset the variable"
            self.contiguous(*control, expected=expected, remedy=remedy)
        return ready


def rows(tensor: Tensor) -> Tensor:
    """``[..., W]`` as ``[rows, W]``."""
    return tensor.contiguous().view(-1, tensor.size(-1))


def by_head(x: Tensor, count: int) -> Tensor:
    """``[..., heads, W]`` as ``[tokens * count, W]``, with zeros behind the heads of a token."""
    heads, width = x.shape[-2:]
    return rows(torch.nn.functional.pad(x.reshape(-1, heads, width), (0, 0, 0, count - heads)))


# what float32 counts exactly, up to 2^24, without the last chunk of keys, of at most 2^13
MOST_COUNTED = 2**24 - 2**13
NOTHING = 3e38  # as the logarithm of a sum of no exponentials: exp(x - NOTHING) is 0


def log_of_sums(largest: Tensor, total: Tensor) -> Tensor:
    """The logarithms of sums of exponentials, from the statistics of a softmax."""
    return torch.where(total > 0, largest + total.log(), NOTHING)


def words(slots: Tensor) -> Tensor:
    """``slots`` as ``[1, words]`` int32; one of int64 is two words, the low one first."""
    return slots.contiguous().view(1, -1).view(torch.int32)


def padded(matrix: Tensor, *, rows: int = 0, columns: int = 0) -> Tensor:
    """``matrix`` with more rows and columns, so that loads of whole tiles stay inside it."""
    if not rows and not columns:
        return matrix
    return torch.nn.functional.pad(matrix, (0, columns, 0, rows))


def query_lengths(lengths: Tensor | None, layout: str, tokens: int, otherwise: Tensor) -> Tensor:
    """The kernels' form of ``lengths``: lengths, or non-decreasing prefix sums."""
    if lengths is None:
        return otherwise.contiguous()  # of the right shape, and not read
    if layout == "TND":
        return lengths.clamp(0, tokens).cummax(0).values
    return lengths.contiguous()
