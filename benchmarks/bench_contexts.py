"""The indexer of one decoded token, compared with reading its keys once.

int8 keys have a scale of 2 bytes for each. In between torch sums floats of as many bytes.
"""

import statistics
from collections.abc import Iterator

import torch
from bench_ops import int8_indexer_cases
from inputs import D
from measure import Benchmark, interleaved, median_ms, ratio

CONTEXTS = (4096, 65536, 262144, 1048576)


def rows(threads: int, repeats: int) -> Iterator[list[str]]:
    torch.set_num_threads(threads)
    for keys in CONTEXTS:
        for name, case in zip(("bfloat16", "int8"), int8_indexer_cases(1, keys), strict=True):
            seconds = interleaved({"op": case.run, "sum": case.read}, repeats)
            rate = case.flop / statistics.median(seconds["op"]) / 1e9
            times = [median_ms(seconds[call], 3) for call in ("op", "sum")]
            yield [
                f"{keys // 1024}K keys of {D}",
                name,
                *times,
                f"{ratio(seconds['op'], seconds['sum']):.2f}",
                f"{rate:.0f}",
            ]


BENCHMARKS = {
    "contexts": Benchmark(
        ["cached", "keys", "ms", "ms of a sum", "ratio", "GFLOP/s"],
        rows,
        cases=2,
        variant="threads: {threads}",
    )
}
