"""What a converter knows of its tensors: no data, and sizes that may be symbols."""

from collections.abc import Callable

import torch
from torch.fx.experimental.symbolic_shapes import optimization_hint
from torchair.ge import Tensor


def refuse(check: Callable[..., None], *arguments) -> None:
    """Refuses what an NPU cannot take, by the rules and in the words of eager mode.

    ``check`` is one of :mod:`custom_pypto.npu`. It is asked about the call that is being compiled,
    and again with symbols for the sizes that are dynamic: what it finds true of them becomes a
    guard, so that a call that breaks a rule is compiled anew, and refused. No size becomes a
    constant but one that a rule allows one value only.

    Caches must be contiguous as in eager mode, though GE's tensors have no strides: torchair would
    copy a strided cache at every call, and a written one back. Nothing else has to be. Only what
    ``CUSTOM_PYPTO_READY_ON_HOST`` demands does not apply: it is about eager launches.
    """
    check(*map(_in_this_call, arguments))
    check(*(x.meta if isinstance(x, Tensor) else x for x in arguments))


def _in_this_call(argument):
    """A tensor's sizes, strides and dtype as numbers, which messages can name."""
    if not isinstance(argument, Tensor):
        return argument
    meta = argument.meta
    size, stride = ([optimization_hint(n) for n in ns] for ns in (meta.size(), meta.stride()))
    return torch.empty_strided(size, stride, dtype=meta.dtype, device="meta")


def infer_shapes_anew(tensor: Tensor) -> None:
    """Lets torchair infer the shapes of this node without what it remembers of the nodes before.

    To write a node's shape rule, torchair calls the Meta function on sizes that are new symbols, in
    the fake mode of the graph. The symbols of every node have the same names, and the mode's cache
    would give this node results that hold those of another, which ends in "infer and generate sym
    shape failed" and no rule. The mode lives as long as this compilation.
    """
    tensor.meta.fake_mode.cache_enabled = False
