"""Runs the C++ that PyPTO generates for an NPU, on the host.

PyPTO compiles the kernel for Atlas A2/A3 as it does for a device, up to the device's own compiler.
Its control flow then runs on the host, as for the cost model, and each task that it forms is
executed in the instructions of ``isa/``, with the addresses, offsets and shapes of a device.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from pypto.frontend.parser.entry import JitCallableWrapper
from torch import Tensor

from . import bodies, control_flow, loaded_calls
from .compiler import PACKAGE, SimulationError, compiled, pypto_versions, simulated, written

NAN, LARGE = 0xFF, 0x4B  # bytes of NaN, and of large finite numbers, in every type

# functions of PyPTO's code generator
_CODEGEN = "_ZNK3npu8tile_fwk10CodeGenNPU"
_TEXT = "ERSt19basic_ostringstreamIcSt11char_traitsIcESaIcEE"
END_TEXT = f"{_CODEGEN}10GenFuncEnd{_TEXT}"
UPDATE = f"{_CODEGEN}13UpdateSubFuncESt4pairImPNS0_8FunctionEERKNS0_11CompileInfoE"
WRITE_TEXT = f"{_CODEGEN}19GenCodeToBinaryTask{_TEXT}RKNS0_11CompileInfoERKSs"
# and of its cost model, which estimates the tasks after they have run
COST_MODEL = (
    "_ZN3npu8tile_fwk14CostModelAgent12RunCostModelEv",
    "_ZN3npu8tile_fwk14CostModelAgent18TerminateCostModelEv",
)


def execute(
    kernel,
    *tensors: Tensor,
    timeout: float | None = None,
    fill: int = NAN,
    unordered_adds: bool = False,
    **params,
) -> list[Tensor]:
    """The value of every tensor argument after the kernel's generated code ran on the host.

    Where :func:`interpret` evaluates the program as written, this runs what PyPTO made of it:
    tiles, valid shapes, offsets, buffers, control flow and the task graph. The first call with a
    kernel compiles its code with g++, about half a second for each kind of task.

    Checked on the way: each access to global memory lies within an argument or the workspace; what
    is read from the workspace was written; the task graph orders tasks that touch the same memory;
    each operand lies in its buffer and obeys the ISA's rules of shape and alignment; each flag is
    set before it is waited for, and the other way round. Not checked: order of equal values in a
    sort, the last bit of exp, rsqrt and sums, and whether the flags suffice.

    Args:
        tensors: the kernel's tensor arguments, contiguous and on the CPU. They are not changed.
        timeout: seconds, 600 by default.
        fill: the byte that fills the buffers before each task: ``NAN`` or ``LARGE``.
        unordered_adds: let tasks add to the same memory, by atomic stores, in an order that the
            task graph leaves open. The last bits of such sums may change from run to run.
        params: the kernel's other arguments.

    Returns:
        As many tensors as were given, in their order, shapes and dtypes.

    Raises:
        SimulationError: the kernel does not compile, uses an instruction that is not modelled, or
            breaks a rule; the message names the task, the instruction and the buffer or argument.
    """
    bodies.toolchain()
    control_flow.folder()
    copy = simulated(kernel, pypto_versions.ONE_SCHEDULER)
    prepare = partial(_prepare, tensors, (fill, unordered_adds))
    with compiled(copy, tensors, params, prepare=prepare, timeout=timeout) as output:
        return [_read(output.parent / f"argument_{i}", t) for i, t in enumerate(tensors)]


def _prepare(tensors: Sequence[Tensor], options: tuple[int, bool]) -> None:
    """Runs in the child process: PyPTO writes the code for a device and believes it compiled."""
    control_flow.keep()
    folder = Path.cwd()
    tools, isa = folder / "tools", folder / "isa"
    (isa / "include" / "pto").mkdir(parents=True)
    tools.mkdir()
    # PyPTO calls make, which calls the device's compiler, and a build for CANN the linker, too
    for name in ("make", "bisheng", "ld.lld"):
        (tools / name).write_text("#!/bin/sh\nexit 0\n")
        (tools / name).chmod(0o755)
    os.environ["PATH"] = f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"
    os.environ["PTO_TILE_LIB_CODE_PATH"] = str(isa)
    os.environ["ASCEND_HOME_PATH"] = str(folder)
    library = ctypes.CDLL(str(bodies.toolchain() / "libisa.so"), mode=ctypes.RTLD_GLOBAL)
    _write_code(library)
    run_control_flow = JitCallableWrapper._run_with_cpu

    def run(self, *arguments):
        del os.environ["ASCEND_HOME_PATH"]
        _run(library, folder, tensors, options, lambda: run_control_flow(self, *arguments))

    JitCallableWrapper._run_with_cpu = run


def _write_code(library: ctypes.CDLL) -> None:
    """Makes PyPTO write its generated code, unless it does already."""
    codegen = loaded_calls.loaded(pypto_versions.LIB / "libtile_fwk_codegen.so")
    if not hasattr(codegen, WRITE_TEXT) or loaded_calls.entry(codegen, WRITE_TEXT):
        return
    functions = {"isa_write_text": loaded_calls.address(getattr(codegen, WRITE_TEXT))}
    for name, own, replacement in (
        (END_TEXT, "isa_end_text", library.isa_end_and_keep),
        (UPDATE, "isa_update", library.isa_write_and_update),
    ):
        entry = loaded_calls.entry(codegen, name)
        functions[own] = loaded_calls.replace(entry, loaded_calls.address(replacement))
    for own, function in functions.items():
        ctypes.c_void_p.in_dll(library, own).value = function


def _run(
    library: ctypes.CDLL,
    folder: Path,
    tensors: Sequence[Tensor],
    options: tuple[int, bool],
    control_flow: Callable,
) -> None:
    output = written(folder)
    library.isa_begin(str(output / "dyn_topo.txt").encode(), *options)
    for tensor in tensors:
        library.isa_argument(ctypes.c_uint64(tensor.numel() * tensor.element_size()))
    for body in bodies.compiled_bodies(output / "kernel_aicore"):
        function = getattr(ctypes.CDLL(str(body.library)), body.function)
        address = ctypes.cast(function, ctypes.c_void_p)
        library.isa_body(ctypes.c_uint64(body.hash), address, body.title.encode())
    pypto_versions.register_inspector(library.isa_run)
    nothing = loaded_calls.address(ctypes.CDLL(None).getpid)  # takes any arguments
    for name in COST_MODEL:
        loaded_calls.replace_in(PACKAGE, name, nothing)
    control_flow()
    library.isa_problem.restype = ctypes.c_char_p
    if problem := library.isa_problem().decode():
        raise SimulationError(problem)
    if not library.isa_batches():
        raise SimulationError("PyPTO formed no task")
    library.isa_address.restype = ctypes.c_uint64
    for i, tensor in enumerate(tensors):
        size = tensor.numel() * tensor.element_size()
        data = ctypes.string_at(library.isa_address(i), size) if size else b""
        (folder / f"argument_{i}").write_bytes(data)


def _read(path: Path, like: Tensor) -> Tensor:
    data = bytearray(path.read_bytes())
    if not data:
        return torch.empty_like(like)
    return torch.frombuffer(data, dtype=like.dtype).reshape(like.shape)
