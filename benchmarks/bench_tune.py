"""Searches tile settings of the NPU kernels.

The search covers each shape class of an op's table in custom_pypto/kernels/tiling.py. It alternates
between neighbours of the best setting so far, which differ in one field, and random settings, which
share about half of its fields. The score of a setting is the geometric mean, over the class's
shapes, of its latency by PyPTO's cost model. A setting is rejected if it slows any shape by more
than 1 % against the current entry, or does not compile in time. The model counts tasks, copies and
matmuls, but gives every core its own memory bandwidth: among settings within 1 % of each other, the
one that reads least from memory wins, then the one with the fewest tasks and edges. For the same
reason, and because the model counts sorting near zero, fields that share loads or size sorts are
not searched.

A setting that is better by 1 % or more is accepted if all ops that use it pass their checks of
:mod:`custom_pypto.verify` in the interpreter, in every class. The interpreter runs the program
before tiling, so this validates the program of the setting, not the compiler's output for its
tiles. The setting then replaces the entry in tiling.py; ``bash build_and_install.sh`` brings it
into an installed package. The search is deterministic up to the end of the budget.
"""

import ast
import contextlib
import itertools
import math
import random
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import npu_cases
from measure import Benchmark
from tqdm import tqdm

from custom_pypto import simulation, verify
from custom_pypto.files import replacing
from custom_pypto.kernels import tiling

TILING = Path(__file__).resolve().parents[1] / "custom_pypto/kernels/tiling.py"
MARGIN = 0.01  # smaller differences are ties


@dataclass(frozen=True)
class Subject:
    """The search space of an op."""

    table: str  # name of the dict in tiling.py
    ops: tuple[str, ...]  # that use it
    cases: dict[str, Callable[[], list[npu_cases.Case]]]  # of each class
    values: dict[str, tuple]  # of each searched field
    # how often data shared by all heads is read
    loads: Callable[[Any], int] = field(default=lambda settings: 1)


SUBJECTS = {
    "indexer": Subject(
        "INDEXER",
        ("npu_lightning_indexer_pto", "npu_sparse_attention_pto"),
        {
            "1 token, 1 chunk": lambda: [npu_cases.indexer(1, 1, 8192)],
            "more": lambda: [
                npu_cases.indexer(4, 1, 8192),
                npu_cases.indexer(1, 1, 65536),
                npu_cases.indexer(4, 2, [65536, 971, 32869, 16383]),
            ],
            "4 tokens per tile": lambda: [npu_cases.indexer(1, 256, 8192)],
        },
        dict(
            part=(1, 2, 4, 8),
            keys=(128, 512),  # 512 is 256 with the model's 64 heads
            l1_reuse=(1, 2, 4, 8, 16),
            tiles=(1, 2, 4, 8, 16),
            m=(64, 128, 256),
            n=(64, 128),
        ),
    ),
    "attention": Subject(
        "ATTENTION",
        ("npu_sparse_flash_attention_pto", "npu_sparse_attention_pto"),
        {
            "1-2 tokens": lambda: [npu_cases.attention(1, 1, 4096)],
            "3-4 tokens": lambda: [npu_cases.attention(4, 1, 8192)],
            "5-8 tokens": lambda: [
                npu_cases.attention(4, 2, 8192),
                npu_cases.attention(4, 2, 8192, heads=64),
                npu_cases.attention(4, 2, 8192, heads=16),
            ],
            "9-16 tokens": lambda: [npu_cases.attention(16, 1, 16384)],
            "17-32 tokens": lambda: [npu_cases.attention(32, 1, 16384)],
            "more tokens": lambda: [npu_cases.attention(1, 256, 8192)],
        },
        dict(
            heads=(32, 64, 128),
            score_keys=(64, 128, 256),
            output_columns=(64, 128, 256),
            output_keys=(128, 256, 512, 1024, 2048),
            rows=(2, 4, 8, 16),
            l1_reuse=(0, 1, 2, 3, 4, 6, 8),
            vec_nbuffer=(0, 1, 2, 3, 4, 5, 6, 8, 16),
        ),
        # every group of heads gathers the selected rows
        loads=lambda settings: math.ceil(npu_cases.N1 / settings.heads),
    ),
    "fused": Subject(
        "PROLOG",
        ("npu_sparse_attention_pto",),
        {
            "1-4 tokens": lambda: [npu_cases.fused(4, 1, 8192)],
            "5-16 tokens": lambda: [npu_cases.fused(4, 2, 8192)],
            "17-64 tokens": lambda: [npu_cases.fused(32, 1, 2048)],
            "more tokens": lambda: [npu_cases.fused(65, 1, 2048)],
        },
        dict(
            rows=(1, 2, 4, 8, 16),
            split=(1, 2, 4, 8),
            down_n=(64, 128, 192, 256, 384),
            side_n=(64, 128, 192, 256, 384),
            up_n=(192, 384, 576, 768, 1152),
            index_n=(128, 256, 384, 512, 768),
            heads=(4, 8, 16, 32),
            cube_nbuffer=(1, 2, 4),
            absorb_nbuffer=(1, 2, 4, 6),
        ),
    ),
}


@dataclass(frozen=True)
class Trial:
    """A setting and its figures by the cost model."""

    settings: Any
    latencies: list[float]  # µs, of each shape
    score: float  # their geometric mean
    loads: int
    work: int  # tasks and edges


class Search:
    """The search for the settings of one class."""

    def __init__(self, subject: Subject, name: str):
        self.subject, self.name = subject, name
        self.table = getattr(tiling, subject.table)
        self.cases = subject.cases[name]()
        self.random = random.Random(0)
        start = time.monotonic()
        self.shipping = self.measure(self.table[name])
        # a setting that compiles much more slowly is rejected
        self.timeout = 10 + 3 * (time.monotonic() - start)
        self.tried: dict[Any, Trial | None] = {self.shipping.settings: self.shipping}

    def measure(self, settings, timeout: float | None = None, limits=None) -> Trial | None:
        """The model's figures; ``None`` if a shape's latency is above its limit."""
        found = []

        def launch(kernel, tensors):
            found.append(simulation.estimate(kernel, *tensors.values(), timeout=timeout))

        with mock.patch.dict(self.table, {self.name: settings}):
            for i, case in enumerate(self.cases):
                case.launch(launch)
                if limits and found[-1].latency_us > limits[i]:
                    return None
        latencies = [estimate.latency_us for estimate in found]
        return Trial(
            settings,
            latencies,
            math.prod(latencies) ** (1 / len(latencies)),
            loads=self.subject.loads(settings),
            work=sum(estimate.tasks + estimate.edges for estimate in found),
        )

    def best(self) -> Trial:
        """The best setting, or the current entry if none is better by the margin."""
        trials = [trial for trial in self.tried.values() if trial]
        limit = min(
            (1 + MARGIN) * min(trial.score for trial in trials),
            (1 - MARGIN) * self.shipping.score,
        )
        close = [trial for trial in trials if trial.score <= limit]
        return min(close, key=lambda t: (t.loads, t.work, t.score), default=self.shipping)

    def proposed(self):
        """An untried setting, if any."""
        best, values = self.best().settings, self.subject.values
        neighbours = [replace(best, **{name: v}) for name in values for v in values[name]]
        neighbours = [settings for settings in neighbours if settings not in self.tried]
        if neighbours and len(self.tried) % 2:
            return self.random.choice(neighbours)
        for _ in range(100):
            # keeps about half of the fields, since few other settings compile
            drawn = {name: self.random.choice(values[name]) for name in values}
            drawn = {name: value for name, value in drawn.items() if self.random.random() < 0.5}
            point = replace(best, **drawn)
            if point not in self.tried:
                return point
        return self.random.choice(neighbours) if neighbours else None

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        limits = [(1 + MARGIN) * latency for latency in self.shipping.latencies]
        with tqdm(desc=self.name, unit=" settings", disable=None, leave=False) as progress:
            while (left := end - time.monotonic()) > 0 and (settings := self.proposed()):
                self.tried[settings] = None
                with contextlib.suppress(simulation.SimulationError):
                    self.tried[settings] = self.measure(settings, min(self.timeout, left), limits)
                progress.set_postfix_str(f"best {listed(self.best().latencies)} µs")
                progress.update()

    def accepted(self) -> Trial:
        """The best setting that passes the checks."""
        while (winner := self.best()) is not self.shipping:
            if gives_right_numbers(self.subject, winner.settings):
                break
            self.tried[winner.settings] = None
        return winner


def gives_right_numbers(subject: Subject, settings) -> bool:
    """Whether all ops pass their checks in the interpreter with these settings in every class."""
    table = getattr(tiling, subject.table)
    with mock.patch.dict(table, dict.fromkeys(table, settings)):
        return all(verify.verify("interpreter", op) for op in subject.ops)


def listed(numbers: Iterable[float]) -> str:
    return ", ".join(f"{number:.2f}" for number in numbers)


def write_entry(file: Path, table: str, name: str, settings) -> None:
    """Replaces one entry of a table in the source; no other byte changes.

    The replacement is atomic.
    """
    source = file.read_bytes()
    (entries,) = [
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets) == table
    ]
    (old,) = [
        value
        for key, value in zip(entries.keys, entries.values, strict=True)
        if ast.literal_eval(key) == name
    ]
    # as ruff formats it, without fields at their default
    new = f"{type(settings).__name__}(\n"
    for each in fields(settings):
        value = getattr(settings, each.name)
        if value != each.default:
            new += f"        {each.name}={value!r},\n"
    new += "    )"
    starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
    begin = starts[old.lineno - 1] + old.col_offset
    end = starts[old.end_lineno - 1] + old.end_col_offset
    with replacing(file) as part:
        part.write_bytes(source[:begin] + new.encode() + source[end:])
        shutil.copymode(file, part)


def tune(op: str, budget: float, file: Path = TILING) -> Iterator[list[str]]:
    """Tunes the classes of ``SUBJECTS[op]`` and writes better settings into ``file``.

    Args:
        budget: seconds, shared equally by the classes; excludes the checks of better settings.
    Yields:
        class, shapes, latencies before and after, settings tried, and the best.
    """
    if op not in SUBJECTS:
        raise SystemExit(f"tune: --op must be one of {', '.join(SUBJECTS)}, got {op!r}")
    subject = SUBJECTS[op]
    for shape_class in subject.cases:
        search = Search(subject, shape_class)
        search.run(budget / len(subject.cases))
        winner, old = search.accepted(), search.shipping
        shapes = "; ".join(case.shape for case in search.cases)
        latencies = [listed(trial.latencies) for trial in (old, winner)]
        if winner is not old:
            write_entry(file, subject.table, shape_class, winner.settings)
            search.table[shape_class] = winner.settings
        best = "stays" if winner is old else str(winner.settings)
        yield [shape_class, shapes, *latencies, str(len(search.tried) - 1), best]


BENCHMARKS = {
    "tune": Benchmark(
        "Tiles of {op} by PyPTO's cost model",
        ["class", "B, S1, keys", "µs before", "µs after", "tried", "settings"],
        tune,
        of_kernels=False,
    )
}
