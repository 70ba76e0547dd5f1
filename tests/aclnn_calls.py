"""Calls through aclnn and the same calls on the CPU."""

import cases
import torch
from npu_calls import on_npu, same
from torch.utils._pytree import tree_leaves

import custom_pypto
from custom_pypto.graph.prototypes import prototypes

PROTOTYPES = {prototype.name: prototype for prototype in prototypes()}


def written(op: str) -> list[str]:
    return [x.name for x in PROTOTYPES[op].outputs if x in PROTOTYPES[op].inputs]


def call(op: str, x: dict) -> list[torch.Tensor]:
    """What the op returns, and what it has written."""
    returned = tree_leaves(getattr(custom_pypto, op)(**x))
    return [tensor for tensor in returned if tensor is not None] + [x[n] for n in written(op)]


def agrees(op: str, x: dict) -> bool:
    """Whether the call equals that on the CPU, to the bit, and writes what that writes."""
    given = on_npu(x)
    got = call(op, given)
    assert all(tensor.device.type == "npu" for tensor in got)
    expected = call(op, cases.copied(x))
    return len(got) == len(expected) and all(map(same, got, expected))
