"""What each op means, in plain torch: slow, materialises everything, and is the definition that
the kernels are tested against.

``<op>.py`` has three functions: the op itself, by its name; ``checks(dtypes)``, seeded calls of it
for ``python -m custom_pypto verify``; ``error(got, expected, mine, theirs)``, which tells how far
the result of a call may be from the definition's, and how far it is. ``mine`` and ``theirs`` are
the arguments as either has left them, on the CPU.
"""

import importlib

from ..descriptions import OPS

MODULES = {op: importlib.import_module(f"{__name__}.{op}") for op in OPS}

# after all imports, each of which puts a module under the op's name
globals().update({op: getattr(module, op) for op, module in MODULES.items()})
