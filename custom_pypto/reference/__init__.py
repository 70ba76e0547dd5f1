"""What each op means, in plain torch: slow, materialises everything, and is the definition that
the kernels are tested against.

``<op>.py`` has three functions. One is the op itself, by its name. ``checks(dtypes)`` makes seeded
calls for ``python -m custom_pypto verify``: dtype, shape and arguments of each. ``error(got,
expected, mine, theirs)`` tells how far a result is from the definition's and how far it may be;
``mine`` and ``theirs`` are the arguments as the op and the definition have left them.
"""

import importlib

from ..descriptions import OPS

MODULES = {op: importlib.import_module(f"{__name__}.{op}") for op in OPS}

# after all imports, each of which puts a module under the op's name
globals().update({op: getattr(module, op) for op, module in MODULES.items()})
