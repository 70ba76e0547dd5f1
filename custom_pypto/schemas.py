"""The ops' schemas, the only source of argument order, names and defaults; binds calls to them."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from .standard import check_keywords

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@functools.cache
def overload(op: str) -> torch._ops.OpOverload:
    """The implemented overload, which has every argument; a default one without a flag for more
    results calls it."""
    packet = getattr(torch.ops.custom_pypto, op)
    found = [getattr(packet, name) for name in packet.overloads()]
    return max(found, key=lambda one: len(one._schema.arguments))


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
    return {a.name: a.default_value for a in arguments if a.has_default_value()}


def op_function(contract: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Wraps the op that the body-less function ``contract`` names, declares and documents."""
    name = contract.__name__
    # resolve the overloads once: a lookup takes a tenth of the time of a call on cold caches
    first, op = getattr(torch.ops.custom_pypto, name).default, overload(name)
    of_first, of_op = (frozenset(a.name for a in one._schema.arguments) for one in (first, op))

    @functools.wraps(contract)
    def call(*args, **kwargs):
        # a layer op runs a dozen times for a token and layer, without keywords
        if not kwargs or kwargs.keys() <= of_first:
            return first(*args, **kwargs)
        flags = {given: kwargs.pop(given) for given in [*kwargs] if given not in of_first}
        check_keywords(name, {given: flags.pop(given) for given in [*flags] if given not in of_op})
        if any(flags.values()):
            return op(*args, **kwargs, **flags)
        return first(*args, **kwargs)

    return call
