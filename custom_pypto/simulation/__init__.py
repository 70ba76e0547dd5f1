"""The NPU programs without an NPU: PyPTO's interpreter for their numbers, its cost model for time.

``interpret(kernel, *tensors)`` runs a PyPTO kernel on host tensors, ``estimate(kernel, *tensors)``
prices it, and inside ``on_cpu()`` the ops run the NPU programs in the interpreter. Everything that
touches PyPTO's internals is in this folder.

PyPTO reads its configuration while it is imported: import this package before ``pypto`` to get
full error messages and no pictures drawn behind every compilation.
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
