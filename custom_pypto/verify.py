"""Compares the ops on a device with their reference: ``custom-pypto verify``.

Every check of :mod:`custom_pypto.reference` calls the op on the device and the reference on the
CPU, and prints the error and its bound.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from . import layer_ops, ops, reference
from .descriptions import ALL_OPS, KERNELS, LAYER_KERNELS

ROW = "{:<7} {:<46} {:<9} {:<45} {:>8} {:>8}"


def verify(device: str, op: str = "") -> bool:
    """Runs every check on ``device``, prints one line each.

    ``cpu`` and ``npu`` name the kernels there. ``interpreter`` runs the NPU kernels on the CPU in
    PyPTO's interpreter, ``generated`` the C++ that PyPTO generates from them. ``op`` limits the run
    to the checks of one op.

    Returns:
        Whether every check passed.
    """
    names = ALL_OPS | LAYER_KERNELS if device == "cpu" else KERNELS
    if op and op not in names:
        print(f"FAILED  {op} has no NPU kernel; verify --device cpu checks it")
        return False
    context: contextlib.AbstractContextManager = contextlib.nullcontext()
    if device in ("interpreter", "generated"):
        try:
            from .simulation import calculator, on_cpu

            if device == "interpreter":
                calculator.load()  # once, before the first check
        except RuntimeError as error:  # SimulationError; its module may be what does not load
            print(f"FAILED  {error}")
            return False
        context = on_cpu(generated=device == "generated")
    # the NPU kernels do not support float32
    dtypes = [torch.bfloat16, torch.float16] + [torch.float32] * (device == "cpu")
    place = "npu" if device == "npu" else "cpu"
    print(ROW.format("result", f"op on {device}", "dtype", "shape", "error", "allowed"))
    with context:
        passed = [
            _passes(place, name, *check)
            for name in ([op] if op else names)
            for check in reference.MODULES[name].checks(dtypes)
        ]
    print(f"{sum(passed)} of {len(passed)} checks passed on {device}")
    return all(passed)


def _passes(device: str, op: str, dtype: torch.dtype, shape: str, arguments: dict) -> bool:
    case = op, str(dtype).removeprefix("torch."), shape
    try:
        error, allowed = _error(op, arguments, device)
    except Exception as failure:  # one failed check must not hide the others
        print(ROW.format("FAILED", *case, "-", "-"))
        print(f"        {type(failure).__name__}: {failure}", flush=True)
        return False
    return report(case, error, allowed)


def report(case: tuple[str, str, str], error: float, allowed: float) -> bool:
    """Prints the row of a check; returns whether it passed."""
    passed = error <= allowed
    result = "ok" if passed else "FAILED"
    print(ROW.format(result, *case, f"{error:.2g}", f"{allowed:.2g}"), flush=True)
    return passed


def _error(op: str, arguments: dict, device: str) -> tuple[float, float]:
    """The error and its bound."""
    mine = copied(arguments, device)
    function = getattr(layer_ops if op in LAYER_KERNELS else ops, op)
    got = tree_map_only(Tensor, Tensor.cpu, function(**mine))
    with one_thread():
        expected = getattr(reference, op)(**arguments)
        return reference.MODULES[op].error(got, expected, copied(mine, "cpu"), arguments)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """The reference works token by token: threads bring no speed and cost much on a busy CPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def copied(arguments: dict, device: str) -> dict:
    return {
        name: value.to(device, copy=True) if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }
