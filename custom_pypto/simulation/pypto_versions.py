"""Differences between PyPTO's internals in the supported versions, for this folder only.

Each is detected in the installed PyPTO, not by its version number, which several releases share.
"""

import csv
import ctypes
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pypto
from pypto.frontend.parser import entry
from pypto.frontend.parser.entry import JitCallableWrapper

from ..requirements import pypto_copy
from .loaded_calls import loaded

try:  # CANN 9.2
    from pypto.pil import compile_pipeline as new_ir
except ImportError:
    new_ir = None

# who passes the interpreter its inputs: a method, or since CANN 9.2 a function that each compiler
# imports; without them the interpreter would compute with zeros
SET_INPUTS = [
    (owner, name)
    for owner, name in (
        (JitCallableWrapper, "_setup_verify_data"),
        (entry, "setup_verify_data"),
        (new_ir, "setup_verify_data"),
    )
    if hasattr(owner, name)
]
if not SET_INPUTS:
    raise ImportError(
        "custom_pypto.simulation: needs the internals of PyPTO 0.2.0 or of CANN 9.1 or 9.2, found "
        f"{pypto_copy()}; unset PYTHONPATH, or run the NPU kernels on an NPU"
    )

LIB = Path(pypto.__file__).parent / "lib"
# below LIB: the inputs of the interpreter's library, the sources first
CALCULATOR = (
    [Path("framework/src/calculator"), Path("framework")]
    if (LIB / "framework").exists()
    else [Path("calculator")]
)
# the libraries that may hold PyPTO's control flow, with and without CANN
CONTROL_FLOW = ("libtile_fwk_runtime_stub.so", "libtile_fwk_runtime.so")
# Since CANN 9.1 a simulated scheduler may wait for the others for ever: the next group of tasks can
# reset the awaited state before the scheduler runs again. One scheduler waits for none.
ONE_SCHEDULER = (
    {"launch_sched_aicpu_num": 1}
    if "launch_sched_aicpu_num" in (LIB / "configs/tile_fwk_config.json").read_text()
    else {}
)
# columns of the pass and of the verdict in tables of compared tensors
VERDICT_COLUMNS = ("passName", "verifyResult"), ("B>PHASE_NAME", "AB>RESULT")
FAILED = {"PASS": False, "FAIL": True, "FAILED": True}


def wrapper_options(kernel: JitCallableWrapper) -> dict:
    """Options of a copy of the kernel's wrapper that only some versions have."""
    mine = {
        "infer_controlflow_shape": getattr(kernel, "_infer_controlflow_shape", None),
        "use_cache": False,
        "new_ir": getattr(kernel, "_use_new_ir", False),
    }
    taken = inspect.signature(JitCallableWrapper).parameters
    return {name: value for name, value in mine.items() if name in taken}


def complete(copy: JitCallableWrapper, kernel: JitCallableWrapper) -> JitCallableWrapper:
    """The copy with what ``pypto.frontend.jit`` of some versions sets after the constructor."""
    if hasattr(kernel, "_create_new_logical_tensor"):
        copy._create_new_logical_tensor = kernel._create_new_logical_tensor
    return copy


def replace_inputs(function: Callable[[list], None]) -> None:
    """Makes PyPTO call ``function`` with its tensors, instead of passing zeros to its verifier."""

    def inputs(tensors, *sources, **named_sources):
        function(tensors)

    for owner, name in SET_INPUTS:
        setattr(owner, name, staticmethod(inputs) if inspect.isclass(owner) else inputs)


def calculator_is_loaded() -> None:
    """Keeps PyPTO from compiling the interpreter's library in this process."""
    try:
        from pypto._build_online import BuildOnlineCalculatorManager
    except ImportError:
        from pypto._utils import BuildOnlineManager

        BuildOnlineManager().calculator_loaded = True
    else:
        BuildOnlineCalculatorManager()._target_loaded = True


def verdicts(output: Path) -> Iterator[tuple[str, bool]]:
    """The pass of each tensor that PyPTO compared in a folder of its output, and whether it failed
    to agree.
    """
    for path in sorted(output.glob("verify*/verify*_result_brief.csv")):
        with open(path, newline="", errors="replace") as file:
            rows = csv.DictReader(file)
            columns = rows.fieldnames or ()
            name, verdict = next(pair for pair in VERDICT_COLUMNS if set(pair) <= set(columns))
            for row in rows:
                if (failed := FAILED.get(row[verdict].strip())) is not None:
                    yield re.sub(r"^Pass_\d+_", "", row[name]), failed


def topology(text: str) -> Iterator[tuple[list[str], list[str]]]:
    """The fields and the successors of each task in the text of ``dyn_topo.txt``."""
    head, *lines = text.splitlines() or [""]
    # seqNo, taskId, rootIndex, rootHash, opmagic, leafIndex, leafHash, coreType, psgId, ...
    count = head.split(",").index("successors") if head else 0
    for line in lines:
        fields = [field for field in line.split(",") if field]
        yield fields[:count], fields[count:]


def register_inspector(function: ctypes._CFuncPtr) -> None:  # type: ignore[name-defined]
    """Lets PyPTO's control flow call ``function`` with each group of tasks it forms."""
    for name in CONTROL_FLOW:
        if library := loaded(LIB / name):
            register = library.PyptoKernelCtrlServerRegisterTaskInspector
            register(ctypes.cast(function, ctypes.c_void_p), None)
