"""The compiler ``new_ir`` of CANN 9.2 takes the smallest program (docs/pypto_versions.md)."""

import inspect

import pytest
import torch
from cases.npu_checks import needs_gcc
from with_pypto import pypto, simulation

from custom_pypto.kernels import add_custom

pytestmark = [pytest.mark.sim, needs_gcc]
PROGRAMS = [add_custom]


@pytest.fixture(autouse=True)
def with_new_ir(monkeypatch, fresh_kernels):
    if "new_ir" not in inspect.signature(pypto.frontend.jit).parameters:
        pytest.skip("this PyPTO has no new_ir")
    monkeypatch.setattr(add_custom, "jit", pypto.frontend.jit)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("n", [1, 8192, 20000])
@pytest.mark.parametrize("run", ["interpret", "execute"])
def test_add_custom_is_compiled_by_new_ir(dtype, n, run):
    kernel = add_custom.kernel(add_custom.Facts(dtype=str(dtype).removeprefix("torch.")))
    assert kernel._use_new_ir
    x, y = torch.randn(n).to(dtype), torch.randn(n).to(dtype)
    got = getattr(simulation, run)(kernel, x, y, torch.zeros_like(x))[2]
    assert torch.equal(got, x + y)
