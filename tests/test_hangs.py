"""A test that hangs ends its process, and the run goes on: a run needs no limit of its own."""

import subprocess
import sys

HANGING = """
import time

def test_hangs():
    time.sleep(600)

def test_works():
    pass
"""


def test_a_test_that_hangs_does_not_stop_the_run(pytestconfig, tmp_path):
    assert 0 < float(pytestconfig.getini("faulthandler_timeout")) <= 600
    assert pytestconfig.getini("faulthandler_exit_on_timeout")
    (tmp_path / "test_two.py").write_text(HANGING)
    limits = ["-o", "faulthandler_timeout=3", "-o", "faulthandler_exit_on_timeout=true"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", "/dev/null", "-n", "1", *limits, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout
    assert "crashed while running 'test_two.py::test_hangs'" in done.stdout
