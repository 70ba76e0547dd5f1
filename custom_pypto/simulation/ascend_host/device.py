"""Computes on NPU tensors with CPU kernels, in the memory of the tensors, without copies.

torch_npu allocates, views and frees. This module replaces all computation: aten ops, and PyPTO's
kernels, those of this package and others, which run in PyPTO's interpreter.

While a stream is captured, as in the modes reduce-overhead and npugraph_ex of torchair, its work
and the work of waiting streams goes to a tape and runs only at every replay. As on a device, a tape
has addresses, which exposes tensors that do not outlive the capture. Outputs are allocated at once,
from their Meta shapes. Work that would make the host wait for the device raises, and then there is
no graph.
"""

import collections
import ctypes
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ...converter import swap
from ...schemas import overload
from ...standard import check_keywords
from ..interpreter import replace_calls, run_in_place
from .libraries import AscendHostError

# left to torch_npu: allocations, and queries of a tensor's own fields
MEMORY = ("empty", "empty_like", "empty_strided", "new_empty_strided", "resize_", "resize_as_")
MEMORY += ("set_", "is_set_to", "is_pinned", "_pin_memory", "record_stream", "_fused_sdp_choice")
CPU_KEYS = ("CPU", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
CPU_KEYS += ("CompositeImplicitAutograd",)
COPY = torch.ops.aten.copy_.default

_cann: ctypes.CDLL
# captured model -> the work of one replay
_tapes: dict[int, list[Callable[[], None]]] = collections.defaultdict(list)
_libraries: list[torch.library.Library] = []  # overrides live as long as these


def host(tensor: Tensor) -> Tensor:
    """A CPU tensor on the memory of ``tensor``, with its shape and strides; CPU tensors as is."""
    if tensor.device.type != "npu":
        if torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.PrivateUse1):
            raise AscendHostError(
                f"ascend_host: a tensor {list(tensor.shape)} of {tensor.dtype} must be on one "
                "device, got one on the CPU that calls itself an NPU tensor, as torchair makes of "
                "a CPU argument of a captured function; give the function NPU tensors and numbers"
            )
        return tensor
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    alias = torch.empty(0, dtype=tensor.dtype)
    return alias.set_(flat, tensor.storage_offset(), tensor.size(), tensor.stride())


def captured_model(stream: int | None = None) -> int:
    """The model that the stream, by default the current one, is captured for, or 0."""
    if not _cann.ascend_host_is_capturing():
        return 0
    return _cann.ascend_host_model_of(stream or torch.npu.current_stream().npu_stream)


def submit(work: Callable[[], None], stream: int | None = None) -> None:
    """Runs ``work`` now, or records it for replays of the model that is being captured."""
    current = stream or torch.npu.current_stream().npu_stream
    if model := _cann.ascend_host_submit(current):
        _tapes[model].append(work)
    else:
        work()


def _break_capture(problem: str) -> AscendHostError:
    """The error for work that cannot be captured; even if caught, there is no graph."""
    _cann.ascend_host_break_capture(problem.encode())
    return AscendHostError(f"ascend_host: {problem}")


def _launch(kernel: Callable, tensors: tuple[Tensor, ...], params: dict) -> None:
    """Runs a PyPTO kernel on NPU tensors in PyPTO's interpreter."""
    aliases = [host(tensor) for tensor in tensors]
    submit(lambda: run_in_place(kernel, aliases, **params))


def _written_and_returned(op: torch._ops.OpOverload) -> dict[int, str]:
    """Index of an output of ``op`` -> the argument that ``op`` writes and returns there."""
    return {
        place: argument.name
        for place, result in enumerate(op._schema.returns)
        for argument in op._schema.arguments
        if result.alias_info is not None
        and argument.alias_info is not None
        and argument.alias_info.before_set & result.alias_info.before_set
    }


def _copy_each(targets: list, values: list) -> None:
    for target, value in zip(tree_leaves(targets), tree_leaves(values), strict=True):
        if isinstance(target, Tensor):
            target.copy_(value)


def _on_npu(op: torch._ops.OpOverload) -> Callable:
    """``op`` for NPU tensors: its CPU kernel on their memory."""
    returns, arguments = op._schema.returns, op._schema.arguments
    names = [argument.name for argument in arguments]
    outputs = [argument.name for argument in arguments if argument.is_out]
    given = _written_and_returned(op)
    new = [place for place in range(len(returns)) if place not in given]
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    answers_host = any("Tensor" not in str(result.type) for result in returns)

    def kernel(*args, **kwargs):
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        capturing = bool(_cann.ascend_host_is_capturing())
        if capturing and (answers_host or (op is COPY and _waits(**named))):
            raise _break_capture(
                f"{op} makes the host wait for the device, which must not happen while a graph is "
                "captured; keep .item(), .cpu() and the like out of the function"
            )
        captured = captured_model() != 0
        for name in outputs:
            shaped = tree_map_only(Tensor, _on_meta, named)
            op(**shaped)  # gives the outputs their final shapes
            if shaped[name].size() != named[name].size():
                named[name].resize_(shaped[name].size())
        taken = _scalar_by_value if captured and op is not COPY else host
        on_host = {
            name: tree_map_only(Tensor, host if name in written else taken, value)
            for name, value in named.items()
        }
        if torch.device(named.get("device") or "npu").type != "npu":
            return op(**on_host)  # as ones_like(x, device="cpu"), which does not read x
        if "device" in named:
            on_host["device"] = torch.device("cpu")
            on_host.pop("pin_memory", None)
        found = _shapes(op, on_host) if captured and new else None
        if not captured:
            found = op(**on_host)
        results = tree_map_only(Tensor, _empty_on_npu, select_new(found))
        targets = tree_map_only(Tensor, host, results)
        if captured:
            submit(lambda: _copy_each(targets, select_new(op(**on_host))))
        else:
            _copy_each(targets, select_new(found))
        made = iter(results)
        every = tuple(
            named[given[place]] if place in given else next(made) for place in range(len(returns))
        )
        return every[0] if len(returns) == 1 else every or None

    def select_new(found) -> list:
        listed = [found] if len(returns) == 1 else found
        return [listed[place] for place in new]

    return kernel


def _scalar_by_value(tensor: Tensor) -> Tensor:
    """As :func:`host`; a CPU scalar is copied, since a device gets its value with the work."""
    return tensor.clone() if tensor.is_cpu and tensor.dim() == 0 else host(tensor)


def _shapes(op: torch._ops.OpOverload, arguments: dict):
    """The outputs of ``op`` as Meta tensors."""
    arguments = tree_map_only(Tensor, _on_meta, arguments)
    if "device" in arguments:
        arguments["device"] = torch.device("meta")
    try:
        return op(**arguments)
    except NotImplementedError as error:  # nonzero, masked_select, ...
        raise _break_capture(
            f"the shape of what {op} returns depends on values, for which the host would wait for "
            "the device; keep it out of the captured function"
        ) from error


def _waits(self: Tensor, src: Tensor, non_blocking: bool = False) -> bool:
    return not non_blocking and self.device != src.device


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _empty_on_npu(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="npu")


def _to_copy(self: Tensor, *, non_blocking: bool = False, memory_format=None, **options) -> Tensor:
    strides = torch.empty_like(_on_meta(self), memory_format=memory_format).stride()
    options = {"dtype": self.dtype, "device": self.device} | {
        name: value for name, value in options.items() if value is not None
    }
    return torch.empty_strided(self.size(), strides, **options).copy_(self, non_blocking)


def _clone(self: Tensor, *, memory_format: torch.memory_format | None = None) -> Tensor:
    return _to_copy(self, memory_format=memory_format)


def _scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """``npu_scatter_nd_update_``: ``input[indices] = updates``, ``indices`` ``[..., n]``."""
    to, rows, values = host(input), host(indices), host(updates)
    submit(lambda: to.index_put_(rows.long().unbind(-1), values))
    return input


def _scatter_nd_update(self: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return _scatter_nd_update_(self.clone(), indices, updates)


def _standard(op: str) -> Callable:
    """torch_npu's standard op, on the CPU: that of this package, which takes its arguments."""

    own = {argument.name for argument in overload(op)._schema.arguments}

    def kernel(*args, **kwargs):
        given = {name: kwargs.pop(name) for name in [*kwargs] if name in own}
        check_keywords(op, kwargs)
        return overload(op)(*args, **given)

    return kernel


def _computing() -> Iterator[torch._ops.OpOverload]:
    """The aten ops that torch_npu computes with libraries of CANN, and that have a CPU kernel."""
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
        namespace, _, overload = name.partition("::")
        packet, _, overload = overload.partition(".")
        # torch_npu registers operators of its own under aten, too
        if namespace != "aten" or packet in MEMORY or not hasattr(torch.ops.aten, packet):
            continue
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        is_view = any(r.alias_info and not r.alias_info.is_write for r in op._schema.returns)
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        if not is_view and any(has_kernel(name, key) for key in CPU_KEYS):
            yield op


# these only copy, between devices, dtypes and strides
COPIES = {"_to_copy": _to_copy, "clone": _clone}


def install(cann: ctypes.CDLL) -> None:
    """Replaces all computation on NPU tensors in this process; ``cann`` is the simulator's
    library."""
    global _cann
    _cann = cann
    for function in (cann.ascend_host_model_of, cann.ascend_host_submit):
        function.argtypes, function.restype = [_ADDRESS], _MODEL
    cann.ascend_host_connect(*_CALLBACKS)
    aten = torch.library.Library("aten", "IMPL")
    for op in _computing():
        function = COPIES.get(op.name().removeprefix("aten::")) or _on_npu(op)
        aten.impl(op, function, "PrivateUse1", allow_override=True)
    torch_npu = torch.library.Library("npu", "IMPL")
    scatters = {
        "npu_scatter_nd_update": _scatter_nd_update,
        "npu_scatter_nd_update_": _scatter_nd_update_,
    }
    for name, function in scatters.items():
        torch_npu.impl(name, function, "PrivateUse1", allow_override=True)
    for op in swap.SWAPPED:
        standard = swap.standard(op)
        torch_npu.impl(standard, _standard(op), "CPU")
        torch_npu.impl(standard, _on_npu(standard), "PrivateUse1", allow_override=True)
    replace_calls("npu", _launch)
    _libraries.extend([aten, torch_npu])


def _replay(model: int) -> int:
    try:
        for work in _tapes[model]:
            work()
    except Exception as error:  # the caller, C++, raises this message
        _cann.ascend_host_failed(f"replay: {type(error).__name__}: {error}".encode())
        return 1
    return 0


def _forget(model: int) -> None:
    _tapes.pop(model, None)


def _copy(model: int, to: int, source: int, size: int) -> None:
    _tapes[model].append(lambda: ctypes.memmove(to, source, size))


def _fill(model: int, to: int, value: int, size: int) -> None:
    _tapes[model].append(lambda: ctypes.memset(to, value, size))


def _call(model: int, function: int, arguments: int) -> None:
    _tapes[model].append(lambda: _HOST_FUNCTION(function)(arguments))


_MODEL, _ADDRESS, _BYTES = ctypes.c_int64, ctypes.c_void_p, ctypes.c_size_t
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, _ADDRESS)
_CALLBACKS = (
    ctypes.CFUNCTYPE(ctypes.c_int, _MODEL)(_replay),
    ctypes.CFUNCTYPE(None, _MODEL)(_forget),
    ctypes.CFUNCTYPE(None, _MODEL, _ADDRESS, _ADDRESS, _BYTES)(_copy),
    ctypes.CFUNCTYPE(None, _MODEL, _ADDRESS, ctypes.c_int, _BYTES)(_fill),
    ctypes.CFUNCTYPE(None, _MODEL, _ADDRESS, _ADDRESS)(_call),
)
