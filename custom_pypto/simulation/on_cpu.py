"""The ops on CPU tensors, computed by the NPU kernels."""

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from tqdm import tqdm

from .. import npu
from ..schemas import overload
from .generated import execute
from .interpreter import interpret, run_in_place


@contextlib.contextmanager
def on_cpu(*, generated: bool = False, unordered_adds: bool = False) -> Iterator[None]:
    """Inside, the ops on CPU tensors take the NPU path, run by the interpreter.

    The path has the wrappers of :mod:`custom_pypto.npu`, with their checks and limits, and the
    PyPTO programs they launch. A whole model runs this way, slowly: a call takes between a tenth of
    a second and many seconds. A terminal on standard error shows the number of kernels run. The
    switch is global, for all threads, and does not nest.

    Args:
        generated: run the C++ that PyPTO generates (:func:`execute`) instead of interpreting the
            programs; the first call with a shape class compiles it, for up to a minute.
        unordered_adds: as for :func:`execute`.

    Raises:
        SimulationError: from the call of an op, if PyPTO does not interpret its program, or if its
            generated code breaks a rule of the device.
    """
    run: Callable = interpret
    if generated:
        run = functools.partial(execute, unordered_adds=unordered_adds)
    route = "PyPTO's generated code" if generated else "PyPTO's interpreter"
    with tqdm(unit=" kernels", desc=route, disable=None, leave=False) as progress:

        def launch(kernel, tensors: dict[str, Tensor]) -> None:
            progress.set_postfix_str(kernel.__name__)
            run_in_place(kernel, tuple(tensors.values()), run)
            progress.update()

        library = torch.library.Library("custom_pypto", "IMPL")
        logging.getLogger("custom_pypto").info("%s stands in for the CPU kernels", route)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Warning only once for all operators")
                for op, function in npu.implementations(launch).items():
                    library.impl(overload(op), function, "CPU", allow_override=True)
                # the log names this route
                key = "CompositeImplicitAutograd"
                library.impl("cpu_isa", lambda: route, key, allow_override=True)
            npu.on_cpu = True  # models leave attention to the ops, as on an NPU
            yield
        finally:
            npu.on_cpu = False
            library._destroy()  # restores the CPU kernels
            logging.getLogger("custom_pypto").info("the CPU kernels are in force again")
