"""Calls of the ops on NPU tensors, on the host simulator of CANN, and replays of captured ones."""

import functools

import torch
from cases import copied, inputs_of, written
from torch.utils._pytree import tree_leaves, tree_map_only

import custom_pypto
from custom_pypto.descriptions import OPS
from custom_pypto.graph.prototypes import prototypes

PROTOTYPES = {prototype.op: prototype for prototype in prototypes()}
CALLS = {
    op: functools.partial(inputs_of, op, (2, 1), (30, 17), on_npu=True, dtype=torch.bfloat16)
    for op in OPS
}


def on_npu(inputs: dict) -> dict:
    return tree_map_only(torch.Tensor, lambda x: x.npu(), inputs)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, NaN of the caches' unused rows included."""
    a, b = a.cpu().contiguous(), b.cpu().contiguous()
    return a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def call(op: str, x: dict) -> list[torch.Tensor]:
    """What the op returns, and what it has written."""
    returned = tree_leaves(getattr(custom_pypto, op)(**x))
    return [tensor for tensor in returned if tensor is not None] + [x[n] for n in written(op)]


def agrees(op: str, x: dict) -> bool:
    """Whether the call equals that on the CPU, to the bit, and writes what that writes."""
    given = on_npu(x)
    got = call(op, given)
    assert all(tensor.device.type == "npu" for tensor in got)
    expected = call(op, copied(x))
    return len(got) == len(expected) and all(map(same, got, expected))


def changed(op: str) -> dict:
    """The same call with other values throughout: lengths, block tables, indices, all data. Lengths
    that are integers of the host stay as they are, since a capture keeps them.
    """
    of_host = any(isinstance(x, list) for x in CALLS[op]().values())
    lengths = ((2, 1), (30, 17)) if of_host else ((1, 2), (20, 30))
    return inputs_of(op, *lengths, on_npu=True, dtype=torch.bfloat16, seed=1)


def assert_replays_follow(graph, call, static: dict, captured: list, calls: list[dict]) -> None:
    """Replays of a call of the inputs ``static`` compute what ``call`` does with those of each."""
    for values in calls:
        expected = call(on_npu(values))
        for name, tensor in values.items():
            if isinstance(tensor, torch.Tensor):
                static[name].copy_(tensor)
        graph.replay()
        assert all(map(same, captured, expected))
