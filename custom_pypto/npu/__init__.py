"""The ops on NPU tensors: check the contract, allocate the output, launch the PyPTO kernel.

The only folder between the ops and the PyPTO programs. Nothing is read back from the device:
the kernels themselves check lengths, block ids and indices, so that a call neither waits for the
device nor stops a graph capture. PyPTO launches on the current stream and takes its workspace from
torch's allocator.

``<op>.py`` has two functions, whose arguments have the schema's names. ``check(arguments)`` rejects
calls that the contract allows but the NPU kernels do not support; it reads only sizes, strides and
dtypes, and serves graph mode too. ``kernel_call(arguments, out)`` then describes the call of the
PyPTO kernel that computes ``out``, the output or tuple of outputs; if there is nothing to launch,
it fills ``out`` and returns None.

The caller of :func:`implementations` passes the launch: :func:`.common.on_device`, or the
interpreter in :mod:`custom_pypto.simulation`.

``CUSTOM_PYPTO_EAGER``, read at each call on NPU tensors, chooses how the op runs after its
contract:

==================  =============================================================================
``pypto``           the PyPTO program, by ``<op>.py``
``aclnn``           the operator of an installed kernel package, by :mod:`.aclnn`; its own limits
                    apply instead of ``check``
``auto``, not set   PyPTO where it is installed, else a kernel package that offers the operator
==================  =============================================================================

Layer ops are no operators of a kernel package: on an NPU they run their PyPTO program, or nothing.
"""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ..descriptions import KERNELS, LAYER_KERNELS, OPS, WEIGHTS
from ..eager import VARIABLE, asked
from ..graph.prototypes import prototype
from ..requirements import Problem, pypto_problem
from ..schemas import bound, overload
from .aclnn import Operator
from .common import Arguments, Launch, on_device, prepared

#: whether the programs compute the ops on CPU tensors, too: :func:`custom_pypto.simulation.on_cpu`
on_cpu = False


@functools.cache
def _module(op: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{op}")


def check(op: str, arguments: dict[str, Any]) -> None:
    """Rejects a call that is unsupported on an NPU; all arguments by name.

    Raises:
        RuntimeError: the message names the argument and the remedy.
    """
    _module(op).check(Arguments(**arguments))


def runs(op: str, *args) -> bool:
    """Whether the PyPTO program of a layer op takes a call on an NPU."""
    if asked() == "aclnn" or _pypto_problem() is not None:
        return False
    try:
        check(op, bound(op, args, {}))
    except RuntimeError:
        return False
    return True


def _call(op: str, launch: Launch, /, *args, **kwargs):
    out, arguments = _contract(op, args, kwargs)
    named = Arguments(**arguments)
    _module(op).check(named)
    if (call := _module(op).kernel_call(named, out)) is not None:
        launch(*prepared(op, call))
    return out


def _contract(op: str, args: tuple, kwargs: dict[str, Any]):
    # checks the arguments as on every device and allocates the output
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
    return overload(op).redispatch(keys, *args, **kwargs), bound(op, args, kwargs)


def _call_eagerly(op: str, launch: Launch, /, *args, **kwargs):
    choice = asked()
    if choice == "pypto" or (choice == "auto" and _pypto_problem() is None):
        return _call(op, launch, *args, **kwargs)
    out, arguments = _contract(op, args, kwargs)
    operator = _operator(op)
    try:
        found = operator.functions()
    except Problem as missing:
        raise RuntimeError(_remedies(op, choice, missing)) from None
    return operator.run(found, arguments, out)


@functools.cache  # reading an installed version takes longer than a launch
def _pypto_problem() -> Problem | None:
    return pypto_problem()


@functools.cache
def _operator(op: str) -> Operator:
    return Operator(prototype(overload(op)._schema, OPS[op]))


def _remedies(op: str, choice: str, missing: Problem) -> str:
    if choice == "aclnn":
        return f"{op}: {VARIABLE}=aclnn needs {missing.what}; {missing.remedy}, or set it to pypto"
    problem = _pypto_problem()
    return (
        f"{op}: an NPU {problem.what}, or {missing.what}; {problem.remedy}, or move the "
        "tensors to the CPU, which needs neither"
    )


def implementations(launch: Launch) -> dict[str, Callable]:
    """Op -> the function that runs its PyPTO program with ``launch``."""
    return {op: functools.partial(_call, op, launch) for op in KERNELS}


def eager(launch: Launch) -> dict[str, Callable]:
    """Op -> its function for NPU tensors, by ``CUSTOM_PYPTO_EAGER``."""
    of_layers = {op: functools.partial(_call, op, launch) for op in LAYER_KERNELS}
    return of_layers | {op: functools.partial(_call_eagerly, op, launch) for op in OPS}


_library = torch.library.Library("custom_pypto", "IMPL")
for _name, _function in eager(on_device).items():
    _library.impl(overload(_name), _function, "PrivateUse1")


def _on_cpu_only(op: str, /, *args, **kwargs):
    raise RuntimeError(
        f"{op}: x.device must be cpu (an NPU has torch_npu.npu_weight_quant_batchmatmul), got "
        f"{args[0].device}; load the model with weights=None"
    )


for _name in WEIGHTS:
    _library.impl(_name, functools.partial(_on_cpu_only, _name), "PrivateUse1")
