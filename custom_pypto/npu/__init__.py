"""The ops on NPU tensors: check the contract, allocate the output, launch the PyPTO kernel.

The only folder between the ops and the PyPTO programs. Nothing is read back from the device:
the kernels themselves check lengths, block ids and indices, so that a call neither waits for the
device nor stops a graph capture. PyPTO launches on the current stream and takes its workspace from
torch's allocator.

``<op>.py`` has two functions, whose arguments have the schema's names. ``check(arguments)`` rejects
calls that the contract allows but the NPU programs do not support; it reads only sizes, strides and
dtypes, and serves graph mode too. ``run(launch, arguments, out)`` then writes the output, or the
tuple of outputs that the called overload has. A ``backward`` beside them is registered as
``<op>_backward``.

``launch(kernel, tensors, written)`` runs a kernel on ``tensors``, of which it writes ``written``:
:func:`.common.on_device` here, the interpreter in :mod:`custom_pypto.simulation`.
"""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ..descriptions import OPS
from ..schemas import bound, overloads
from .common import Arguments, Launch, on_device


@functools.cache
def _module(op: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{op}")


def check(op: str, arguments: dict[str, Any]) -> None:
    """Rejects a call that is unsupported on an NPU; all arguments by name.

    Raises:
        RuntimeError: the message names the argument and the remedy.
    """
    _module(op).check(Arguments(**arguments))


def _call(op: str, overload: torch._ops.OpOverload, launch: Launch, /, *args, **kwargs):
    # checks the arguments as on every device and allocates the output
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
    out = overload.redispatch(keys, *args, **kwargs)
    arguments = Arguments(**bound(op, args, kwargs))
    _module(op).check(arguments)
    return _module(op).run(launch, arguments, out)


def implementations(launch: Launch) -> dict[str, Callable]:
    """Overload of the schema -> the function that runs it with ``launch``."""
    functions: dict[str, Callable] = {}
    for op in OPS:
        for overload in overloads(op):
            name = overload.name().removeprefix("custom_pypto::")
            functions[name] = functools.partial(_call, op, overload, launch)
        if hasattr(_module(op), "backward"):
            functions[f"{op}_backward"] = functools.partial(_module(op).backward, launch)
    return functions


_library = torch.library.Library("custom_pypto", "IMPL")
for _name, _function in implementations(on_device).items():
    _library.impl(_name, _function, "PrivateUse1")
