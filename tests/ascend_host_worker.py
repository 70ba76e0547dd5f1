"""Tests marked ``ascend_host`` run in one process of their own, on the host stand-in for CANN.

The stand-in changes torch for a whole process. Run as a program, this file is that process and runs
the tests it is sent, one by one; :class:`Worker` starts it and gets pytest's own reports back.
"""

import contextlib
import importlib.util
import io
import os
import subprocess
import sys
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


def require_stand_in() -> None:
    """Builds the stand-in; skips with the reason where it cannot run."""
    if importlib.util.find_spec("pypto") is None:
        pytest.skip("the sim extra is not installed")
    done = subprocess.run(STAND_IN, env=environment(), capture_output=True, text=True)
    if done.returncode == UNAVAILABLE:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    if done.returncode:
        raise RuntimeError(f"the stand-in for CANN does not start:\n{done.stderr}")


class Worker:
    process: subprocess.Popen | None = None

    def run(self, nodeid: str, options: list[str]) -> list[dict]:
        """The reports of one test, as pytest serialises them.

        Raises:
            RuntimeError: the process did not answer; the next test gets another one.
        """
        if self.process is None:
            self._start()
        self.connection.send([nodeid, *options])
        try:
            if self.connection.poll(SECONDS):
                return self.connection.recv()
            problem = f"did not finish within {SECONDS} s"
        except EOFError:
            problem = f"ended with exit code {self.process.wait()}"
        self.stop()
        raise RuntimeError(f"the process on the stand-in for CANN {problem}")

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.connection.close()
            self.process = None

    def _start(self) -> None:
        require_stand_in()
        self.connection, theirs = Pipe()
        self.process = subprocess.Popen(
            [*STAND_IN, __file__, str(theirs.fileno())],
            env=environment(),
            cwd=ROOT,
            pass_fds=[theirs.fileno()],
            stderr=subprocess.DEVNULL,  # of each test, pytest captures it
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
            if not plugin.reports:
                raise SystemExit(
                    f"pytest {arguments} reports nothing ({status}): {said.getvalue()}"
                )
            connection.send(plugin.reports)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
