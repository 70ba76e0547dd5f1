"""Runs PyPTO's host compiler on a kernel, in a child process that may hang or die.

The compiler ends the process on some tilings, never returns on others, and keeps its state after a
failure. Each run is therefore a forked child with a time limit and a folder of its own, and PyPTO's
output is turned into one error.
"""

import contextlib
import ctypes
import functools
import gc
import hashlib
import importlib.util
import inspect
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock

from ..files import replacing
from ..requirements import pypto_problem, warn_of_untested_pypto

TIMEOUT = 600.0  # seconds; the slowest kernel of the package takes about one minute


class SimulationError(RuntimeError):
    """A kernel that PyPTO cannot compile, interpret or price; the message says what and where."""


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/custom_pypto`` or ``~/.cache/custom_pypto``, made if missing."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "custom_pypto"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SimulationError(
            f"custom_pypto.simulation: cannot keep what PyPTO compiles in {folder} ({error}); "
            "set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return folder


def built_once(what: str, name: str, build: Callable[[Path], None]) -> Path:
    """The result of ``build(path)``, cached as ``name`` in the cache folder."""
    path = cache_folder() / name
    if path.exists():
        return path
    # a dying process releases the lock; waiting processes find the path and do not build
    with filelock.FileLock(f"{path}.lock"):
        if not path.exists():
            print(f"compiling {what}, once, into {path}", file=sys.stderr)
            # parts are left by processes that died while they held the lock
            for old in path.parent.glob(f"{name}.part-*"):
                shutil.rmtree(old, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f"{name}.part-", dir=path.parent) as part:
                made = Path(part) / name
                build(made)
                made.rename(path)
    return path


def _configure() -> None:
    """Sets the options that PyPTO reads once, at import."""
    # without these two a failing pass reports only "Run pass failed"
    os.environ.setdefault("ASCEND_SLOG_PRINT_TO_STDOUT", "1")
    os.environ.setdefault("ASCEND_GLOBAL_LOG_LEVEL", "3")
    if "TILEFWK_CONFIG_PATH" in os.environ:
        return
    package = Path(importlib.util.find_spec("pypto").origin).parent
    config = json.loads((package / "lib/configs/tile_fwk_config.json").read_text())
    # pictures of every task graph, 3 s per compilation
    config["global"]["simulation"]["draw_function_graph"] = False
    config["global"]["simulation"]["args"].append("Model.drawPngThresholdCycle=1")
    # several threads number the names in the generated code differently on every run
    config["global"]["codegen"]["parallel_compile"] = 1
    text = json.dumps(config)
    path = cache_folder() / f"pypto-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
    if not path.exists():
        with replacing(path) as part:
            part.write_text(text)
    os.environ["TILEFWK_CONFIG_PATH"] = str(path)


# this folder uses internals of PyPTO
if _problem := pypto_problem():
    raise ImportError(f"custom_pypto.simulation: {_problem}")
warn_of_untested_pypto()
if "pypto" not in sys.modules:
    _configure()

try:
    from .. import kernels  # noqa: F401  # imports pypto and leaves logging as it was
except OSError as _error:
    raise ImportError(
        f"custom_pypto.simulation: PyPTO does not load ({_error}); it takes "
        "ASCEND_HOME_PATH for a CANN whose libraries can be loaded: source CANN's set_env.sh, or "
        "unset the variable where there is no CANN"
    ) from _error

# isort: split
import pypto  # noqa: E402
import torch  # noqa: E402
from pypto.frontend.parser.entry import JitCallableWrapper  # noqa: E402

from . import loaded_calls, pypto_versions  # noqa: E402

PACKAGE = str(Path(pypto.__file__).parent)
FORK = multiprocessing.get_context("fork")


def simulated(kernel, runtime: dict | None = None, **options) -> JitCallableWrapper:
    """A copy of the kernel with the same options, which runs in the simulator on any machine.

    ``runtime``: further runtime options.
    """
    if not isinstance(kernel, JitCallableWrapper):
        raise TypeError(
            "custom_pypto.simulation: kernel must be what pypto.frontend.jit returns, "
            f"got {type(kernel).__name__}"
        )
    runtime = {**(kernel._runtime_options or {}), **(runtime or {}), "run_mode": pypto.RunMode.SIM}
    copy = JitCallableWrapper(
        None,
        kernel._original_func,
        None,
        codegen_options=kernel._codegen_options,
        pass_options=kernel._pass_options,
        runtime_options=runtime,
        captured_locals=kernel._captured_locals,
        **pypto_versions.wrapper_options(kernel),
        **options,
    )
    return pypto_versions.complete(copy, kernel)


@contextlib.contextmanager
def compiled(
    kernel: JitCallableWrapper,
    tensors: tuple,
    params: dict,
    *,
    prepare: Callable[[], None] = lambda: None,
    timeout: float | None,
) -> Iterator[Path]:
    """Calls the kernel in a child process; yields PyPTO's output folder.

    Args:
        prepare: called in the child before the kernel.
        timeout: seconds, ``TIMEOUT`` if ``None``.
    """
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor) or not tensor.is_contiguous():
            got = type(tensor).__name__
            if isinstance(tensor, torch.Tensor):
                got = f"strides {tensor.stride()} of shape {tuple(tensor.shape)}"
            raise SimulationError(
                f"{kernel.__name__}: argument {i} must be a contiguous tensor, got {got}"
            )
        if tensor.device.type != "cpu":
            raise SimulationError(
                f"{kernel.__name__}: argument {i} must be on the CPU, got {tensor.device}"
            )
    with tempfile.TemporaryDirectory(prefix="pypto-") as folder:
        run = Path(folder).resolve()
        _run_in_child(kernel, tensors, params, prepare, timeout or TIMEOUT, run)
        if (output := written(run)) is None:
            raise SimulationError(
                f"{kernel.__name__}: PyPTO wrote no results{_reported(run / 'log.txt')}"
            )
        yield output


def written(run: Path) -> Path | None:
    """The folder into which PyPTO writes. ``new_ir`` of CANN 9.2 makes an empty one, too."""
    found = [folder for folder in run.glob("output_*") if any(folder.iterdir())]
    return found[0] if len(found) == 1 else None


def _run_in_child(kernel, tensors, params, prepare, timeout, run: Path) -> None:
    receive, send = FORK.Pipe(duplex=False)
    child = FORK.Process(
        target=_child, args=(kernel, tensors, params, prepare, run, send), daemon=True
    )
    with warnings.catch_warnings():
        # Python 3.12 warns of forks of processes with threads; the child runs on one thread
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    send.close()
    try:
        child.join(timeout)
        if child.is_alive():
            raise SimulationError(
                f"{kernel.__name__}: PyPTO did not finish within {timeout:g} s; other tiles may "
                f"compile, or pass a larger timeout{_reported(run / 'log.txt')}"
            )
        try:
            failure = receive.recv()
        except EOFError:
            failure = f"PyPTO ended the process (exit code {child.exitcode})"
        if failure:
            raise SimulationError(f"{kernel.__name__}: {failure}{_reported(run / 'log.txt')}")
    finally:
        child.kill()
        child.join()
        child.close()
        receive.close()


def _child(kernel, tensors, params, prepare, run: Path, send) -> None:
    gc.disable()  # it writes to every object, whose memory would be copied
    # PyPTO asks for its caller's line with the source lines of the whole stack around it
    inspect.stack = functools.partial(inspect.stack, context=0)
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    log = os.open(run / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(run)
    os.environ["TILE_FWK_OUTPUT_DIR"] = str(run)
    failure = None
    try:
        _stop_the_clock()
        prepare()
        kernel(*tensors, **params)
    except BaseException as error:
        failure = _described(error)
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)  # the C++ streams
    send.send(failure)
    send.close()
    # skips destructors of C++ threads that the fork does not have
    os._exit(0)


def _stop_the_clock() -> None:
    """Makes PyPTO's clock stand still.

    Since CANN 9.1 the threads of the simulated device wait for each other for 50 ms only, and on a
    busy machine end the process. Where PyPTO reads a counter of the CPU instead, on aarch64, its
    limits remain.
    """
    # clock_getres has the signature of clock_gettime, and one result
    one_time = loaded_calls.address(ctypes.CDLL(None).clock_getres)
    loaded_calls.replace_in(PACKAGE, "clock_gettime", one_time)


def _described(error: BaseException) -> str:
    """The message of the first error of the chain, and the kernel's line that raised it."""
    frames = []
    while error is not None:
        frames += [
            f for f in traceback.extract_tb(error.__traceback__) if PACKAGE not in f.filename
        ]
        cause, error = error, error.__context__
    if isinstance(cause, SimulationError):
        return str(cause)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", str(cause)).splitlines()
    said = [
        line.strip()
        for line in lines
        if not re.match(r"\s*(\S*lib\S+\(|\S+\.so\S*\(|Errcode|$)", line)
    ]
    place = [f for f in frames if f.filename != __file__]
    where = f" ({place[-1].filename}:{place[-1].lineno})" if place else ""
    return f"{type(cause).__name__}: {' '.join(said[:4])[:600]}{where}"


def _reported(log: Path) -> str:
    """The errors that PyPTO logged, the first of which is the cause."""
    text = log.read_text(errors="replace") if log.exists() else ""
    errors = []
    for line in text.splitlines():
        found = re.search(r"\[ERROR\] (?:PYPTO\(\d+\):\S+ \S+ )?(?:\[[^\]]*\]){0,3}:?(.*)", line)
        if found and found[1].strip() and found[1].strip() not in errors:
            errors.append(found[1].strip()[:300])
    if not errors:
        return ""
    failed = re.findall(r"Run pass <(\w+)> failed", text)
    where = f" (compiler pass {failed[0]})" if failed else ""
    return f"\nPyPTO reports{where}:\n  " + "\n  ".join(errors[:4])
