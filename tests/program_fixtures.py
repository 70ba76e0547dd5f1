"""Fixtures of the tests of NPU kernels.

A module that changes programs names their modules in ``PROGRAMS``.
"""

import contextlib
import functools

import pytest


@contextlib.contextmanager
def on_cpu(**options):
    from custom_pypto import simulation  # with PyPTO, which may be missing

    with simulation.on_cpu(**options):
        yield


@pytest.fixture
def interpreted():
    with on_cpu():
        yield


@pytest.fixture
def generated():
    with on_cpu(generated=True):
        yield


@pytest.fixture(params=["interpreted", pytest.param("generated", marks=pytest.mark.slow)])
def both_ways(request):
    with on_cpu(generated=request.param == "generated"):
        yield


@pytest.fixture
def fresh_kernels(monkeypatch, request):
    """Kernels of the programs that a test changes are the test's own."""
    for module in request.module.PROGRAMS:
        monkeypatch.setattr(module, "kernel", functools.cache(module.kernel.__wrapped__))
