"""The ops' schemas, the only source of argument order, names and defaults; binds calls to them."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from .descriptions import ALL_OPS, overload_names
from .standard import check_keywords

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@functools.cache
def overload(op: str, name: str = "") -> torch._ops.OpOverload:
    """The default overload, or that of the given name."""
    return getattr(getattr(torch.ops.custom_pypto, op), name or "default")


@functools.cache
def overloads(op: str) -> tuple[torch._ops.OpOverload, ...]:
    """All overloads, the default one first; the last one has every argument of the op."""
    return tuple(overload(op, name) for name in overload_names(ALL_OPS[op]))


def given(op: str, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The explicit arguments of a call by name, without defaults."""
    return dict(zip(_names(op), args, strict=False)) | kwargs


def bound(op: str, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call of any overload by name; the dispatcher passes only those that differ
    from defaults."""
    return _defaults(op) | given(op, args, kwargs)


@functools.cache  # reading a schema copies its arguments
def _names(op: str) -> tuple[str, ...]:
    return tuple(argument.name for argument in overload(op)._schema.arguments)


@functools.cache
def _defaults(op: str) -> dict[str, Any]:
    arguments = overload(op)._schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return defaults | ALL_OPS[op].omitted


def public_function(contract: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Wraps the op that the body-less function ``contract`` names, declares and documents."""
    name = contract.__name__
    # resolve the overloads once: a lookup takes a tenth of the time of a call on cold caches
    op, *others = overloads(name)
    arguments = frozenset(argument.name for argument in op._schema.arguments)

    @functools.wraps(contract)
    def call(*args, **kwargs):
        if kwargs.keys() <= arguments:
            return op(*args, **kwargs)
        standard = {given: kwargs.pop(given) for given in [*kwargs] if given not in arguments}
        more = {given: standard.pop(given) for given in ALL_OPS[name].omitted if given in standard}
        check_keywords(name, standard)
        if any(more.values()):
            return others[-1](*args, **kwargs, **more)
        return op(*args, **kwargs)

    return call
