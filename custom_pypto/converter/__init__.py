"""Converters for torchair, which turn the ops of ``torch.compile``'s graphs into GE nodes.

Without a converter, torchair calls the PyPTO kernel from inside the graph (max-autotune, recent
CANN); a registered converter disables that. Importing :mod:`custom_pypto` therefore registers the
converters only if GE has kernels for their operators:

=================================  ==============================================================
``CUSTOM_PYPTO_GE_CONVERTERS=1``   registered
``CUSTOM_PYPTO_GE_CONVERTERS=0``   not registered
not set                            registered if a GE kernel package with all operators is installed
=================================  ==============================================================

:mod:`.convert` makes a converter from each schema. This module can be imported without torch;
:func:`register` imports torch_npu and torchair.
"""

import glob
import json
import os
import warnings

from ..descriptions import OPS, ge_types

VARIABLE = "CUSTOM_PYPTO_GE_CONVERTERS"
# a kernel package's list of operators, below the folder of its vendor
LISTS = "op_impl/ai_core/tbe/config/*/aic-*-ops-info.json"

OPERATORS = ge_types()

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
    """Registers at import by the table above; warns if torchair cannot be imported."""
    global failure
    if not wanted():
        return
    try:
        register()
    # the ops work without torchair, whose import may raise any exception
    except Exception as error:
        failure = error
        missing = problem()
        warnings.warn(
            f"custom_pypto: {missing['what']}; {missing['remedy']}", RuntimeWarning, stacklevel=3
        )


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
    return asked == "1" if asked else kernel_package() is not None


def kernel_package() -> str | None:
    """The operator list of an installed GE kernel package with all operators of this package.

    ``AddCustom`` alone is not enough: many machines have that sample of CANN's tutorial.
    """
    vendors = [path for path in os.environ.get("ASCEND_CUSTOM_OPP_PATH", "").split(":") if path]
    patterns = [(vendor, LISTS) for vendor in vendors]
    if opp := os.environ.get("ASCEND_OPP_PATH"):
        patterns.append((opp, f"vendors/*/{LISTS}"))
    for folder, pattern in patterns:
        for name in sorted(glob.glob(pattern, root_dir=folder)):
            path = os.path.join(folder, name)
            try:
                with open(path, encoding="utf-8") as file:
                    listed = json.load(file)
            except (OSError, ValueError):  # another vendor's file
                continue
            if isinstance(listed, dict) and set(OPERATORS) <= set(listed):
                return path
    return None


def problem() -> dict[str, str] | None:
    """Why the converters are not registered, for the report of ``python -m custom_pypto env``."""
    if _registered:
        return None
    if failure is not None:
        what = f"torchair cannot be imported ({type(failure).__name__}: {failure})"
        remedy = f"install torch_npu, source CANN's set_env.sh, or set {VARIABLE}=0"
    elif os.environ.get(VARIABLE) == "0":
        what = f"GE converters are disabled by {VARIABLE}=0"
        remedy = f"unset {VARIABLE}"
    else:
        what = (
            f"a GE kernel package with {', '.join(OPERATORS)} in ASCEND_CUSTOM_OPP_PATH "
            "or ASCEND_OPP_PATH/vendors"
        )
        remedy = f"install one, or set {VARIABLE}=1 to convert the ops without it"
    return {"what": what, "remedy": remedy}
