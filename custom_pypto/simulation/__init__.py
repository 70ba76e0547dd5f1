"""Runs NPU kernels without an NPU.

``interpret(kernel, *tensors)`` runs a PyPTO kernel on host tensors as it is written,
``execute(kernel, *tensors)`` the C++ that PyPTO generates from it, and ``estimate(kernel,
*tensors)`` its time. Inside ``on_cpu()`` the ops run the NPU kernels. All code on PyPTO's
internals is in this folder, except ``signature`` of ``kernels/pypto_versions.py``.

PyPTO reads its configuration at import: import this package before ``pypto`` to get full error
messages and to skip the drawings of every compilation.
"""

from .compiler import SimulationError
from .cost_model import Estimate, Task, estimate
from .generated import execute
from .interpreter import interpret, verify_passes
from .on_cpu import on_cpu

__all__ = [
    "Estimate",
    "SimulationError",
    "Task",
    "estimate",
    "execute",
    "interpret",
    "on_cpu",
    "verify_passes",
]
