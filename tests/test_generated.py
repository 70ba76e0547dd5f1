"""PyPTO's generated code, executed on the host: what it finds, and the ops on it."""

import concurrent.futures
import functools
import threading
from pathlib import Path

import pytest
import torch
from cases import INT_MAX
from cases.npu_checks import (
    needs_gcc,
)
from cases.npu_kernels import ROWS, WIDTH, affine_kernel, assert_product, product_kernel
from cases.npu_programs import (
    HALF,
    attention_case,
)
from with_pypto import pypto, simulation

import custom_pypto
from custom_pypto.kernels import npu_sparse_flash_attention_pto as attention
from custom_pypto.kernels.pypto_versions import jit
from custom_pypto.simulation import bodies, control_flow
from custom_pypto.simulation import generated as code

pytestmark = [pytest.mark.sim, needs_gcc]


@pytest.mark.parametrize("fill", [code.NAN, code.LARGE], ids=["nan", "large"])
def test_execute_returns_every_argument_and_changes_none(fill):
    x, out = torch.randn(19, 64), torch.zeros(19, 64)
    before = x.clone()
    new_x, new_out = simulation.execute(affine_kernel(), x, out, fill=fill)
    torch.testing.assert_close(new_out, 3 * before + 1)
    torch.testing.assert_close(new_x, 2 * new_out)
    assert torch.equal(x, before) and not out.any()


def test_generated_code_is_the_same_in_every_run_and_compiled_once(monkeypatch, tmp_path):
    x, out = torch.randn(8, 64), torch.zeros(8, 64)
    simulation.execute(affine_kernel(), x, out)
    monkeypatch.setattr(bodies, "_compile", lambda what, *arguments: pytest.fail(what))
    (tmp_path / "headers.h").touch()
    monkeypatch.setattr(control_flow, "folder", lambda: tmp_path)
    simulation.execute(affine_kernel(), x, out)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert torch.equal(simulation.execute(affine_kernel(), x, out)[1], 3 * x + 1)
    assert len(kept) > 1 and kept == {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()}


def test_threads_that_compile_the_same_body_do_not_meet(monkeypatch, tmp_path):
    body = bodies.Body(1, "one", "one", tmp_path / "one.so")
    both = threading.Barrier(2)

    def compiled(what, *flags):
        both.wait()
        text = Path(flags[-1]).read_text()
        Path(flags[flags.index("-o") + 1]).write_text(text)
        both.wait()

    monkeypatch.setattr(bodies, "toolchain", lambda: tmp_path)
    monkeypatch.setattr(bodies, "_compile", compiled)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(bodies._compile_bodies, "aiv", {body: "code"}) for _ in range(2)]
    for job in jobs:
        job.result()
    assert body.library.read_text().endswith("code") and list(tmp_path.iterdir()) == [body.library]


def test_a_product_is_computed_on_the_layouts_of_the_cube_unit():
    a, b = torch.randn(48, 128).bfloat16(), torch.randn(128, 192).bfloat16()
    assert_product(simulation.execute(product_kernel(), a, b, torch.zeros(48, 192))[2], a, b)


# ---- mistakes in a program or in generated code; PyPTO's own are in test_pypto_faults.py ---------


def test_a_missing_clamp_is_found(monkeypatch):
    """The interpreter rejects this address as well."""

    def unchecked(block_table, sequence, last_block, width):
        row = pypto.view(block_table, [1, width], [sequence, 0], valid_shape=[1, width])
        pypto.set_vec_tile_shapes(1, width)
        return pypto.clone(row)

    x = attention_case([1], [64 * 128], sparse_count=64, block_size=128)
    x["block_table"][0, :] = INT_MAX
    with simulation.on_cpu(generated=True):
        custom_pypto.npu_sparse_flash_attention_pto(**x)
        monkeypatch.setattr(attention, "checked_table", unchecked)
        monkeypatch.setattr(attention, "kernel", functools.cache(attention.kernel.__wrapped__))
        with pytest.raises(RuntimeError, match=r"TLOAD: reads \d+ bytes at byte \d+ of"):
            custom_pypto.npu_sparse_flash_attention_pto(**x)


@pytest.mark.parametrize(
    "dropped, message",
    [
        pytest.param("wait_flag", "is set and never waited for", id="wait"),
        pytest.param("set_flag", "is waited for before it is set", id="set"),
    ],
)
def test_a_dropped_fence_is_found(dropped, message, monkeypatch):
    for_host = bodies._for_host

    def changed(text):
        lines = for_host(text).splitlines()
        lines.remove(next(line for line in lines if line.startswith(f"{dropped}(PIPE_MTE2")))
        return "\n".join(lines)

    monkeypatch.setattr(bodies, "_for_host", changed)
    with pytest.raises(simulation.SimulationError, match=message):
        simulation.execute(affine_kernel(), torch.randn(8, 64), torch.zeros(8, 64))


def test_an_instruction_that_is_not_modelled_is_named():
    @jit
    def remainders(
        x: pypto.Tensor([ROWS, WIDTH], pypto.DT_FP32),
        out: pypto.Tensor([ROWS, WIDTH], pypto.DT_FP32),
    ):
        for _ in pypto.loop(1, name="ONCE", idx_name="i"):
            pypto.set_vec_tile_shapes(8, 64)
            pypto.assemble(pypto.fmod(pypto.view(x, [8, 64], [0, 0]), 2.0), [0, 0], out)

    message = "code of ONCE path 0 aiv 0 does not compile for the host: .*TFMODS is not modelled"
    with pytest.raises(simulation.SimulationError, match=message):
        simulation.execute(remainders, torch.randn(8, 64), torch.zeros(8, 64))


# ---- the ops -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1,), (7, 3), (33, 1000)], ids=str)
def test_add_is_exact(shape, dtype, generated):
    x, y = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    assert torch.equal(custom_pypto.add_custom(x, y), x + y)
