"""The real torch_npu and torchair on a machine without an NPU, on a host simulator of CANN.

After ``start()`` there is a device ``npu`` whose memory is the host's: tensors, streams, events and
graph capture are torch_npu's, aten ops run as CPU kernels, the ops of this package run their NPU
programs in PyPTO's interpreter, and torchair converts, compiles and runs GE graphs, executed by
:mod:`.ge_executor`. It shows results and graphs, but neither speed nor the behaviour of CANN
itself. Not verified on hardware.

It starts only on request, once per process and for its lifetime, and not next to a real CANN.
``python -m custom_pypto.simulation.ascend_host program.py ...`` runs a program under it.
"""

import contextlib
import os
import sys

from . import libraries
from .libraries import AscendHostError, AscendHostUnavailable

__all__ = [
    "AscendHostError",
    "AscendHostUnavailable",
    "is_running",
    "start",
    "start_unless_npu",
]

_running = False


def is_running() -> bool:
    """Whether :func:`start` has been called in this process."""
    return _running


def start() -> None:
    """Makes ``npu`` a device of this process, in host memory, and torchair importable.

    The first call on a machine compiles the simulator's libraries, which takes seconds. Call it
    before importing transformers, which looks for torch_npu once.

    Raises:
        AscendHostUnavailable: next to a real CANN, without the torch_npu of the installed torch
            and its dependencies, or without a compiler.
    """
    global _running
    if _running:
        return
    cann = libraries.load()
    # torch_npu would queue calls to a thread and report a failure at a later call
    os.environ["TASK_QUEUE_ENABLE"] = "0"
    # keeps torch_npu's messages about missing CANN parts out of the program's output
    with contextlib.redirect_stdout(sys.stderr):
        import torch_npu  # noqa: F401
        import torchair  # noqa: F401
    from ... import converter
    from . import device, ge_executor, kernel_package

    device.install(cann)
    ge_executor.install(cann)
    kernel_package.install(cann)
    converter.register()
    _running = True
    print(
        "custom_pypto: npu is a host simulator of CANN in this process: CPU memory and kernels, "
        "PyPTO's interpreter for the ops; not an NPU, and slow",
        file=sys.stderr,
    )


def start_unless_npu() -> bool:
    """Makes ``npu`` a device: the machine's own where CANN is installed, else :func:`start`.

    Returns:
        Whether the device is an NPU.
    Raises:
        AscendHostUnavailable: CANN without a working NPU, or as for :func:`start`.
    """
    if _running or not (found := libraries.cann()):
        start()
        return False
    try:
        import torch
        import torch_npu  # noqa: F401

        works, problem = torch.npu.is_available(), "torch.npu.is_available() is False"
    except (ImportError, OSError, RuntimeError) as error:
        works, problem = False, f"torch_npu does not load ({error})"
    if not works:
        raise AscendHostUnavailable(
            f"ascend_host: CANN is here ({found}), but {problem}; `custom-pypto env` "
            "says what is missing"
        )
    return True
