"""Runs NPU programs without an NPU: PyPTO's interpreter computes results, its cost model latency.

``interpret(kernel, *tensors)`` runs a PyPTO kernel on host tensors, ``estimate(kernel, *tensors)``
prices it, and inside ``on_cpu()`` the ops run the NPU programs in the interpreter. Everything that
touches PyPTO's internals is in this folder.

PyPTO reads its configuration at import: import this package before ``pypto`` to get full error
messages and to skip the drawings of every compilation.
"""

from .compiler import SimulationError
from .cost_model import Estimate, Task, estimate
from .interpreter import interpret, verify_passes
from .on_cpu import on_cpu

__all__ = [
    "Estimate",
    "SimulationError",
    "Task",
    "estimate",
    "interpret",
    "on_cpu",
    "verify_passes",
]
