"""Fixtures of the tests of NPU programs.

A module that changes programs names their modules in ``PROGRAMS``.
"""

import functools

import pytest


@pytest.fixture
def interpreted():
    from custom_pypto import simulation  # with PyPTO, which may be missing

    with simulation.on_cpu():
        yield


@pytest.fixture
def generated():
    from custom_pypto import simulation

    with simulation.on_cpu(generated=True):
        yield


@pytest.fixture
def fresh_kernels(monkeypatch, request):
    """Kernels of the programs that a test changes are the test's own."""
    for module in request.module.PROGRAMS:
        monkeypatch.setattr(module, "kernel", functools.cache(module.kernel.__wrapped__))
