"""Calls through aclnn and the same calls on the CPU."""

import cases
from npu_calls import call, on_npu, same

from custom_pypto.graph.prototypes import prototypes

PROTOTYPES = {prototype.op: prototype for prototype in prototypes()}


def agrees(op: str, x: dict) -> bool:
    """Whether the call equals that on the CPU, to the bit, and writes what that writes."""
    given = on_npu(x)
    got = call(op, given)
    assert all(tensor.device.type == "npu" for tensor in got)
    expected = call(op, cases.copied(x))
    return len(got) == len(expected) and all(map(same, got, expected))
