"""Runs the tensor graph of a PyPTO kernel on host tensors in PyPTO's interpreter."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pypto
import torch
from pypto import pypto_impl
from pypto.frontend.parser.entry import JitCallableWrapper, _pto_to_tensor_data
from torch import Tensor

from . import calculator
from .compiler import SimulationError, compiled, pypto_versions, simulated


def interpret(kernel, *tensors: Tensor, timeout: float | None = None, **params) -> list[Tensor]:
    """The value of every tensor argument after the kernel ran.

    The kernel is what ``pypto.frontend.jit`` returns. Its tensor graph is interpreted before the
    compiler's passes, without tiles: this checks the program, not the tiling (:func:`verify_passes`
    checks the tiling). The first call on a machine compiles a library of PyPTO, which takes about
    half a minute.

    Args:
        tensors: the kernel's tensor arguments, contiguous and on the CPU. They are not changed.
        timeout: seconds, 600 by default.
        params: the kernel's other arguments.

    Returns:
        As many tensors as were given, in their order, shapes and dtypes.

    Raises:
        SimulationError: the kernel does not compile, or the interpreter rejects it, with the reason
            that PyPTO logged; it did not finish in time; it ended its process.
    """
    calculator.load()
    stop_early = {"compile_stage": pypto.CompStage.TENSOR_GRAPH}
    verify = {"enable_pass_verify": True, "pass_verify_pass_filter": []}
    copy = simulated(kernel, host_options=stop_early, verify_options=verify)
    prepare = partial(_set_inputs, dump=True)
    with compiled(copy, tensors, params, prepare=prepare, timeout=timeout) as output:
        return [_dumped(output, i, tensor) for i, tensor in enumerate(tensors)]


def run_in_place(kernel, tensors: Sequence[Tensor], run: Callable = interpret, **params) -> None:
    """Emulates a launch: stores what ``run`` changes in the tensors."""
    for tensor, value in zip(tensors, run(kernel, *tensors, **params), strict=True):
        # an argument that is not written may be a view of one that is
        if not tensor.view(torch.uint8).equal(value.view(torch.uint8)):
            tensor.copy_(value)


def replace_calls(device: str, launch: Callable) -> None:
    """Calls of PyPTO kernels on tensors of the device, by its type, become calls of ``launch`` with
    the kernel, a tuple of its tensors and a dict of its other arguments."""
    call = JitCallableWrapper.__call__

    def instead(kernel, *args, **kwargs):
        if not (args and isinstance(args[0], Tensor) and args[0].device.type == device):
            return call(kernel, *args, **kwargs)
        tensors, params, _ = kernel._parse_call_args(args, kwargs)
        return launch(kernel, tuple(tensors), params)

    JitCallableWrapper.__call__ = instead


def verify_passes(
    kernel,
    *tensors: Tensor,
    timeout: float | None = None,
    **params,
) -> dict[str, tuple[int, int]]:
    """Compares the results of the tiled graph, after the last compiler pass before code generation,
    with those of the original graph.

    Returns:
        For each pass that was compared, the number of tensors that agree and that do not. PyPTO
        cannot evaluate every operation on tiles (not ``gather_in_l1``): a pass without a compared
        tensor is missing.
    """
    calculator.load()
    verify = {
        "enable_pass_verify": True,
        "pass_verify_pass_filter": ["CodegenPreproc"],
        "pass_verify_error_tol": [1e-3, 1e-3],  # absolute and relative, of each element
    }
    stop_early = {"compile_stage": pypto.CompStage.EXECUTE_GRAPH}  # the passes, not the code
    copy = simulated(kernel, host_options=stop_early, verify_options=verify)
    prepare = partial(_set_inputs, dump=False)
    with compiled(copy, tensors, params, prepare=prepare, timeout=timeout) as output:
        counts: dict[str, list[int]] = {}
        for name, failed in pypto_versions.verdicts(output):
            counts.setdefault(name, [0, 0])[failed] += 1
        return {name: (agree, differ) for name, (agree, differ) in counts.items()}


def _set_inputs(*, dump: bool) -> None:
    """Runs in the child process, the only user of its PyPTO: the verifier gets the caller's values
    as inputs instead of zeros, and with ``dump`` writes their final values."""

    def inputs(tensors):
        data = _pto_to_tensor_data(tensors)
        # it writes the final value of each argument for which a value is expected
        pypto_impl.SetVerifyData(data, [], data if dump else [])

    pypto_versions.replace_inputs(inputs)
    JitCallableWrapper._run_with_cpu = lambda *arguments: None


def _dumped(output: Path, i: int, like: Tensor) -> Tensor:
    paths = [p for p in output.rglob(f"tensor_graph~{i}~*.data") if "golden" not in p.name]
    if len(paths) != 1:
        raise SimulationError(
            f"the interpreter wrote {len(paths)} values of argument {i}, expected 1"
        )
    data = bytearray(paths[0].read_bytes())
    if not data:
        return torch.empty_like(like)
    return torch.frombuffer(data, dtype=like.dtype).reshape(like.shape)
