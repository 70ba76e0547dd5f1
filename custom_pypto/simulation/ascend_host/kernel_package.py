"""A kernel package for the host simulator, whose operators are this package's CPU kernels.

``python -m custom_pypto.simulation.ascend_host.kernel_package FOLDER`` writes one into a folder, in
the layout of CANN's custom operator packages, from the GE prototypes. With
``ASCEND_CUSTOM_OPP_PATH=FOLDER`` and ``CUSTOM_PYPTO_EAGER=aclnn``, eager calls on the simulator go
through its ``libcust_opapi.so``. Each of its functions has the signature that CANN generates, and
passes its arguments by name to Python, which computes on the memory that they describe.
"""

import contextlib
import ctypes
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...descriptions import OPS
from ...graph.prototypes import Prototype, prototypes
from ...kernel_packages import LIBRARY, LISTS, listing
from ...schemas import overload
from . import device
from .libraries import compile_library

SOC = "ascend910_93"  # of the chip that the simulator's aclrtGetSocName names
# aclDataType of CANN's acl/acl_base.h
ACL_DTYPES = {
    0: torch.float32,
    1: torch.float16,
    2: torch.int8,
    3: torch.int32,
    9: torch.int64,
    27: torch.bfloat16,
}
# Argument::Kind
KINDS = ("required", "optional", "output", "int", "float", "bool", "str", "listInt")
ATTRIBUTES = {  # type -> its C++ type and its member of Argument
    "int": ("int64_t", "integer"),
    "float": ("double", "real"),
    "bool": ("bool", "integer"),
    "str": ("char*", "text"),
    "listInt": ("const aclIntArray*", "list"),
}

_cann: ctypes.CDLL
_plans: dict[int, Callable[[int], Callable[[], None]]] = {}  # executor -> workspace -> its work
_numbers = itertools.count()
_failures: dict[str, str] = {}


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("sizes", ctypes.c_int64 * 16),
        ("strides", ctypes.c_int64 * 16),
        ("dimensions", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("elements", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("data", ctypes.c_void_p),
    ]


class _IntArray(ctypes.Structure):
    _fields_ = [("values", ctypes.POINTER(ctypes.c_int64)), ("size", ctypes.c_uint64)]


class _Argument(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("kind", ctypes.c_int32),
        ("tensor", ctypes.POINTER(_Tensor)),
        ("integer", ctypes.c_int64),
        ("real", ctypes.c_double),
        ("text", ctypes.c_char_p),
        ("list", ctypes.POINTER(_IntArray)),
    ]

    def value(self):
        match KINDS[self.kind]:
            case "int":
                return self.integer
            case "float":
                return self.real
            case "bool":
                return bool(self.integer)
            case "str":
                return self.text.decode()
            case "listInt":
                return self.list[0].values[: self.list[0].size]
        return _view(self.tensor[0]) if self.tensor else None


# ---- writing a package


def build(folder: Path, operators: Sequence[Prototype] | None = None) -> Path:
    """Writes the package into ``folder`` and returns it.

    Args:
        operators: the prototypes, by default all.
    Raises:
        AscendHostError: the library does not compile.
    """
    operators = prototypes() if operators is None else operators
    operator_list = folder / LISTS.replace("*", SOC)
    operator_list.parent.mkdir(parents=True, exist_ok=True)
    operator_list.write_text(json.dumps(listing(operators), indent=1))
    library = folder / LIBRARY
    library.parent.mkdir(parents=True, exist_ok=True)
    source = folder / "op_api/libcust_opapi.cpp"
    source.write_text('#include "nnopbase.h"\n' + "".join(map(_functions, operators)))
    compile_library(source, library)
    return folder


def _functions(prototype: Prototype) -> str:
    """The two phases in C++; an input that is also an output is passed once."""
    parameters, arguments = [], []
    outputs = [tensor for tensor in prototype.outputs if tensor not in prototype.inputs]
    for tensor in (*prototype.inputs, *outputs):
        kind = KINDS.index("output" if tensor in outputs else tensor.kind)
        parameters.append(f"const aclTensor* {tensor.name}_")
        arguments.append(
            f'{{"{tensor.name}", Argument::Kind({kind}), {tensor.name}_, 0, 0, nullptr, nullptr}}'
        )
    attributes = []
    for attribute in prototype.attributes:
        type, member = ATTRIBUTES[attribute.type]
        attributes.append(f"{type} {attribute.name}_")
        values = {"integer": "0", "real": "0", "text": "nullptr", "list": "nullptr"}
        values[member] = f"{attribute.name}_"
        kind = KINDS.index(attribute.type)
        arguments.append(
            f'{{"{attribute.name}", Argument::Kind({kind}), nullptr, {", ".join(values.values())}}}'
        )
    place = len(prototype.inputs)
    signature = ", ".join(parameters[:place] + attributes + parameters[place:])
    return f"""
API int aclnn{prototype.type}GetWorkspaceSize({signature},
    uint64_t* size, aclOpExecutor** executor) {{
  const Argument arguments[] = {{{", ".join(arguments)}}};
  return ascend_host_first_phase("{prototype.type}", arguments, {len(arguments)}, size, executor);
}}
API int aclnn{prototype.type}(void* workspace, uint64_t size,
    aclOpExecutor* executor, void* stream) {{
  return ascend_host_second_phase("aclnn{prototype.type}", workspace, size, executor, stream);
}}
"""


# ---- computing


def install(cann: ctypes.CDLL) -> None:
    """Lets packages compute in this process; ``cann`` is the simulator's library."""
    global _cann
    _cann = cann
    cann.ascend_host_connect_packages(*_CALLBACKS)


def live() -> dict[str, int]:
    """The numbers of existing ``aclTensor``, ``aclOpExecutor`` and plans of executors."""
    tensors, executors = ctypes.c_uint64(), ctypes.c_uint64()
    _cann.ascend_host_count(ctypes.byref(tensors), ctypes.byref(executors))
    return {"tensors": tensors.value, "executors": executors.value, "plans": len(_plans)}


@contextlib.contextmanager
def failing(function: str, message: str) -> Iterator[None]:
    """Inside, calls of the function ``aclnn…`` fail with that message."""
    _failures[function] = message
    try:
        yield
    finally:
        del _failures[function]


def _view(tensor: _Tensor) -> Tensor:
    """A CPU tensor on the described memory."""
    dtype, rank = ACL_DTYPES[tensor.dtype], tensor.dimensions
    sizes, strides = tensor.sizes[:rank], tensor.strides[:rank]
    if 0 in sizes:
        return torch.empty_strided(sizes, strides, dtype=dtype)
    flat = _at(tensor.data, tensor.elements * dtype.itemsize)
    alias = torch.empty(0, dtype=dtype)
    return alias.set_(flat.untyped_storage(), tensor.offset, sizes, strides)


def _at(address: int, size: int) -> Tensor:
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)


@functools.cache
def _operators() -> dict[str, Prototype]:
    return {prototype.type: prototype for prototype in prototypes()}


def _plan(type: str, arguments: Iterator[_Argument]) -> tuple[Callable, int]:
    """The operator's work by workspace, and the workspace's size, that of all new results."""
    prototype = _operators()[type]
    named = {argument.name.decode(): argument.value() for argument in arguments}
    outputs = [named.pop(x.name) for x in prototype.outputs if x not in prototype.inputs]
    for name, value in OPS[prototype.op].absent.items():
        if named[name] == (list(value) if isinstance(value, tuple) else value):
            named[name] = None
    op = overload(prototype.op)

    def launched(workspace: int) -> Callable[[], None]:
        def work() -> None:
            found = op(**named)
            results = [] if found is None else [found] if isinstance(found, Tensor) else found
            place = workspace
            for result, output in zip(results, outputs, strict=True):
                if result.numel():
                    part = _at(place, result.nbytes).view(result.dtype).view(result.shape)
                    output.copy_(part.copy_(result))
                    place += result.nbytes

        return work

    return launched, sum(output.nbytes for output in outputs)


def _first_phase(type: bytes, arguments, count: int, size) -> int:
    try:
        _fail_if_wanted(f"aclnn{type.decode()}GetWorkspaceSize")
        launched, size[0] = _plan(type.decode(), arguments[:count])
    except Exception as error:
        _cann.ascend_host_failed(f"{type.decode()}: {error}".encode())
        return -1
    number = next(_numbers)
    _plans[number] = launched
    return number


def _second_phase(number: int, function: bytes, workspace: int | None, stream: int | None) -> int:
    launched = _plans.pop(number)
    try:
        _fail_if_wanted(function.decode())
        device.submit(launched(workspace or 0), stream)
    except Exception as error:
        _cann.ascend_host_failed(f"{function.decode()}: {error}".encode())
        return 1
    return 0


def _fail_if_wanted(function: str) -> None:
    if function in _failures:
        raise RuntimeError(_failures[function])


def _drop(number: int) -> None:
    del _plans[number]


_SIZE = ctypes.POINTER(ctypes.c_uint64)
_CALLBACKS = (
    ctypes.CFUNCTYPE(
        ctypes.c_int64, ctypes.c_char_p, ctypes.POINTER(_Argument), ctypes.c_uint64, _SIZE
    )(_first_phase),
    ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_int64, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p
    )(_second_phase),
    ctypes.CFUNCTYPE(None, ctypes.c_int64)(_drop),
)

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(build(Path(sys.argv[1])))
