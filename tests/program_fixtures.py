"""What the tests of NPU programs share: PyPTO, without which they are skipped, and fixtures.

A module that changes programs names their modules in ``PROGRAMS``.
"""

import functools
import importlib.util

import pytest

if importlib.util.find_spec("pypto") is None:
    pytest.skip("the sim extra is not installed", allow_module_level=True)

from custom_pypto import simulation  # noqa: E402

# isort: split
import pypto  # noqa: E402, F401  # behind the simulation, which sets options that it reads once


@pytest.fixture
def interpreted():
    with simulation.on_cpu():
        yield


@pytest.fixture
def generated():
    with simulation.on_cpu(generated=True):
        yield


@pytest.fixture
def fresh_kernels(monkeypatch, request):
    """Kernels of the programs that a test changes are the test's own."""
    for module in request.module.PROGRAMS:
        monkeypatch.setattr(module, "kernel", functools.cache(module.kernel.__wrapped__))
