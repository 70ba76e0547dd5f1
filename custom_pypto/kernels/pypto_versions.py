"""What the programs spell differently for the supported PyPTOs. No other program names a version.

Each difference is decided by what this PyPTO takes, not by its number, which several releases
share.
"""

import inspect
from collections.abc import Callable
from functools import partial

import pypto


def _where_taken(function: Callable, **options) -> Callable:
    """``function`` with those of the ``options`` that this PyPTO's takes."""
    taken = inspect.signature(function).parameters
    return partial(function, **{name: o for name, o in options.items() if name in taken})


# The default of CANN 9.2 is a compiler that parses the source of a kernel and of its helpers; it
# takes neither generators nor context managers nor variable arguments (docs/npu.md).
jit = _where_taken(pypto.frontend.jit, new_ir=False)

# CANN 9.1 rounds better by default, in several instructions; 0.2.0 has the chip's instruction only.
_INTRINSIC = getattr(getattr(pypto, "PrecisionType", None), "INTRINSIC", None)
div = _where_taken(pypto.div, precision_type=_INTRINSIC)
reciprocal = _where_taken(pypto.reciprocal, precision_type=_INTRINSIC)
