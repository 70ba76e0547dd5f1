"""The ops as PyPTO programs for Ascend NPUs. Imports pypto, never the ops.

A program is Python that runs once, on the host: its calls of pypto record what the NPU does, and
the body of a ``pypto.loop`` is recorded once per branch that it may take, not per iteration.

``<op>.py`` has ``Facts``, a frozen dataclass of what is static in a call; ``kernel(facts)``, the
cached PyPTO kernel, whose parameters are the tensors; and ``program(a, facts)``, which records it.
A size that only chooses tiles is an ``InitVar``, not a field: calls that choose the same tiles then
share a binary.
"""

import logging
from types import SimpleNamespace

_root = logging.getLogger()
_level, _handlers = _root.level, _root.handlers[:]

import pypto  # noqa: E402

# PyPTO turns the root logger, and with it every other library's, to DEBUG
_root.setLevel(_level)
_root.handlers[:] = _handlers

F16, F32, I8, I32 = pypto.DT_FP16, pypto.DT_FP32, pypto.DT_INT8, pypto.DT_INT32
# keyed by torch's names
PYPTO_DTYPES = {
    "bfloat16": pypto.DT_BF16,
    "float16": F16,
    "float32": F32,
    "int32": I32,
    "int8": I8,
}

Arguments = SimpleNamespace  # the tensors of a program, by name


def arguments(scope: dict, absent: tuple[str, ...] = ()) -> Arguments:
    """The tensors in ``scope``, with None for the ``absent`` ones.

    PyPTO evaluates the body of a kernel itself, where ``locals()`` holds the parameters, so that
    the kernel's signature is the only list of their names. PyPTO has no optional parameters.
    """
    tensors = {name: value for name, value in scope.items() if isinstance(value, pypto.Tensor)}
    return Arguments(**tensors | dict.fromkeys(absent))


def loop(name: str, *bounds, **options):
    """``pypto.loop``, whose index has the loop's name in lower case."""
    return pypto.loop(*bounds, name=name, idx_name=name.lower(), **options)


def begin_task(scope: int = 1) -> None:
    """Compiles all operations up to :func:`end_task` into one task, apart from other scopes.

    By default PyPTO makes several tasks, up to one per operation.
    """
    pypto.set_pass_options(sg_set_scope=scope)


def end_task() -> None:
    """Leaves the grouping of later operations into tasks to PyPTO."""
    pypto.set_pass_options(sg_set_scope=-1)


def runtime_options(
    *control_flow: str, ready_on_host: bool, layout: str = "BSND", iterations: int = 128
) -> dict:
    """Options of every kernel.

    Args:
        control_flow: the arguments whose values bound loops or become addresses.
        ready_on_host: whether these are final before the launch, so that control flow need not wait
            for earlier kernels. Prefix sums (layout TND) never are: ``npu/`` computes them on the
            device.
        iterations: concurrent iterations, each with a workspace; PyPTO's default is one at a time.
    """
    options: dict = {"stitch_function_max_num": iterations}
    if ready_on_host:
        computed = {"query_lengths"} if layout == "TND" else set()
        options["ready_on_host_tensors"] = [n for n in control_flow if n not in computed]
    return options
