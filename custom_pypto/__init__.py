"""DeepSeek Sparse Attention as PyTorch ops for Ascend NPUs and CPUs.

Importing the package registers the ops under ``torch.ops.custom_pypto``; the exported functions
call them and document their contracts. :mod:`custom_pypto.models`, which needs transformers, loads
models of transformers and runs them on the ops. ``custom-pypto env`` reports what works on this
machine.
"""

import importlib as _importlib
import sys as _sys
import typing as _typing

from . import converter, machine, threads
from . import env as env
from .requirements import BUILD as _BUILD
from .requirements import Problem as _Problem
from .requirements import build_problem as _build_problem
from .version import __version__ as __version__

threads.check_stack_size()
threads.bound_spinning()
machine.disable_broken_autoload()
machine.ask_for_large_pages()
try:
    import torch as _torch  # before _C, which links to its libraries

    # one for another torch may load, and compute with another layout of its classes
    if _problem := _build_problem(_torch.__version__):
        raise _problem

    import custom_pypto._C  # noqa: F401

    from . import log, npu  # noqa: F401  # npu registers the NPU ops without PyPTO
    from .ops import *  # noqa: F403
    from .ops import __all__ as __all__
# OSError: a library that torch loads; RuntimeError: a backend that torch autoloads
except (ImportError, OSError, RuntimeError) as _error:
    if not isinstance(_error, _Problem):
        _error = _Problem(f"cannot load torch or the compiled ops ({_error})", _BUILD)
    raise ImportError(
        f"custom_pypto: {_error}; `{_sys.executable} -m custom_pypto_command env` reports what is "
        "missing"
    ) from _error

converter.register_if_wanted()
log.start_if_wanted()


def __dir__() -> list[str]:
    return sorted({*__all__, "models", *(name for name in globals() if name.startswith("__"))})


if not _typing.TYPE_CHECKING:  # which would take any name for one of this module

    def __getattr__(name: str):
        if name != "models":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return _importlib.import_module(f"{__name__}.models")
        except ImportError as error:  # help() asks for every attribute
            raise AttributeError(str(error)) from error
