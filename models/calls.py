"""What a thread has open around its forwards. Other threads call the same model, so none of it
stands on a module: the hook of the text model passes it to the layers of its own forward.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .cache import Step

#: argument of the layers in a forward inside of contexts
NAME = "custom_pypto_contexts"


class Context:
    """Follows or replaces what the layers of a text model choose in its forwards: positions, by
    their own indexer, and routed experts.

    Args:
        routed: decoder layers whose experts it follows or replaces, with their numbers.
    """

    def __init__(self, text: nn.Module, routed: dict[nn.Module, int]):
        self.text, self.routed = text, routed

    def begins(self, step: Step | None, batch: int, tokens: int) -> None:
        """Gets each forward before its layers run.

        Args:
            step: None: it takes the upstream path.
            batch, tokens: of the forward, on all ranks.
        """

    def given(self, attention: nn.Module, step: Step) -> Tensor | None:
        """The indices to which the new tokens of ``step`` attend; None: the layer selects."""
        return None

    def taken(self, attention: nn.Module, step: Step, indices: Tensor) -> None:
        """Gets the indices to which they attended."""

    def upstream(self, attention: nn.Module, hidden_states: Tensor, mask: Tensor) -> nn.Module:
        """What stands in for ``attention`` on the upstream path: itself, or a module like it."""
        return attention

    def given_experts(self, layer: int, step: Step | None) -> Tensor | None:
        """The experts of the new tokens, int32 ``[B, S, k]``; None: the router chooses."""
        return None

    def taken_experts(self, layer: int, step: Step | None, experts: Tensor) -> None:
        """Gets the experts of the new tokens, ``[B, S, k]``."""


class Around(NamedTuple):
    """What layers get in a forward inside of contexts."""

    contexts: tuple[Context, ...]  # from the outermost on
    step: Step | None  # None: the forward takes the upstream path


# weak: what Ctrl-C keeps from being left, in whichever line, ends with its block
Reference = weakref.ref[Context]
_of_thread: ContextVar[tuple[Reference, ...]] = ContextVar("custom_pypto.contexts", default=())
# of all threads: torch.compile knows no context variables, but guards on a list
_open: list[Reference] = []


@contextmanager
def entered(context: Context) -> Iterator[None]:
    """Inside, ``context`` is around the forwards of this thread, or task of asyncio. Contexts that
    are left in another order than they were entered in leave nothing behind."""
    reference = weakref.ref(context, _close)
    try:
        _open.append(reference)
        _of_thread.set((*_of_thread.get(), reference))
        yield
    finally:
        _close(reference)
        _of_thread.set(tuple(one for one in _of_thread.get() if one in _open))


def _close(reference: Reference) -> None:
    if reference in _open:
        _open.remove(reference)


def around(text: nn.Module) -> tuple[Context, ...]:
    """The contexts around a forward of this text model, from the outermost on."""
    return _around(text) if _open else ()


@torch.compiler.disable(reason="a graph knows no contexts of Python's threads")
def _around(text: nn.Module) -> tuple[Context, ...]:
    # another thread may have left one
    found = [reference() for reference in _of_thread.get() if reference in _open]
    return tuple(context for context in found if context is not None and context.text is text)


def with_other(module: nn.Module, name: str, other: nn.Module) -> nn.Module:
    """A module with the parts of ``module``, but ``other`` under this dotted name."""
    first, _, rest = name.partition(".")
    # not by copy, which constructs a module of FSDP2's
    twin, part = object.__new__(type(module)), other
    vars(twin).update(vars(module))
    if rest:
        part = with_other(module.get_submodule(first), rest, other)
        if "forward" in vars(part):
            raise TypeError(
                f"patched model: the {first} must have its own forward where choices are recorded, "
                "replayed or shared between layers, got a replaced one (offloaded by accelerate?), "
                "which would choose; load the model without device_map, or use evaluation mode"
            )
    twin._modules = module._modules | {first: part}
    return twin
