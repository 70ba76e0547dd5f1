"""Cost of an op call with CUSTOM_PYPTO_LOG off and at each of its levels.

The op is add_custom on one element, the smallest possible call. "Off" is the overhead of the public
function over the dispatcher alone: one Python call, nothing else precedes the kernel. Each level is
timed in its own process, with its output discarded.
"""

import logging
import os
import statistics
from collections.abc import Iterator
from functools import partial

import torch
from measure import Benchmark, Floor, in_own_process, interleaved

import custom_pypto

CALLS = 10_000
LEVELS = {
    "0": "off",
    "1": "the first call of each op",
    "2": "every call",
    "3": "and the inputs of a failing one",
}


def microseconds(repeats: int) -> tuple[float, float]:
    """Time of a call in the dispatcher, and the overhead of the public function."""
    torch.set_num_threads(1)
    logging.basicConfig(handlers=[logging.FileHandler(os.devnull)])
    x = torch.ones(1)
    dispatched, public = torch.ops.custom_pypto.add_custom.default, custom_pypto.add_custom

    def run(function) -> None:
        for _ in range(CALLS):
            function(x, x)

    calls = {"op": partial(run, dispatched), "public": partial(run, public)}
    seconds = interleaved(calls, repeats)
    more = [a - b for a, b in zip(seconds["public"], seconds["op"], strict=True)]
    each = 1e6 / CALLS
    return statistics.median(seconds["op"]) * each, statistics.median(more) * each


def at_level(level: str, repeats: int) -> tuple[float, float]:
    return in_own_process(microseconds, repeats, CUSTOM_PYPTO_LOG=level)


def floors(repeats: int) -> Iterator[Floor]:
    yield Floor("log off, us", lambda: at_level("0", repeats)[1], 1.0, at_least=False)


def rows(repeats: int) -> Iterator[list[str]]:
    for level, what in LEVELS.items():
        op, more = at_level(level, repeats)
        yield [level, what, f"{op:.2f}", f"{more:.2f}"]


BENCHMARKS = {
    "log": Benchmark(
        "Log",
        ["CUSTOM_PYPTO_LOG", "logs", "dispatcher, us", "public function, us more"],
        rows,
        floors=floors,
        of_kernels=False,
    )
}
