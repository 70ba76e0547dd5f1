"""Reference implementations of the ops in plain torch. They are slow, materialise everything, and
define the results that the kernels are tested against.

``<op>.py`` has three functions. One is the op itself, under its name. ``checks(dtypes)`` yields
seeded calls for ``custom-pypto verify``: dtype, shape and arguments of each. ``error(got,
expected, mine, theirs)`` returns the error of a result and its bound; ``mine`` and ``theirs`` are
the arguments after the call of the op and of the reference. ``layer_ops.py`` has the definitions of
all layer ops; those with an NPU kernel have checks and errors in ``<op>.py``, too.
"""

import importlib

from ..descriptions import ALL_OPS, LAYER_KERNELS
from . import layer_ops as layer_ops

MODULES = {op: importlib.import_module(f"{__name__}.{op}") for op in ALL_OPS | LAYER_KERNELS}

# after all imports, since each sets the op's name to a module
globals().update({op: getattr(module, op) for op, module in MODULES.items()})
