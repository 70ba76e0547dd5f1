"""Runs a command as a child process with a time limit; nothing that it started survives it."""

import ctypes
import os
import resource
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

OK, FAILED, SKIPPED, INTERRUPTED = "ok", "FAILED", "skipped", "interrupted"
STOPPED = "stopped after"
NOT_HERE = 77  # exit code of a program whose last line says why it has nothing to do here
PR_SET_CHILD_SUBREAPER = 36
LAST_WORDS = 2.0  # seconds of a process to print a traceback in
REAPED = 10.0  # seconds; a process that waits for a driver cannot be killed


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    ``how``: ``exit code 1``, ``stopped after 300 s``, ``died of SIGSEGV``, ``interrupted``.
    """

    status: str
    how: str
    seconds: float

    @property
    def stopped(self) -> bool:
        """Whether the child reached its time limit."""
        return self.how.startswith(STOPPED)


def prepare() -> None:
    """Makes this process the parent of everything that its children leave behind."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # a stopped child is to print its traceback, not to write its memory
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def run(
    command: list[str], log: Path, seconds: float, folder: Path, variables: dict[str, str]
) -> Ended:
    """Runs ``command`` in ``folder``, in a session of its own, with its output in ``log``.

    Args:
        seconds: the time limit. A child that exceeds it, or is interrupted, is killed with all its
            descendants. A Python program prints its tracebacks before.
        variables: of its environment, besides those of this process.
    """
    environment = os.environ | {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"} | variables
    begin = time.monotonic()
    with open(log, "wb") as output:
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            output.write(f"{error}\n".encode())
            return Ended(FAILED, "did not start", time.monotonic() - begin)
        stopped = ""
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            stopped = f"{STOPPED} {seconds:.0f} s"
        except KeyboardInterrupt:
            stopped = INTERRUPTED
        spent = time.monotonic() - begin
        if stopped:
            for process in _descendants():  # one by one, or their tracebacks would mix
                _end([process], signal.SIGABRT, LAST_WORDS)
        left = _end(_descendants(), signal.SIGKILL, REAPED)
    if stopped:
        status = INTERRUPTED if stopped == INTERRUPTED else FAILED
        return Ended(status, stopped + (", cannot be killed" if left else ""), spent)
    return Ended(*_meaning(child.wait()), spent)


def _meaning(code: int) -> tuple[str, str]:
    if code < 0:
        return FAILED, f"died of {signal.Signals(-code).name}"
    return {0: OK, NOT_HERE: SKIPPED}.get(code, FAILED), f"exit code {code}"


def _descendants() -> list:
    import psutil  # not above: arguments are checked before anything is installed

    return psutil.Process().children(recursive=True)


def _end(processes: list, how: signal.Signals, seconds: float) -> bool:
    """Signals the processes; whether one is left after so many seconds."""
    import psutil

    for process in processes:
        try:
            process.send_signal(how)
        except psutil.NoSuchProcess:
            continue
    return bool(psutil.wait_procs(processes, seconds)[1])
