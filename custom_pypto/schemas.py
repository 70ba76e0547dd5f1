"""The ops' schemas, the only source of argument order, names and defaults; binds calls to them."""

import functools
import re
import reprlib
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from .standard import check_keywords

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
# what the dispatcher says of a value that it cannot cast, before it prints its contents
CAST = re.compile(r".* Expected a value of type '(.*?)' for argument '(\w+)'")
TYPES = {
    "Tensor": "a tensor",
    "int": "an int of 64 bits",
    "float": "a float",
    "bool": "a bool",
    "str": "a str",
    "List[int]": "a list of ints",
}


@functools.cache
def overload(op: str) -> torch._ops.OpOverload:
    """The implemented overload, which has every argument; a default one without a flag for more
    results calls it. Models call those ``by_token``, in its place."""
    packet = getattr(torch.ops.custom_pypto, op)
    found = [getattr(packet, name) for name in packet.overloads() if name != "by_token"]
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
        try:
            # a layer op runs a dozen times for a token and layer, without keywords
            if not kwargs or kwargs.keys() <= of_first:
                return first(*args, **kwargs)
            flags = {name: kwargs[name] for name in kwargs if name not in of_first}
            others = {name: flags.pop(name) for name in [*flags] if name not in of_op}
            check_keywords(contract.__name__, others)
            own = {name: kwargs[name] for name in kwargs if name in of_first}
            return op(*args, **own, **flags) if any(flags.values()) else first(*args, **own)
        except RuntimeError as error:
            if (cast := CAST.match(str(error))) is None:
                raise
            value = given(name, args, kwargs)[cast[2]]
            problem = f"{name}: {cast[2]} must be {cast_problem(*cast.groups(), value)}"
        raise TypeError(problem)

    return call


def cast_problem(kind: str, argument: str, value: Any) -> str:
    """The type of an argument, what came, and the remedy, if there is one.

    torch's own words have the contents of tensors and C++'s names of types.
    """
    plain = kind.removeprefix("Optional[").removesuffix("]") if "Optional[" in kind else kind
    came = f"{type(value).__name__} {reprlib.repr(value)}"
    remedy = ""
    if isinstance(value, torch.Tensor):
        came = "a tensor"
    elif value is None:
        came = "None"
    elif hasattr(value, "__array__"):  # numpy's, whose text has every element
        came = f"a {type(value).__name__} of {value.dtype}"
        # all integers of the ops may be int32
        dtype = ", dtype=torch.int32" if value.dtype.kind in "iu" else ""
        remedy = f"; pass torch.as_tensor({argument}{dtype})" if plain == "Tensor" else ""
    elif plain == "Tensor" and isinstance(value, (list, tuple, int)):
        dtype = "" if "." in repr(value) else ", dtype=torch.int32"
        remedy = f"; pass torch.tensor({reprlib.repr(value)}{dtype})"
    elif plain == "int" and isinstance(value, str) and value.isdecimal():
        remedy = f"; pass {value}"
    return f"{TYPES[plain]}{' or None' * (plain != kind)}, got {came}{remedy}"
