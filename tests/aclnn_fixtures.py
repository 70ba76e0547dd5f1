"""Fixtures of the tests of calls through aclnn, on the host simulator of CANN."""

import pytest

from custom_pypto import npu
from custom_pypto.descriptions import OPS


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A package with all operators, written once."""
    from custom_pypto.simulation.ascend_host import kernel_package

    return kernel_package.build(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def simulator(built, monkeypatch):
    """The module of the package's computation, in a process that calls through aclnn."""
    from custom_pypto.simulation.ascend_host import kernel_package

    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", str(built))
    monkeypatch.setenv("CUSTOM_PYPTO_EAGER", "aclnn")
    nothing = dict(tensors=0, executors=0, plans=0)
    assert kernel_package.live() == nothing
    yield kernel_package
    assert kernel_package.live() == nothing  # after every test, whatever failed in it


@pytest.fixture
def pypto(monkeypatch):
    """Calls through PyPTO fail the test."""

    def launch(*_):
        raise AssertionError("PyPTO was called")

    for op in OPS:
        monkeypatch.setattr(npu._module(op), "kernel_call", launch)
