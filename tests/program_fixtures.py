"""Fixtures of the tests of NPU programs of gradients.

A module that changes programs names their modules in ``PROGRAMS``.
"""

import functools

import pytest
import torch


@pytest.fixture(autouse=True)
def no_result_by_chance():
    """NaN in fresh memory: a result that a program does not write is wrong in every run."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def interpreted():
    from custom_pypto import simulation  # with PyPTO, which may be missing

    with simulation.on_cpu():
        yield


@pytest.fixture
def fresh_kernels(monkeypatch, request):
    """Kernels of the programs that a test changes are the test's own."""
    for module in request.module.PROGRAMS:
        monkeypatch.setattr(module, "kernel", functools.cache(module.kernel.__wrapped__))
