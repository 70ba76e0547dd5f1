"""What a run costs: CPU time of tests, of files and of the whole, children included.

A run says before it starts how long it takes, afterwards which files were the dearest and how to
run a failed test alone. In CI a default run above its budget fails.
"""

import json
import os
import resource
from collections import Counter

import pytest
from repository import REPOSITORY

# CPU minutes of `bash run.sh test`, on the host simulator of CANN included, with room for slower
# CPUs than the Intel Xeon with AMX that the numbers below are from
BUDGET = 25
TIMES = REPOSITORY / "build/test_times.json"  # CPU seconds of the last whole run of each kind
# before the first run on a machine, in CPU seconds; those of --all are estimates
USUAL = {
    "default": 660.0,
    "default on the simulator": 200.0,
    "all": 1300.0,
    "all on the simulator": 500.0,
}
DEAREST = 10
started = pytest.StashKey[float]()


def cpu_seconds() -> float:
    """Of this process and its ended children."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


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
            if "CI" in os.environ and over_budget():
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
        if self.whole and (problem := over_budget()):
            write(problem)


def known_times() -> dict[str, float]:
    return json.loads(TIMES.read_text()) if TIMES.exists() else {}


def over_budget() -> str | None:
    """Why the last default run, of both kinds, costs too much."""
    parts = {kind: s for kind, s in known_times().items() if kind.startswith("default")}
    minutes = sum(parts.values()) / 60
    if minutes <= BUDGET:
        return None
    return f"the default run took {minutes:.1f} CPU minutes {parts}, more than its {BUDGET}"
