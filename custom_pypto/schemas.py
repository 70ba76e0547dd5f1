"""The ops' schemas, and calls bound by them: the order, names and defaults of arguments stand there
and nowhere else.
"""

import functools
from typing import Any

import torch


@functools.cache
def overload(op: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.custom_pypto, op).default


def given(op: str, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, without those that are left at their default."""
    return dict(zip(_names(op), args, strict=False)) | kwargs


def bound(op: str, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name; the dispatcher hands over only those that differ."""
    return _defaults(op) | given(op, args, kwargs)


@functools.cache  # reading a schema copies its arguments
def _names(op: str) -> tuple[str, ...]:
    return tuple(argument.name for argument in overload(op)._schema.arguments)


@functools.cache
def _defaults(op: str) -> dict[str, Any]:
    arguments = overload(op)._schema.arguments
    return {a.name: a.default_value for a in arguments if a.has_default_value()}
