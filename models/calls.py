"""What a thread has open around its forwards. Other threads call the same model, so none of it
stands on a module: the hook of the text model passes it to the layers of its own forward.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from .cache import Step

#: argument of the layers in a forward inside of contexts
NAME = "custom_pypto_contexts"


class Context:
    """Follows or replaces what layers select by their own indexer, in forwards of a text model."""

    def __init__(self, text: nn.Module):
        self.text = text

    def given(self, attention: nn.Module, step: Step) -> Tensor | None:
        """The indices to which the new tokens of ``step`` attend; None: the layer selects."""
        return None

    def taken(self, attention: nn.Module, step: Step, indices: Tensor) -> None:
        """Gets the indices to which they attended."""

    def upstream(self, attention: nn.Module, hidden_states: Tensor, mask: Tensor) -> nn.Module:
        """What stands in for ``attention`` on the upstream path: itself, or a module like it."""
        return attention


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
