"""Converters for torchair, which turn the ops of ``torch.compile``'s graphs into GE nodes.

Without a converter, torchair calls the PyPTO kernel from inside the graph (max-autotune, recent
CANN); a registered converter disables that. Importing :mod:`custom_pypto` therefore registers the
converters only if GE has kernels for their operators:

=================================  ==============================================================
``CUSTOM_PYPTO_GE_CONVERTERS=1``   registered
``CUSTOM_PYPTO_GE_CONVERTERS=0``   not registered
not set                            registered if kernel packages with all operators are installed
=================================  ==============================================================

:mod:`.convert` makes a converter from each schema. This module can be imported without torch;
:func:`register` imports torch_npu and torchair.
"""

import os
import warnings

from .. import kernel_packages
from ..descriptions import OPS
from ..requirements import Problem

VARIABLE = "CUSTOM_PYPTO_GE_CONVERTERS"

failure: Exception | None = None  # why registration at import failed
_registered = False


def register() -> None:
    """Registers the converters of all ops with torchair; later calls do nothing.

    Raises:
        Exception: torch_npu or torchair cannot be imported; any type, as they raise it.
    """
    global _registered
    if _registered:
        return
    import torch_npu  # noqa: F401  # makes torchair importable

    from .convert import register as register_one

    for op in OPS:
        register_one(op)
    _registered = True


def register_if_wanted() -> None:
    """Registers at import by the table above; warns if torchair cannot be imported, or if GE would
    run other operators of our names."""
    global failure
    if not wanted():
        return
    if other := kernel_packages.foreign():  # then the variable asks for it
        warnings.warn(
            f"custom_pypto: {VARIABLE}=1 registers the GE converters, but {other}",
            RuntimeWarning,
            stacklevel=3,
        )
    try:
        register()
    # the ops work without torchair, whose import may raise any exception
    except Exception as error:
        failure = error
        warnings.warn(f"custom_pypto: {problem()}", RuntimeWarning, stacklevel=3)


def wanted() -> bool:
    """Whether importing custom_pypto registers the converters.

    Raises:
        ValueError: the variable has another value.
    """
    asked = os.environ.get(VARIABLE)
    if asked not in (None, "0", "1"):
        raise ValueError(
            f"custom_pypto: {VARIABLE} must be 1 (register the GE converters) or 0 (do not), got "
            f"{asked!r}; unset it to register them only if a GE kernel package is installed"
        )
    return asked == "1" if asked else kernel_packages.problem() is None


def problem() -> Problem | None:
    """Why the converters are not registered."""
    if _registered:
        return None
    if failure is not None:
        return Problem(
            f"torchair cannot be imported ({type(failure).__name__}: {failure})",
            f"install torch_npu, source CANN's set_env.sh, or set {VARIABLE}=0",
        )
    if os.environ.get(VARIABLE) == "0":
        return Problem(f"GE converters are disabled by {VARIABLE}=0", f"unset {VARIABLE}")
    # the last: a package that was installed after the import
    return kernel_packages.problem() or Problem(
        "GE converters are not registered", "start the program anew"
    )
