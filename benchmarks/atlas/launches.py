"""What a launch must do beside computing: the current stream, capture and replay, other devices.

python benchmarks/atlas/launches.py {streams,replay,devices}
"""

import sys
import time

import torch
import torch_npu  # noqa: F401

import custom_pypto

NOT_HERE = 77  # nothing to do here; the last line says why
K = 2048


class Selection:
    """A call of the lightning indexer whose tensors stay where they are, as in a captured step."""

    def __init__(self, seed: int = 0, device: str = "npu:0"):
        g = torch.Generator().manual_seed(seed)
        B, blocks, block_size = 4, 256, 128
        make = {"generator": g}
        self.query = torch.randn(B, 1, 64, 128, **make).bfloat16().to(device)
        self.key = torch.randn(blocks, block_size, 1, 128, **make).bfloat16().to(device)
        self.weights = torch.randn(B, 1, 64, **make).to(device)
        self.table = torch.arange(blocks, dtype=torch.int32).view(B, -1).to(device)
        self.lengths = torch.tensor([8192, 971, 1, 5000], dtype=torch.int32).to(device)

    def __call__(self) -> torch.Tensor:
        return custom_pypto.npu_lightning_indexer_pto(
            self.query,
            self.key,
            self.weights,
            actual_seq_lengths_key=self.lengths,
            block_table=self.table,
            sparse_count=K,
        )


def streams():
    """The call on other streams, one of them beside another call."""
    one, other = Selection(0), Selection(1)
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
    torch.npu.synchronize()
    yield "on two streams at once as alone", all(torch.equal(a, b) for a, b in both)
    lengths, one.lengths = one.lengths, one.lengths.clone()
    with torch.npu.stream(first):
        for _ in range(20):  # keeps the stream busy, so that a launch that does not wait shows
            one.query.mul_(1.0)
        one.lengths.sub_(1)
        shorter = one()
    torch.npu.synchronize()
    one.lengths.copy_(lengths - 1)
    after = one()
    yield "after an op on its stream that computes lengths", torch.equal(shorter, after)
    yield "other lengths give other positions", not torch.equal(after, expected)
    print(f"most memory allocated: {torch.npu.max_memory_allocated() / 2**20:.0f} MiB")


def replay():
    """The call in a graph, replayed after its lengths have changed."""
    select = Selection()
    before = select()  # compiles, which a capture does not allow
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        captured = select()
    graph.replay()
    torch.npu.synchronize()
    yield "a replay as eager", torch.equal(captured, before)
    select.lengths.sub_(1)
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
    here, there = Selection()(), Selection(device=f"npu:{count - 1}")()
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
