"""What a run costs: CPU time of tests, of files and of the whole, children included.

A run says before it starts how long it takes, afterwards which files were the dearest and how to
run a failed test alone. In CI a run above its budget fails. The budget is not in seconds: one took
11 CPU minutes on a quiet Intel Xeon with AMX and 29 on an AMD EPYC of Zen 3 with busy neighbours.
"""

import json
import os
import resource
import statistics
from collections import Counter

import pytest
from processes import python
from repository import REPOSITORY

# CPU time of `bash run.sh test`, and of `--all`, on the host simulator of CANN included, in imports
# of torch on the same machine right after: about 700 on the EPYC, of --all not measured there
BUDGETS = {"default": 1000, "all": 6000}
TIMES = REPOSITORY / "build/test_times.json"  # CPU seconds of the last whole run of each kind
# before the first run on a machine, in CPU seconds
USUAL = {
    "default": 530.0,
    "default on the simulator": 120.0,
    "all": 2700.0,
    "all on the simulator": 420.0,
}
DEAREST = 10
started = pytest.StashKey[float]()


def cpu_seconds() -> float:
    """Of this process and its ended children."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def import_of_torch() -> float:
    """CPU seconds of a process that does nothing else, the median of five."""

    def seconds() -> float:
        begin = cpu_seconds()
        python("-c", "import torch", TORCH_DEVICE_BACKEND_AUTOLOAD="0").check_returncode()
        return cpu_seconds() - begin

    return statistics.median(seconds() for _ in range(5))


class CpuTime:
    """Sums what the tests of a run take, in the process that reports."""

    def __init__(self, config):
        self.config = config
        self.kind = "all" if config.getoption("all") else "default"
        self.kind += " on the simulator" if config.getoption("ascend_host") else ""
        options = config.option
        named = config.args_source is config.ArgsSource.ARGS
        self.whole = not (named or options.keyword or options.markexpr or options.lf)
        self.files, self.workers, self.failed = Counter(), 0.0, []
        self.problem: str | None = None

    def pytest_report_header(self):
        if not self.whole:
            return None
        seconds = known_times().get(self.kind, USUAL[self.kind])
        cores = min(os.cpu_count(), self.config.getoption("maxprocesses", None) or 1)
        what = "every case" if self.kind.startswith("all") else "a few cases of each property"
        return (
            f"tests: {what} ({self.kind}), about {seconds / 60:.1f} CPU minutes, "
            f"{seconds / 60 / cores:.1f} minutes on {cores} free cores"
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        item.stash[started] = cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if call.when == "teardown":  # xdist hands it on with the report
            report.cpu_seconds = cpu_seconds() - item.stash[started]
        return report

    def pytest_runtest_logreport(self, report):
        self.files[report.nodeid.split("::")[0]] += getattr(report, "cpu_seconds", 0)
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)

    def pytest_sessionfinish(self, session, exitstatus):
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["cpu_seconds"] = cpu_seconds()
        elif self.whole and exitstatus in (0, 1):
            TIMES.parent.mkdir(exist_ok=True)
            TIMES.write_text(json.dumps(known_times() | {self.kind: self.total()}))
            self.problem = over_budget(self.kind) if "CI" in os.environ else None
            if self.problem:
                session.exitstatus = 1

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error):
        self.workers += getattr(node, "workeroutput", {}).get("cpu_seconds", 0)

    def total(self) -> float:
        return self.workers or cpu_seconds()  # ended workers are children, too

    def pytest_terminal_summary(self, terminalreporter):
        write = terminalreporter.write_line
        minutes = self.total() / 60
        terminalreporter.section(f"{minutes:.1f} CPU minutes; the dearest files, in seconds")
        for file, seconds in self.files.most_common(DEAREST):
            write(f"{seconds:7.1f}  {file}")
        for nodeid in self.failed:
            alone = " --all" if self.config.getoption("all") else ""
            write(f"again, alone: bash run.sh test{alone} -n 0 '{nodeid}'")
        if self.problem:
            write(self.problem)


def known_times() -> dict[str, float]:
    return json.loads(TIMES.read_text()) if TIMES.exists() else {}


def over_budget(kind: str) -> str | None:
    """Why the last run of this kind, and on the simulator, costs too much."""
    kind = kind.partition(" ")[0]
    parts = {part: s for part, s in known_times().items() if part.startswith(kind)}
    seconds = sum(parts.values())
    unit = import_of_torch()
    if seconds <= BUDGETS[kind] * unit:
        return None
    return (
        f"the run took {seconds / 60:.1f} CPU minutes {parts}, {seconds / unit:.0f} times the "
        f"{unit:.2f} s of an import of torch, more than its {BUDGETS[kind]}"
    )
