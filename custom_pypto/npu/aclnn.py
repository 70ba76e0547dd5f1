"""Eager calls through a kernel package: CANN's single-operator functions ``aclnn<Operator>``.

The first phase, ``aclnn<Operator>GetWorkspaceSize``, takes the inputs, attributes and outputs in
the prototype's order, an input that is also an output once, and makes an executor. The second
phase, ``aclnn<Operator>``, launches it on a stream. Types of the arguments: those that CANN's
``opbuild`` generates (https://gitcode.com/cann/asc-devkit, op_aclnn_generator.cpp). All is called
through ctypes, so nothing links against CANN. Not verified on hardware.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..descriptions import OPS, spelled
from ..graph.prototypes import Prototype
from ..kernel_packages import Functions, functions, places
from .common import name

# aclDataType and aclFormat of CANN's acl/acl_base.h
ACL_DTYPES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.int8: 2,
    torch.int32: 3,
    torch.int64: 9,
    torch.bfloat16: 27,
}
ND = 2
TORCH_FORMATS = (0, 1, ND, 27, 30)  # NCHW, NHWC, ND, NDHWC, NCDHW: by number of dims
ATTRIBUTES = {
    "int": ctypes.c_int64,
    "float": ctypes.c_double,
    "bool": ctypes.c_bool,
    "str": ctypes.c_char_p,
    "listInt": ctypes.c_void_p,  # aclIntArray
}


class Operator:
    """The operator of one op, called through aclnn."""

    def __init__(self, prototype: Prototype):
        self.prototype = prototype
        self._dtypes = [{getattr(torch, d) for d in x.dtypes} for x in prototype.inputs]
        self._written = [x.name for x in prototype.outputs if x in prototype.inputs]
        self._found: dict[tuple[str, str], Functions] = {}

    def functions(self) -> Functions:
        """The functions with their signatures; looked up once per value of :func:`places`.

        Raises:
            Problem: no installed package offers the operator.
        """
        where = places()
        if where not in self._found:
            found = functions(self.prototype)
            new = len(self.prototype.outputs) - len(self._written)
            found.first.argtypes = [
                *[ctypes.c_void_p] * len(self.prototype.inputs),
                *(ATTRIBUTES[attribute.type] for attribute in self.prototype.attributes),
                *[ctypes.c_void_p] * new,
                ctypes.POINTER(ctypes.c_uint64),
                ctypes.POINTER(ctypes.c_void_p),
            ]
            found.second.argtypes = [ctypes.c_void_p, ctypes.c_uint64, *[ctypes.c_void_p] * 2]
            self._found[where] = found
        return self._found[where]

    def run(self, found: Functions, arguments: dict[str, Any], out):
        """Computes ``out``, the outputs that the contract has allocated, and returns it.

        Tensors may have any strides, which their descriptions hold. Outputs without elements need
        no launch.

        Raises:
            RuntimeError: an unsupported dtype or format; or a failed phase, with CANN's message.
        """
        inputs = [arguments[tensor.name] for tensor in self.prototype.inputs]
        self._check_inputs(inputs)
        outputs = [] if out is None else [out] if isinstance(out, Tensor) else [*out]
        written = [arguments[name] for name in self._written]
        if any(tensor.numel() for tensor in (*outputs, *written)):
            # by contract the device of all arguments
            with torch.npu.device(inputs[0].device):  # type: ignore[attr-defined]
                self._call(found, inputs, self._attributes(arguments), outputs)
        return out

    def _call(self, found: Functions, inputs: list, attributes: list, outputs: list) -> None:
        cann = _cann()
        descriptions: list[int | None] = []
        lists: list[int] = []
        size, executor = ctypes.c_uint64(), ctypes.c_void_p()
        try:
            for tensor in (*inputs, *outputs):
                descriptions.append(None if tensor is None else cann.described(tensor))
            for i, attribute in enumerate(self.prototype.attributes):
                if attribute.type == "listInt":
                    lists.append(cann.numbers(attributes[i]))
                    attributes[i] = lists[-1]
            status = found.first(
                *descriptions[: len(inputs)],
                *attributes,
                *descriptions[len(inputs) :],
                ctypes.byref(size),
                ctypes.byref(executor),
            )
            if status:  # then there is no executor
                raise self._failed(found, "GetWorkspaceSize", status)
            try:
                # On the current stream: once freed, the memory goes to later work of this stream
                # only. A captured graph has a memory pool of its own.
                workspace = torch.empty(size.value, dtype=torch.uint8, device=inputs[0].device)
                stream = self._stream()
            except BaseException:
                cann.free(executor)
                raise
            address = workspace.data_ptr() if size.value else None
            if status := found.second(address, size, executor, stream):  # frees the executor
                raise self._failed(found, "", status)
        finally:
            # the executor refers to all of these until the second phase has returned
            for numbers in lists:
                cann.base.aclDestroyIntArray(numbers)
            for description in descriptions:
                if description is not None:
                    cann.base.aclDestroyTensor(description)

    def _stream(self) -> int:
        """The current stream, on which all earlier work has been launched.

        Reading ``npu_stream`` waits until torch_npu's task queue (``TASK_QUEUE_ENABLE``) is empty,
        so that a launch does not overtake queued work; null reports failed work
        (``NPUStream::stream`` in torch_npu's NPUStream.cpp).
        """
        if stream := torch.npu.current_stream().npu_stream:  # type: ignore[attr-defined]
            return stream
        raise RuntimeError(
            f"{self.prototype.op}: torch_npu gives no stream, as earlier work in its task queue "
            "failed; torch.npu.synchronize() reports it, TASK_QUEUE_ENABLE=0 at the failing call"
        )

    def _check_inputs(self, inputs: list[Tensor | None]) -> None:
        op, format_of = self.prototype.op, torch.ops.npu.get_npu_format
        for tensor, described, dtypes in zip(
            inputs, self.prototype.inputs, self._dtypes, strict=True
        ):
            if tensor is None:
                continue
            if tensor.dtype not in dtypes:
                raise RuntimeError(
                    f"{op}: {described.name}.dtype must be {spelled(described.dtypes)} on an NPU, "
                    f"got {name(tensor.dtype)}; convert it, or run on the CPU"
                )
            # strides do not describe a private format; vectors have no private formats
            if tensor.dim() > 1 and (found := format_of(tensor)) not in TORCH_FORMATS:
                raise RuntimeError(
                    f"{op}: {described.name} must be in format ND on an NPU, got aclFormat "
                    f"{found}; cast it: torch_npu.npu_format_cast(x, 2)"
                )

    def _attributes(self, arguments: dict[str, Any]) -> list:
        values = []
        for attribute in self.prototype.attributes:
            value = arguments[attribute.name]
            if value is None:
                value = OPS[self.prototype.op].absent[attribute.name]
            values.append(value.encode() if attribute.type == "str" else value)
        return values

    def _failed(self, found: Functions, phase: str, status: int) -> RuntimeError:
        return RuntimeError(
            f"{self.prototype.op}: aclnn{self.prototype.type}{phase} in {found.library} failed "
            f"with {status}: {_cann().message()}"
        )


class _Cann:
    """The functions of CANN that calls of all operators share."""

    def __init__(self):
        self.base = ctypes.CDLL("libnnopbase.so")
        numbers = ctypes.POINTER(ctypes.c_int64)
        self.base.aclCreateTensor.restype = ctypes.c_void_p
        self.base.aclCreateTensor.argtypes = [
            numbers,  # sizes
            ctypes.c_uint64,
            ctypes.c_int,
            numbers,  # strides
            ctypes.c_int64,
            ctypes.c_int,
            numbers,  # sizes of the storage
            ctypes.c_uint64,
            ctypes.c_void_p,
        ]
        self.base.aclDestroyTensor.argtypes = [ctypes.c_void_p]
        self.base.aclCreateIntArray.restype = ctypes.c_void_p
        self.base.aclCreateIntArray.argtypes = [numbers, ctypes.c_uint64]
        self.base.aclDestroyIntArray.argtypes = [ctypes.c_void_p]
        self.base.aclSetAclOpExecutorRepeatable.argtypes = [ctypes.c_void_p]
        self.base.aclDestroyAclOpExecutor.argtypes = [ctypes.c_void_p]
        self._recent = ctypes.CDLL("libascendcl.so").aclGetRecentErrMsg
        self._recent.restype = ctypes.c_char_p

    def described(self, tensor: Tensor) -> int:
        """A new ``aclTensor`` on the memory of ``tensor``."""
        storage = tensor.untyped_storage()
        numbers = ctypes.c_int64 * tensor.dim()
        description = self.base.aclCreateTensor(
            numbers(*tensor.size()),
            tensor.dim(),
            ACL_DTYPES[tensor.dtype],
            numbers(*tensor.stride()),
            tensor.storage_offset(),
            ND,
            ctypes.c_int64(storage.nbytes() // tensor.element_size()),
            1,
            storage.data_ptr(),
        )
        if not description:
            raise RuntimeError(
                f"aclCreateTensor describes no tensor {list(tensor.shape)} of "
                f"{name(tensor.dtype)} with strides {list(tensor.stride())}: {self.message()}"
            )
        return description

    def numbers(self, values: Sequence[int]) -> int:
        """A new ``aclIntArray``."""
        array = self.base.aclCreateIntArray((ctypes.c_int64 * len(values))(*values), len(values))
        if not array:
            raise RuntimeError(f"aclCreateIntArray makes no list of {values}: {self.message()}")
        return array

    def free(self, executor: ctypes.c_void_p) -> None:
        """Frees an executor that is not launched; a launch would free it.

        CANN documents this for repeatable executors only.
        """
        self.base.aclSetAclOpExecutorRepeatable(executor)
        self.base.aclDestroyAclOpExecutor(executor)

    def message(self) -> str:
        """CANN's message on the last failure in this thread."""
        return (self._recent() or b"no message").decode(errors="replace")


_cann = functools.cache(_Cann)
