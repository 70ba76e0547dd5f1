"""The command ``custom-pypto``, with a report where the package does not load."""

import atexit
import importlib.util
import multiprocessing
import os
import signal
import sys
import types
from pathlib import Path


def end_as_commands_do() -> None:
    """From here on Ctrl-C ends this program with one line, and a reader that closes its pipe ends
    it silently; to a shell it ends by the signal, 130 or 141, as other commands do."""
    sys.excepthook = uncaught
    atexit.register(flush)


def uncaught(kind: type[BaseException], error: BaseException, trace) -> None:
    """In place of Python's own hook, which prints a traceback."""
    if issubclass(kind, BrokenPipeError):
        end_by_closed_pipe()
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    # a terminal interrupts the processes of a program, too: the first one speaks
    elif multiprocessing.current_process().name == "MainProcess":
        before = "\n" if sys.__stderr__.isatty() else ""  # behind ^C
        # torch.distributed has another stderr here
        print(f"{before}{Path(sys.argv[0]).name}: interrupted", file=sys.__stderr__, flush=True)


def flush() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        end_by_closed_pipe()


def end_by_closed_pipe() -> None:
    # only now: a connection that breaks would end a program that works
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGPIPE)


def main() -> int:
    end_as_commands_do()
    error = None
    try:
        import custom_pypto  # noqa: F401
    except ImportError as failure:
        package = importlib.util.find_spec("custom_pypto")
        if package is None or failure.__cause__ is None:  # else it names what is missing
            raise
        error = failure.__cause__
        # the report needs neither torch nor the library: a package without what __init__ imports
        sys.modules["custom_pypto"] = bare = types.ModuleType("custom_pypto")
        bare.__path__ = package.submodule_search_locations
    from custom_pypto.__main__ import main

    return main(load_error=error)


if __name__ == "__main__":
    sys.exit(main())
