"""The ops on CPU tensors, computed by the NPU programs in PyPTO's interpreter."""

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from .. import npu
from .interpreter import run_in_place


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Inside, the ops on CPU tensors are what they would be on an NPU, run by the interpreter.

    The wrappers of :mod:`custom_pypto.npu` with their checks and limits, and the PyPTO programs
    they launch; so a whole model runs on the NPU programs, slowly: a call takes between a tenth of
    a second and many seconds. Where standard error is a terminal, it shows the kernels run so far.
    The switch is global, for all threads; it does not nest.

    Raises:
        SimulationError: from the call of an op, if PyPTO does not interpret its program.
    """
    with tqdm(unit=" kernels", desc="PyPTO interpreter", disable=None, leave=False) as progress:

        def launch(kernel, tensors: Sequence[Tensor], written: Sequence[Tensor]) -> None:
            progress.set_postfix_str(kernel.__name__)
            run_in_place(kernel, tensors, written)
            progress.update()

        library = torch.library.Library("custom_pypto", "IMPL")
        # what CUSTOM_PYPTO_LOG calls cpu is something else from here on
        logging.getLogger("custom_pypto").info("PyPTO's interpreter stands in for the CPU kernels")
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Warning only once for all operators")
                for name, function in npu.implementations(launch).items():
                    library.impl(name, function, "CPU", allow_override=True)
            yield
        finally:
            library._destroy()  # the CPU kernels are in force again
            logging.getLogger("custom_pypto").info("the CPU kernels are in force again")
