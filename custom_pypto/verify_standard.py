"""Compares torch_npu's own ops with our references: ``custom-pypto verify --standard``.

The ops of our names without ``_pto`` have the same meaning. A check is rejected where torch_npu's
op lacks an argument that it needs, or raises; the limits of CANN are narrower than ours.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from . import env, reference
from .descriptions import ALL_OPS
from .schemas import bound
from .standard import KEYWORDS
from .verify import ROW, copied, one_thread, report


class Rejected(Exception):
    """torch_npu's op does not take this call."""


def verify_standard(device: str = "npu", op: str = "") -> bool:
    """Runs the checks of every op, or of ``op``, that torch_npu has; prints one line each.

    Returns:
        Whether a check passed and none failed.
    """
    if device == "npu" and (problem := env.collect()["npu"]["problem"]):
        print(f"missing: {problem['what']}\nremedy:  {problem['remedy']}")
        return False
    print(ROW.format("result", f"torch_npu's op on {device}", "dtype", "shape", "error", "allowed"))
    results = []
    for name in [op] if op else ALL_OPS:
        standard = name.removesuffix("_pto")
        if not hasattr(torch.ops.npu, standard):
            print(f"missing torch_npu has no {standard}")
            continue
        for dtype, shape, arguments in reference.MODULES[name].checks(
            [torch.bfloat16, torch.float16]
        ):
            case = standard, str(dtype).removeprefix("torch."), shape
            results.append(_result(device, name, case, arguments))
    counts = ", ".join(f"{results.count(kind)} {kind}" for kind in ("ok", "FAILED", "rejected"))
    print(f"torch_npu's own ops on {device}: {counts}")
    return "ok" in results and "FAILED" not in results


def _result(device: str, op: str, case: tuple[str, str, str], arguments: dict) -> str:
    try:
        got = call_of(op, copied(arguments, device))()
    except (Rejected, RuntimeError) as reason:
        print(ROW.format("reject", *case, "-", "-"))
        print(f"        {str(reason).splitlines()[0]}", flush=True)
        return "rejected"
    with one_thread():
        expected = getattr(reference, op)(**arguments)
        got = tree_map_only(Tensor, Tensor.cpu, _alike(got, expected))
        error, allowed = reference.MODULES[op].error(got, expected, arguments, arguments)
    return "ok" if report(case, error, allowed) else "FAILED"


def call_of(op: str, arguments: dict[str, Any]) -> Callable[[], Any]:
    """The call of torch_npu's op with the arguments of ours.

    Raises:
        Rejected: it lacks an argument that is not at its default.
    """
    standard = getattr(torch.ops.npu, op.removesuffix("_pto")).default
    names = [argument.name for argument in standard._schema.arguments]
    ours = bound(op, (), arguments)
    given = ours | {name: keyword.legal for name, keyword in KEYWORDS.get(op, {}).items()}
    # CANN takes None from 9.2 on; a gradient tells the value from the key
    if given.get("value", ...) is None and "d_out" not in given:
        given["value"] = given["key"]
    defaults = bound(op, (), {})
    for name in ours.keys() - set(names):
        # a layout of keys by its own name is that of the query
        same = ours[name] in (defaults.get(name), ours.get("layout"))
        if isinstance(ours[name], Tensor) or not same:
            raise Rejected(f"torch_npu's op has no argument {name}, here {_text(ours[name])}")
    return functools.partial(standard, **{name: given[name] for name in names if name in given})


def _text(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else repr(value)


def _alike(got: Any, expected: Any) -> Any:
    """The results that the reference has, too; of those that torch_npu lacks, only empty ones."""
    found = tree_leaves(got)
    if isinstance(expected, Tensor):
        return found[0]
    more = expected[len(found) :]
    if any(x.numel() for x in more):
        raise RuntimeError(f"torch_npu returns {len(found)} tensors, expected {len(expected)}")
    return (*found[: len(expected)], *(x.to(found[0].device) for x in more))
