"""How the host simulator of CANN starts: its command, its rejections, the libraries it compiles."""

import importlib.metadata
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from custom_pypto.requirements import minor

pytestmark = pytest.mark.ascend_host

SIMULATOR = [sys.executable, "-m", "custom_pypto.simulation.ascend_host"]
UNAVAILABLE = 3  # its exit code where it cannot run, with the reason in one line


def simulator(*arguments: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*SIMULATOR, *arguments], env=os.environ | env, capture_output=True, text=True
    )


def libraries(cache: Path) -> list[str]:
    return sorted(p.name for p in cache.glob("custom_pypto/ascend_host-*") if p.suffix != ".lock")


def test_a_program_runs_as_it_would_alone(tmp_path):
    program = tmp_path / "program.py"
    (tmp_path / "beside.py").write_text("VALUE = 3\n")
    program.write_text(
        "import sys, torch, beside\n"
        "if __name__ == '__main__':\n"
        "    print(sys.argv, torch.full((2,), beside.VALUE, device='npu').tolist())\n"
        "    sys.exit(5)\n"
    )
    done = simulator(str(program), "--flag", "x")
    assert done.returncode == 5, done.stderr
    assert done.stdout == f"{[str(program), '--flag', 'x']} [3, 3]\n"
    assert "npu is a host simulator of CANN" in done.stderr


@pytest.mark.slow
def test_a_module_runs_as_it_would_alone():
    module = simulator("-m", "json.tool", "--help")
    assert module.returncode == 0 and "usage" in module.stdout, module.stderr


def test_nothing_starts_by_itself():
    done = subprocess.run(
        [sys.executable, "-c", "import custom_pypto.simulation.ascend_host as a, sys;"
         "print(a.is_running(), 'torch_npu' in sys.modules)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["False", "False"]


def test_beside_a_real_cann_it_rejects(tmp_path):
    library = ["g++", "-shared", "-x", "c", "/dev/null", "-o", tmp_path / "libascendcl.so"]
    subprocess.run(library, check=True)
    done = simulator(LD_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == UNAVAILABLE
    (line,) = done.stderr.splitlines()
    assert "must not run beside a real CANN" in line and "use the NPU" in line


@pytest.mark.slow
def test_beside_a_cann_that_is_only_installed_it_rejects(tmp_path):
    start = (
        f"import os; from custom_pypto.simulation import ascend_host; "
        f"os.environ['ASCEND_HOME_PATH'] = '{tmp_path}'; ascend_host.start()"
    )
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True)
    assert f"it is in {tmp_path}; use the NPU" in done.stderr.splitlines()[-1]
    # PyPTO, too, takes the variable for a CANN that can be loaded
    done = simulator(ASCEND_HOME_PATH=str(tmp_path))
    assert done.returncode == 1
    assert "PyPTO does not load" in done.stderr and "ASCEND_HOME_PATH" in done.stderr


@pytest.mark.slow
def test_a_missing_compiler_is_named():
    done = simulator(CXX="no-such-compiler")
    assert done.returncode == UNAVAILABLE
    (line,) = done.stderr.splitlines()
    assert "no g++, or $CXX" in line and "install" in line


def test_a_compiler_that_fails_is_a_failure_and_no_reason_to_skip(tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *cann.cpp*) echo "cann.cpp:1: error: no" >&2; exit 1;; esac\n'
        'exec g++ "$@"\n'
    )
    compiler.chmod(0o755)
    done = simulator(CXX=str(compiler), XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 1 and "cann.cpp:1: error: no" in done.stderr
    assert libraries(tmp_path) == []


def test_what_torchair_needs_is_named(tmp_path):
    folder = Path(importlib.util.find_spec("torch_npu").origin).parents[1]
    installed = importlib.metadata.distributions(name="protobuf")
    if {Path(found.locate_file("")) for found in installed} != {folder}:
        pytest.skip("protobuf is not beside torch_npu alone")
    for entry in folder.glob("torch*"):
        (tmp_path / entry.name).symlink_to(entry)
    done = simulator(PYTHONPATH=str(tmp_path))
    assert done.returncode == UNAVAILABLE
    (line,) = done.stderr.splitlines()
    found = importlib.metadata.version("torch_npu")
    assert f"found torch_npu {found}, no protobuf" in line and "pip install" in line


@pytest.mark.slow
def test_another_torch_npu_is_rejected_with_the_remedy(tmp_path):
    found = tmp_path / "torch_npu-2.9.0.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.9.0\n")
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    done = simulator(PYTHONPATH=path)
    assert done.returncode == UNAVAILABLE
    (line,) = done.stderr.splitlines()
    torch = importlib.metadata.version("torch")
    assert f"needs torch_npu {minor(torch)} for torch {torch}, " in line
    assert "found torch_npu 2.9.0" in line
    assert line.index("`bash run.sh graph`") < line.index("pip install")


def starting(cache: Path) -> subprocess.Popen:
    env = os.environ | {"XDG_CACHE_HOME": str(cache)}
    return subprocess.Popen(SIMULATOR, env=env, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_an_interrupted_build_leaves_nothing_half_made_and_two_at_once_compile_once(tmp_path):
    for how in (signal.SIGINT, signal.SIGKILL):
        process = starting(tmp_path)
        for line in process.stderr:
            if "compiling the host simulator" in line:
                break
        while not libraries(tmp_path):  # until it has begun to write
            assert process.poll() is None
        process.send_signal(how)
        process.communicate()
        assert process.returncode != 0
        left = libraries(tmp_path)
        assert left == [] if how is signal.SIGINT else all(".part-" in name for name in left)
    both = [starting(tmp_path) for _ in "12"]
    said = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sum(text.count("compiling the host simulator") for text in said) == 1
    (folder,) = libraries(tmp_path)
    assert ".part-" not in folder
