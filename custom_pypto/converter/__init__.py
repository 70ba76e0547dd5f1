"""The ops as nodes of GE graphs, which torchair makes of ``torch.compile``'s graphs.

A converter that is registered disables what torchair does without one, which is to call
the PyPTO kernel from inside the graph (max-autotune, recent CANN). Importing :mod:`custom_pypto`
therefore registers them only where GE has kernels for them:

=================================  ============================================================
``CUSTOM_PYPTO_GE_CONVERTERS=1``   they are registered
``CUSTOM_PYPTO_GE_CONVERTERS=0``   they are not
not set                            they are if a GE kernel package with all operators is installed
=================================  ============================================================

:mod:`.convert` makes a converter of each schema. This module can be imported without torch;
:func:`register` imports torch_npu and torchair.
"""

import glob
import json
import os
import warnings

from ..descriptions import OPS, ge_type

VARIABLE = "CUSTOM_PYPTO_GE_CONVERTERS"
# where a kernel package lists its operators, below the folder of its vendor
LISTS = "op_impl/ai_core/tbe/config/*/aic-*-ops-info.json"

OPERATORS = tuple(ge_type(op) for op in OPS)

failure: Exception | None = None  # of the registration at import
_registered = False


def register() -> None:
    """Registers the converters of all ops with torchair; once they are, it does nothing.

    Raises:
        Exception: what importing torch_npu or torchair raises.
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
    """What importing custom_pypto does: the table above; warns if torchair cannot be imported."""
    global failure
    if not wanted():
        return
    try:
        register()
    # the ops work without torchair; how an import of it fails is not ours to list
    except Exception as error:
        failure = error
        missing = problem()
        warnings.warn(
            f"custom_pypto: {missing['what']}; {missing['remedy']}", RuntimeWarning, stacklevel=3
        )


def wanted() -> bool:
    """Whether importing custom_pypto is to register the converters.

    Raises:
        ValueError: the variable is set to something else.
    """
    asked = os.environ.get(VARIABLE)
    if asked not in (None, "0", "1"):
        raise ValueError(
            f"custom_pypto: {VARIABLE} must be 1 (register the GE converters) or 0 (do not), got "
            f"{asked!r}; unset it to register them where a GE kernel package is installed"
        )
    return asked == "1" if asked else kernel_package() is not None


def kernel_package() -> str | None:
    """The file in which an installed GE kernel package lists all our operators.

    All: ``AddCustom`` alone is the sample of CANN's tutorial, found on many machines.
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
            except (OSError, ValueError):  # somebody else's, and not ours to complain about
                continue
            if isinstance(listed, dict) and set(OPERATORS) <= set(listed):
                return path
    return None


def problem() -> dict[str, str] | None:
    """Why the converters are not registered, as ``python -m custom_pypto env`` says it."""
    if _registered:
        return None
    if failure is not None:
        what = f"torchair cannot be imported ({type(failure).__name__}: {failure})"
        remedy = f"install torch_npu, source CANN's set_env.sh, or set {VARIABLE}=0"
    elif os.environ.get(VARIABLE) == "0":
        what = f"GE converters are switched off by {VARIABLE}=0"
        remedy = f"unset {VARIABLE}"
    else:
        what = (
            f"a GE kernel package with {', '.join(OPERATORS)} in ASCEND_CUSTOM_OPP_PATH "
            "or ASCEND_OPP_PATH/vendors"
        )
        remedy = f"install one, or set {VARIABLE}=1 to convert the ops without it"
    return {"what": what, "remedy": remedy}
