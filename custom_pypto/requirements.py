"""Versions of other distributions that the package needs, found without importing them."""

from __future__ import annotations

import importlib.metadata

PYPTO = "0.2.0"


def installed_version(distribution: str) -> str | None:
    """Version of a distribution, without importing it; None: not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def pypto_problem() -> dict[str, str] | None:
    """The problem of the installed PyPTO, if any, for NPU kernels and simulation."""
    found = installed_version("pypto")
    if found == PYPTO:
        return None
    return {
        "what": f"needs pypto {PYPTO}, found {found or 'none'}",
        "remedy": f"pip install pypto=={PYPTO}",
    }
