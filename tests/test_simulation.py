"""The interpreter and the cost model themselves, on kernels of a few lines."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch
from cases.npu_kernels import affine_kernel
from with_pypto import pypto, simulation

pytestmark = pytest.mark.sim


def arguments(rows=16, width=512):
    torch.manual_seed(0)
    return torch.randn(rows, width), torch.zeros(rows, width)


def test_interpret_returns_every_argument_and_changes_none():
    x, out = arguments()
    before = x.clone()
    new_x, new_out = simulation.interpret(affine_kernel(), x, out)
    torch.testing.assert_close(new_out, 3 * before + 1)
    torch.testing.assert_close(new_x, 2 * new_out)
    assert torch.equal(x, before) and not out.any()


def test_interpret_passes_parameters_and_dynamic_sizes():
    kernel = affine_kernel()
    for rows, factor in ((8, 0.5), (40, -2.0)):
        x, out = arguments(rows)
        _, got = simulation.interpret(kernel, x, out, factor=factor)
        torch.testing.assert_close(got, factor * x + 1)


def test_interpret_works_beside_a_torch_that_has_started_its_threads():
    torch.randn(512, 512) @ torch.randn(512, 512)
    x, out = arguments()
    assert torch.equal(simulation.interpret(affine_kernel(), x, out, timeout=60)[1], 3 * x + 1)


def test_estimate_prices_the_task_graph_and_is_repeatable(tmp_path):
    kernel = affine_kernel()
    first = simulation.estimate(kernel, *arguments(), trace=tmp_path / "trace.json")
    assert first == simulation.estimate(kernel, *arguments())
    assert first.tasks == len(first.timeline) > 0
    assert first.latency_us == max(task.end for task in first.timeline) > 0
    busy = sum(task.end - task.start for task in first.timeline)
    assert first.utilisation == pytest.approx(busy / (72 * first.latency_us))
    assert first.timeline[0].name.startswith("ROWS: COPY_IN")
    more = simulation.estimate(kernel, *arguments(rows=800))
    assert more.tasks == 50 * first.tasks and more.latency_us > first.latency_us

    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert [e["ts"] for e in spans] == [task.start for task in first.timeline]
    assert all(e.keys() >= {"name", "ts", "dur", "pid", "tid"} for e in spans)


def test_a_pass_that_is_verified_is_counted():
    counts = simulation.verify_passes(affine_kernel(), *arguments())
    agree, differ = counts["CodegenPreproc"]
    assert agree > 0 and differ == 0


def test_a_tile_that_does_not_fit_is_named_with_the_sizes():
    def body(x, out, factor):
        for _ in pypto.loop(1, name="ROWS", idx_name="i"):
            pypto.set_vec_tile_shapes(8, 16384)
            pypto.assemble(pypto.mul(pypto.view(x, [8, 16384], [0, 0]), factor), [0, 0], out)

    with pytest.raises(simulation.SimulationError) as error:
        simulation.estimate(affine_kernel(body), *arguments(width=16384))
    assert "affine" in str(error.value)
    assert "size [524288] exceeds MEM_UB size [196608]" in str(error.value)


def test_an_error_in_a_program_names_its_line():
    def body(x, out, factor):
        pypto.no_such_operation(x)

    with pytest.raises(simulation.SimulationError, match="no_such_operation") as error:
        simulation.interpret(affine_kernel(body), *arguments())
    assert f"{__file__}:{body.__code__.co_firstlineno + 1}" in str(error.value)


def test_a_compilation_that_hangs_is_stopped():
    def body(x, out, factor):
        time.sleep(100)

    start = time.monotonic()
    with pytest.raises(simulation.SimulationError, match="affine: PyPTO did not finish within 2 s"):
        simulation.estimate(affine_kernel(body), *arguments(), timeout=2)
    assert time.monotonic() - start < 30


def test_a_compilation_that_ends_the_process_is_survived():
    def body(x, out, factor):
        os._exit(3)

    with pytest.raises(simulation.SimulationError, match=r"ended the process \(exit code 3\)"):
        simulation.interpret(affine_kernel(body), *arguments())
    x, out = arguments()
    assert torch.equal(simulation.interpret(affine_kernel(), x, out)[1], 3 * x + 1)


@pytest.mark.parametrize(
    "change, message",
    [
        pytest.param(lambda x: x.t(), "argument 0 must be a contiguous tensor", id="strided"),
        pytest.param(
            lambda x: 1.0, "argument 0 must be a contiguous tensor, got float", id="float"
        ),
        pytest.param(lambda x: x.to("meta"), "argument 0 must be on the CPU, got meta", id="meta"),
    ],
)
def test_arguments_that_cannot_be_simulated_are_rejected(change, message):
    x, out = arguments()
    with pytest.raises(simulation.SimulationError, match=message):
        simulation.interpret(affine_kernel(), change(x), out)


def test_a_function_that_is_no_kernel_is_rejected():
    with pytest.raises(TypeError, match="must be what pypto.frontend.jit returns, got function"):
        simulation.estimate(arguments, *arguments())


def test_nothing_is_left_in_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    simulation.interpret(affine_kernel(), *arguments())
    simulation.estimate(affine_kernel(), *arguments())
    assert list(tmp_path.iterdir()) == []


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("module", ["simulation", "kernels"])
def test_importing_leaves_logging_alone(module):
    done = run_python(
        "import logging; root = logging.getLogger(); before = root.level, root.handlers[:]\n"
        f"import custom_pypto.{module}; assert (root.level, root.handlers) == before"
    )
    assert done.returncode == 0, done.stderr


def test_an_older_pypto_is_rejected_with_the_remedy(tmp_path):
    (tmp_path / "pypto-0.1.3.dist-info").mkdir()
    (tmp_path / "pypto-0.1.3.dist-info/METADATA").write_text("Name: pypto\nVersion: 0.1.3\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = run_python("import custom_pypto.simulation", PYTHONPATH=path)
    assert done.returncode == 1
    assert "needs pypto 0.2.0 or 0.2.1, found 0.1.3 in " in done.stderr
    assert "pip install 'pypto>=0.2.0'" in done.stderr


@pytest.mark.slow
def test_two_processes_that_need_the_calculator_build_it_once(tmp_path):
    code = "from custom_pypto.simulation import calculator; calculator.load()"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    processes = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert len(list(tmp_path.rglob("libtile_fwk_calculator-*.so"))) == 1


def test_a_calculator_that_cannot_be_built_says_why(tmp_path):
    code = "from custom_pypto.simulation import calculator; calculator.load()"
    done = run_python(code, XDG_CACHE_HOME=str(tmp_path), CXX="/bin/false")
    assert done.returncode == 1 and "g++ 9.4 or later" in done.stderr
    assert not list(tmp_path.rglob("*.so"))


def test_on_cpu_runs_the_npu_programs_inside_and_only_there():
    x = torch.ones(3, dtype=torch.float64)  # a dtype that the CPU kernel takes and an NPU does not
    add = torch.ops.custom_pypto.add_custom
    for _ in range(2):
        assert torch.equal(add(x, x), 2 * x)
        with simulation.on_cpu():
            with pytest.raises(RuntimeError, match="on an NPU, got float64"):
                add(x, x)
            assert torch.equal(add(x.float(), x.float()), 2 * x.float())
    assert torch.equal(add(x, x), 2 * x)


def test_on_cpu_ends_with_an_error_inside():
    with pytest.raises(ZeroDivisionError), simulation.on_cpu():
        raise ZeroDivisionError
    x = torch.ones(3, dtype=torch.float64)
    assert torch.equal(torch.ops.custom_pypto.add_custom(x, x), 2 * x)
