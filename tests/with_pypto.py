"""PyPTO and its simulation, for tests that are skipped without it."""

import importlib.util

import pytest

if importlib.util.find_spec("pypto") is None:
    pytest.skip("the sim extra is not installed", allow_module_level=True)

from custom_pypto import simulation  # noqa: E402, F401

# isort: split
import pypto  # noqa: E402  # behind the simulation, which sets options that it reads once
import pypto.experimental  # noqa: E402, F401
