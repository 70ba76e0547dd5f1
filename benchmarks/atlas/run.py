"""Runs parts one after the other, to the end, whatever becomes of each."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from atlas import children
from atlas.children import FAILED, INTERRUPTED, OK, SKIPPED, Ended
from atlas.parts import Machine, Part, Step, next_step

REPOSITORY = Path(__file__).resolve().parents[2]
NOT_RUN = "not run"
# what torch_npu and others print last, whatever happened
NOISE = re.compile(r"^\[ERROR\] .*ERR99999|^\[W\d+ |^Warning: ASCEND_HOME_PATH|^\s*$")
HANGS = 2  # steps of a part that reach their time limit before the part is given up
LOG_BYTES = 2**20  # of a step in the archive; half from its beginning, half from its end


@dataclass
class Result:
    """What became of a part: of its steps, their logs, and why it was skipped, if it was.

    ``left_out``: how many steps did not run, because the device does not answer any more.
    """

    part: Part
    skipped: str = ""
    left_out: int = 0
    steps: list[tuple[Step, Ended, str]] = field(default_factory=list)

    @property
    def status(self) -> str:
        found = {ended.status for _, ended, _ in self.steps}
        if not found and not self.skipped:
            return NOT_RUN
        for status in (FAILED, INTERRUPTED, OK):
            if status in found:
                return status
        return SKIPPED

    @property
    def seconds(self) -> float:
        return sum(ended.seconds for _, ended, _ in self.steps)

    def failures(self) -> list[tuple[Step, Ended, str]]:
        return [step for step in self.steps if step[1].status == FAILED]

    def line(self) -> str:
        """The result in one line."""
        if self.skipped:
            return self.skipped
        if failed := self.failures():
            names = [f"{step.name} {ended.how}".strip() for step, ended, _ in failed]
            which = f"{len(failed)} of {len(self.steps)}: " if len(self.steps) > 1 else ""
            rest = f"; {self.left_out} not run after that" if self.left_out else ""
            return which + ", ".join(names) + rest
        texts = [text for _, _, text in self.steps]
        if self.status == SKIPPED or len(texts) == 1:
            return (lines(texts[-1]) or [""])[-1]
        done = sum(ended.status == OK for _, ended, _ in self.steps)
        others = [
            f"; {step.name} {ended.status}: {(lines(text) or [''])[-1]}"
            for step, ended, text in self.steps
            if ended.status != OK
        ]
        return f"{done} of {len(texts)} passed{''.join(others)}" if texts else ""

    def next_step(self, step: Step, ended: Ended, text: str) -> str:
        return next_step(ended.how, text, self.part.advice).replace("{step}", step.name)


def lines(text: str) -> list[str]:
    """The lines of a log that say something."""
    return [line for line in text.splitlines() if not NOISE.search(line)]


def run(
    parts: list[Part],
    machine: Machine,
    limit: float = 1.0,
    may_go_on: Callable[[Result], bool] = lambda first: True,
) -> list[Result]:
    """Runs the parts in order and prints a line as each step ends.

    An interruption ends the run; the parts after it are in the results as not run.

    Args:
        limit: multiplies every time limit.
        may_go_on: whether the others can run, by the result of the first part.
    """
    begin, results = time.monotonic(), [Result(part) for part in parts]
    for number, result in enumerate(results, 1):
        part = result.part
        if reason := part.why_skipped(machine):
            result.skipped = reason
            _say(begin, number, results, part.name, f"{SKIPPED}: {reason}")
            continue
        try:
            steps = part.steps(machine)
            for step in steps:
                name = f"{part.name} {step.name}".strip()
                _say(begin, number, results, name, end="")
                log = machine.scratch / f"{part.name}-{len(result.steps)}.log"
                seconds = part.seconds * limit
                ended = children.run(step.command, log, seconds, REPOSITORY, step.variables)
                result.steps.append((step, ended, _read(log)))
                how = "" if ended.status in (OK, SKIPPED) else f": {ended.how}"
                print(f"{ended.status}, {ended.seconds:.1f} s{how}", flush=True)
                if ended.status == INTERRUPTED:
                    raise KeyboardInterrupt
                if sum(ended.stopped for _, ended, _ in result.steps) == HANGS:
                    result.left_out = len(steps) - len(result.steps)
                    break
        except KeyboardInterrupt:
            print("\ninterrupted; the archive has what was done", flush=True)
            break
        if number == 1 and not may_go_on(result):
            break
    return results


def _say(begin: float, number: int, results: list, name: str, what: str = "", end="\n") -> None:
    minutes, seconds = divmod(int(time.monotonic() - begin), 60)
    head = f"{minutes:3d}:{seconds:02d} [{number:2d}/{len(results)}] {name}"
    print(f"{head:60} {what}", end=end, flush=True)


def _read(log: Path) -> str:
    # a path may hold bytes that are no UTF-8
    data = log.read_bytes()
    if len(data) > LOG_BYTES:
        half = LOG_BYTES // 2
        cut = f"\n[{len(data) - LOG_BYTES} bytes are left out]\n".encode()
        data = data[:half] + cut + data[-half:]
    return data.decode("utf-8", "surrogateescape")
