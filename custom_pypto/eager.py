"""What runs eager calls on an NPU, by ``CUSTOM_PYPTO_EAGER``. Can be imported without torch."""

import os

VARIABLE = "CUSTOM_PYPTO_EAGER"


def asked() -> str:
    """The choice of the user: auto, pypto or aclnn.

    Raises:
        ValueError: the variable has another value.
    """
    value = os.environ.get(VARIABLE) or "auto"
    if value not in ("auto", "pypto", "aclnn"):
        raise ValueError(
            f"custom_pypto: {VARIABLE} must be auto (PyPTO where it is installed, else aclnn), "
            f"pypto or aclnn (a kernel package), got {value!r}"
        )
    return value
