"""Logs calls of the ops as set by ``CUSTOM_PYPTO_LOG``, and replays a failed call.

The variable is read once, at import; docs/diagnosis.md describes the levels. A logging function is
then registered in torch's dispatcher before the kernels of every op, where all calls pass: those of
the public functions, of ``torch.ops`` and of compiled graphs. Dynamo does not see it, so graphs
stay whole. At level 0 nothing is registered, at no cost.
"""

import importlib.util
import json
import logging
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from . import threads
from .descriptions import ALL_OPS, LAYER_OPS
from .schemas import given, overload
from .version import __version__

VARIABLE = "CUSTOM_PYPTO_LOG"
# per process, so that repeated failing calls cannot fill the disk
MOST_FILES = 10
METADATA = "custom_pypto"
LOGGED = (*ALL_OPS, *LAYER_OPS)

logger = logging.getLogger("custom_pypto")
_library: torch.library.Library | None = None  # its registrations live as long as it does
_files = 0


def start_if_wanted() -> None:
    """Starts logging at the level that the variable sets; does nothing if it is not set.

    Raises:
        ValueError: the variable is none of 0, 1, 2, 3.
        ImportError: level 3 without safetensors.
    """
    global _library
    asked = os.environ.get(VARIABLE) or "0"
    if asked not in ("0", "1", "2", "3"):
        raise ValueError(
            f"custom_pypto: {VARIABLE} must be 0 (off), 1 (first call of each op), 2 (every "
            f"call) or 3 (also the inputs of failing calls), got {asked!r}"
        )
    level = int(asked)
    if level == 0:
        return
    if level == 3 and importlib.util.find_spec("safetensors") is None:
        raise ImportError(
            f"custom_pypto: {VARIABLE}=3 needs safetensors to write the inputs of "
            "failing calls; pip install safetensors, or set it to 2"
        )
    logger.setLevel(logging.DEBUG)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    # with a configured root logger, records go there only, not twice
    handler.addFilter(lambda record: not logging.root.handlers)
    logger.addHandler(handler)
    if crowded := threads.oversubscription(torch.get_num_threads()):
        logger.info("oversubscribed: %s", crowded)
    _library = torch.library.Library("custom_pypto", "IMPL")
    for op in LOGGED:
        # below autograd and fake tensors, above the kernels of every device
        function = _logged(op, overload(op).redispatch, level)
        _library.impl(overload(op), function, "BackendSelect", with_keyset=True)


def _logged(op: str, redispatch, level: int):
    backends: set[str] = set()  # those that have run the op
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def call(keys, *args, **kwargs):
        device = _device(args)
        # tracing and torch.compile call with meta tensors, to learn the shape of the output
        if device is None or device.type == "meta":
            return redispatch(keys & below, *args, **kwargs)
        backend = _backend(device)
        if level >= 2 or backend not in backends:
            first = "" if backend in backends else "first call, "
            backends.add(backend)
            # before the call runs: if it crashes the process, the last line names it
            text = f"{op}: {first}on {backend}: {_described(given(op, args, kwargs))}"
            logger.log(logging.INFO if first else logging.DEBUG, text)
        try:
            return redispatch(keys & below, *args, **kwargs)
        except Exception as error:
            if level == 3:
                _report(op, given(op, args, kwargs), error)
            raise

    return call


def _device(args) -> torch.device | None:
    """Device of the first tensor; None without tensors, a call that the contract rejects."""
    return next((value.device for value in args if isinstance(value, Tensor)), None)


def _backend(device: torch.device) -> str:
    return f"cpu ({torch.ops.custom_pypto.cpu_isa()})" if device.type == "cpu" else str(device)


def _described(arguments: dict) -> str:
    def one(value) -> str:
        if isinstance(value, tuple):
            return ", ".join(map(one, value))
        if not isinstance(value, Tensor):
            return repr(value)
        strides = "" if value.is_contiguous() else f" strides {list(value.stride())}"
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} {list(value.shape)}{strides}{_range(value)}"

    return ", ".join(f"{name} {one(value)}" for name, value in arguments.items())


def _range(value: Tensor) -> str:
    """Of positions, lengths and block ids: the ops clamp or skip those out of range."""
    if value.dtype not in (torch.int32, torch.int64) or value.device.type != "cpu":
        return ""  # reading from a device would wait for it
    return f" of {value.min()} to {value.max()}" if value.numel() else ""


def _report(op: str, arguments: dict, error: Exception) -> None:
    """Logs the failure and the file with the inputs; never raises in place of ``error``."""
    global _files
    text = f"{op} failed: {type(error).__name__}: {error}"
    if _files >= MOST_FILES:
        reason = f"limit of {MOST_FILES} files per process reached"
        logger.error(f"{text}\n  inputs not written: {reason}")
        return
    _files += 1
    try:
        path = _write(op, arguments, error)
    except Exception as reason:  # a full disk, a device that no longer responds
        logger.error(f"{text}\n  inputs not written: {type(reason).__name__}: {reason}")
        return
    device = _device(arguments.values())
    command = "custom-pypto"
    if shutil.which(command) is None:  # in an environment that is not activated
        command = f"{shlex.quote(sys.executable)} -m custom_pypto_command"
    reproducer = f"{command} replay {shlex.quote(path)} --device {device}"
    logger.error(f"{text}\n  inputs in {path}\n  reproduce: {reproducer}")


def _write(op: str, arguments: dict, error: Exception) -> str:
    from safetensors.torch import save

    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    call = {
        "op": op,
        "version": __version__,
        "error": str(error),
        "arguments": {name: v for name, v in arguments.items() if name not in tensors},
        "strides": {name: tensor.stride() for name, tensor in tensors.items()},
    }
    # copies, since safetensors supports neither strides nor tensors that share memory
    values = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    data = save(values, metadata={METADATA: json.dumps(call)})
    # a new file that only this user may read: the values are someone's prompt
    handle, path = tempfile.mkstemp(prefix=f"custom_pypto-{op}-", suffix=".safetensors")
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    return path


def read_call(path: str | Path, device: str = "cpu") -> tuple[str, dict, str]:
    """Op, arguments and error of a failed call, from a file written at level 3.

    Tensors get their original strides.

    Raises:
        ValueError: not such a file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            call = json.loads((file.metadata() or {})[METADATA])
            values = {name: file.get_tensor(name).to(device) for name in call["strides"]}
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(
            f"replay: {path} must be a file written by {VARIABLE}=3, got {error!r}"
        ) from error
    if call["op"] not in LOGGED:
        raise ValueError(
            f"replay: {path}: op must be one of {', '.join(sorted(LOGGED))}, got {call['op']!r}"
        )
    strided = {name: _strided(values[name], s) for name, s in call["strides"].items()}
    return call["op"], strided | call["arguments"], call["error"]


def _strided(value: Tensor, strides: list[int]) -> Tensor:
    if not value.numel():
        return value.as_strided(value.shape, strides)
    elements = 1 + sum((n - 1) * s for n, s in zip(value.shape, strides, strict=True))
    memory = value.new_empty(elements)
    # elements may share memory, as in an expanded tensor
    places = torch.arange(elements, device=value.device).as_strided(value.shape, strides)
    memory[places.flatten()] = value.flatten()
    return memory.as_strided(value.shape, strides)


def replay(path: str | Path, device: str = "cpu") -> bool:
    """Repeats the call in ``path`` on ``device`` and prints the outcome.

    Returns:
        Whether it succeeded.
    """
    op, arguments, error = read_call(path, device)
    print(f"{op} on {_backend(torch.device(device))}: {_described(arguments)}\nthen: {error}")
    try:
        out = getattr(torch.ops.custom_pypto, op)(**arguments)
    except RuntimeError as failure:
        print(f"now:  {failure}")
        return False
    print(f"now:  {_described({'returns': out})}")
    return True
