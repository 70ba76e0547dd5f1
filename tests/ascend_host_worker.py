"""Tests marked ``ascend_host`` run in one process of their own, on the host stand-in for CANN.

The stand-in changes torch for a whole process. Run as a program, this file is that process and runs
the tests it is sent, one by one; :class:`Worker` starts it and gets pytest's own reports back.
"""

import contextlib
import functools
import importlib.util
import io
import os
import subprocess
import sys
import tempfile
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# where run.sh puts torch_npu if the environment has none: only these tests find it there
TORCH_NPU = ROOT / "build/torch_npu"
STAND_IN = [sys.executable, "-m", "custom_pypto.simulation.ascend_host"]
UNAVAILABLE = 3  # its exit code where it cannot run, with the reason in one line
SECONDS = 300  # that one test may take
# of these two, the second collects garbage after each test, for most of a second
OPTIONS = ["-p", "no:cacheprovider", "-p", "no:unraisableexception"]


def environment() -> dict[str, str]:
    path = [os.environ.get("PYTHONPATH"), str(ROOT), str(TORCH_NPU)]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }


@functools.cache
def unavailable() -> str | None:
    """Builds the stand-in; the reason why it cannot run here, or None."""
    if importlib.util.find_spec("pypto") is None:
        return "the sim extra is not installed"
    done = subprocess.run(STAND_IN, env=environment(), capture_output=True, text=True)
    if done.returncode == UNAVAILABLE:
        return done.stderr.strip().splitlines()[-1]
    if done.returncode:
        raise RuntimeError(f"the stand-in for CANN does not start:\n{done.stderr}")
    return None


def require_stand_in() -> None:
    if reason := unavailable():
        pytest.skip(reason)


class Worker:
    process: subprocess.Popen | None = None

    def run(self, nodeid: str, options: list[str]) -> list[dict]:
        """The reports of one test, as pytest serialises them.

        Raises:
            RuntimeError: the test took the process down; the next one gets another.
        """
        if self.process is None:
            self._start()
        try:
            self.connection.send([nodeid, *options])
            if not self.connection.poll(SECONDS):
                raise TimeoutError
            status, reports, said = self.connection.recv()
            if status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
                return reports
            problem = f"ended the run ({pytest.ExitCode(status).name}):\n{said}"
        except TimeoutError:
            problem = f"did not finish within {SECONDS} s"
        except (EOFError, OSError):
            problem = f"ended the process with exit code {self.process.wait()}"
        self.stop()
        self.errors.seek(0)
        raise RuntimeError(
            f"{nodeid}, on the stand-in for CANN, {problem}\n{self.errors.read()[-4000:]}"
        )

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.connection.close()
            self.process = None

    def _start(self) -> None:
        require_stand_in()
        self.connection, theirs = Pipe()
        # of a test, pytest captures what it prints; this is for what takes pytest down
        self.errors = tempfile.TemporaryFile("w+", errors="replace")
        self.process = subprocess.Popen(
            [*STAND_IN, __file__, str(theirs.fileno())],
            env=environment(),
            cwd=ROOT,
            pass_fds=[theirs.fileno()],
            stderr=self.errors,
        )
        theirs.close()


class Reports:
    """A plugin that keeps what pytest reports."""

    def __init__(self):
        self.reports = []

    def pytest_configure(self, config):
        self.config = config

    def pytest_runtest_logreport(self, report):
        hook = self.config.hook
        self.reports.append(hook.pytest_report_to_serializable(config=self.config, report=report))


def main(connection: Connection) -> None:
    with contextlib.suppress(EOFError):  # the tests are over
        while True:
            arguments = connection.recv()
            plugin, said = Reports(), io.StringIO()
            with contextlib.redirect_stdout(said):
                status = pytest.main([*OPTIONS, *arguments], plugins=[plugin])
            connection.send((int(status), plugin.reports, said.getvalue()))


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
