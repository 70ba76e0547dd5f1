"""What a launch must do besides computing: the current stream, capture and replay, other devices.

python benchmarks/atlas/launches.py {streams,replay,devices}
"""

import functools
import sys
import time
from pathlib import Path

import torch
import torch_npu  # noqa: F401

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tests")]

import npu_cases  # noqa: E402

from atlas.children import NOT_HERE  # noqa: E402

LENGTHS = "actual_seq_lengths_key"


def selection(device: str = "npu:0") -> functools.partial:
    """A call of the lightning indexer whose tensors stay where they are, as in a captured step."""
    return npu_cases.indexer(4, 1, [8192, 971, 1, 5000]).on(device)


def streams():
    """The call on other streams, one of them beside another call."""
    one, other = selection(), selection()
    other.keywords["query"].neg_()
    begin = time.perf_counter()
    expected = one()
    torch.npu.synchronize()
    print(f"first call, with its compilation: {time.perf_counter() - begin:.1f} s")
    also = other()
    torch.npu.synchronize()
    first, second = torch.npu.Stream(), torch.npu.Stream()
    with torch.npu.stream(first):
        alone = one()
    torch.npu.synchronize()
    yield "on another stream as on the current one", torch.equal(alone, expected)
    both = []
    for _ in range(4):
        with torch.npu.stream(first):
            both.append((one(), expected))
        with torch.npu.stream(second):
            both.append((other(), also))
    before = one.keywords[LENGTHS].clone()
    torch.npu.synchronize()
    yield "on two streams at once as alone", all(torch.equal(a, b) for a, b in both)
    with torch.npu.stream(first):
        for _ in range(20):  # keeps the stream busy, so that a launch that does not wait shows
            one.keywords["query"].mul_(1.0)
        one.keywords[LENGTHS].sub_(1)
        shorter = one()
    torch.npu.synchronize()
    one.keywords[LENGTHS].copy_(before - 1)
    after = one()
    yield "after an op on its stream that computes lengths", torch.equal(shorter, after)
    yield "other lengths give other positions", not torch.equal(after, expected)
    print(f"most memory allocated: {torch.npu.max_memory_allocated() / 2**20:.0f} MiB")


def replay():
    """The call in a graph, replayed after its lengths have changed."""
    select = selection()
    before = select()  # compiles, which a capture does not allow
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        captured = select()
    graph.replay()
    torch.npu.synchronize()
    yield "a replay as eager", torch.equal(captured, before)
    select.keywords[LENGTHS].sub_(1)
    graph.replay()
    torch.npu.synchronize()
    yield "a replay with other lengths as eager", torch.equal(captured, select())
    yield "other lengths give other positions", not torch.equal(captured, before)


def devices():
    """The call on the last device, while the first one is the current one."""
    count = torch.npu.device_count()
    if count < 2:
        print("one NPU only")
        sys.exit(NOT_HERE)
    here, there = selection()(), selection(f"npu:{count - 1}")()
    yield "current device after the call: the first", torch.npu.current_device() == 0
    yield f"on npu:{count - 1} as on npu:0", torch.equal(here.cpu(), there.cpu())


def main(check: str) -> int:
    wrong = 0
    for what, right in CHECKS[check]():
        wrong += not right
        print("ok     " if right else "FAILED ", what, flush=True)
    print(f"{wrong} wrong" if wrong else "all right")
    return int(wrong > 0)


CHECKS = {check.__name__: check for check in (streams, replay, devices)}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
