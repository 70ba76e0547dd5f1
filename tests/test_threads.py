"""The threads of torch beside other processes: how long they spin, and what names too many."""

import ast
import ctypes
import os
import sys
from pathlib import Path

import pytest
from processes import compiled, python

from custom_pypto import env, threads
from custom_pypto.requirements import Problem

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_libgomp_reads_the_bound_if_the_package_is_imported_before_torch():
    unset = (
        f"import os; [os.environ.pop(one, None) for one in {[threads.SPINNING, threads.POLICY]}]"
    )
    ran = python("-c", f"{unset}; import custom_pypto", OMP_DISPLAY_ENV="verbose")
    assert f"GOMP_SPINCOUNT = '{threads.SPINS}'" in ran.stderr


def test_nothing_is_set_that_libgomp_reads_no_more(monkeypatch):
    assert "torch" in sys.modules
    for one in (threads.SPINNING, threads.POLICY):
        monkeypatch.delenv(one, raising=False)
    threads.bound_spinning()
    assert threads.SPINNING not in os.environ


@pytest.mark.parametrize("name, value", [("GOMP_SPINCOUNT", "7"), ("OMP_WAIT_POLICY", "active")])
def test_what_the_user_has_set_is_left_alone(name, value, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    for one in (threads.SPINNING, threads.POLICY):
        monkeypatch.delenv(one, raising=False)
    monkeypatch.setenv(name, value)
    threads.bound_spinning()
    assert os.environ.get("GOMP_SPINCOUNT") == (value if name == "GOMP_SPINCOUNT" else None)


def imports(name: str) -> list[str]:
    found = []
    for node in ast.parse((EXAMPLES / f"{name}.py").read_text()).body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(node.module)
    return found


@pytest.mark.parametrize(
    "name",
    [
        *("generate", "needle", "replay_rollout"),
        *("train_lookup", "train_lookup_hops", "train_lookup_mtp", "train_lookup_v4"),
        "train_sparse",
    ],
)
def test_an_example_that_computes_imports_the_package_before_torch(name):
    assert imports(name)[0] == "options"
    names = imports("options")
    assert names.index("custom_pypto") < names.index("torch")


CROWD = """
#include "crowd.h"

static custom_pypto::Crowd crowd;
extern "C" void report(long begin, long idle, long end, long threads) {
  crowd.report(begin, idle, end, threads);
}
extern "C" bool crowded(long time) { return crowd.crowded(time); }
"""
MS = 1_000_000  # nanoseconds


@pytest.fixture
def crowd(tmp_path):
    library = compiled(tmp_path, CROWD, Path(threads.__file__).parent / "csrc/tasks")
    library.report.argtypes, library.crowded.argtypes = [ctypes.c_long] * 4, [ctypes.c_long]
    library.crowded.restype = ctypes.c_bool
    return library


def test_a_wait_for_a_thread_without_a_core_leads_to_one_thread_for_a_while(crowd):
    crowd.report(0, 1 * MS, 1 * MS + MS // 50, 2)  # as on a quiet machine
    assert not crowd.crowded(2 * MS)
    crowd.report(10 * MS, 11 * MS, 15 * MS, 2)  # waited 4 ms, gained 1
    assert crowd.crowded(16 * MS) and crowd.crowded(15 * MS + 2 * 3 * MS - 1)
    assert not crowd.crowded(15 * MS + 2 * 3 * MS)


def test_a_long_region_may_wait_for_what_it_gains(crowd):
    crowd.report(0, 10 * MS, 20 * MS, 2)
    assert not crowd.crowded(20 * MS)


def test_one_thread_lasts_longer_where_waits_follow_each_other(crowd):
    lasts, time = [], 0
    for _ in range(7):
        crowd.report(time, time, time + MS, 2)
        time += MS
        lasts.append(next(n for n in range(40) if not crowd.crowded(time + n * MS)))
        time += 100 * MS
    assert lasts == [2, 4, 8, 16, 32, 32, 32]
    for _ in range(60):  # regions without a wait, of 1 ms each
        crowd.report(time, time + MS, time + MS, 2)
        time += MS
    crowd.report(time, time, time + MS, 2)
    assert crowd.crowded(time + MS) and not crowd.crowded(time + 4 * MS)


VERSION_1 = "5:memory:/\n4:cpuset:/pod\n3:cpu,cpuacct:/pod/one\n"


@pytest.mark.parametrize(
    "groups, files, quota",
    [
        pytest.param(
            VERSION_1,
            {"cpu,cpuacct/pod/one/cpu.cfs_quota_us": "150000\n"},
            1.5,
            id="1",
        ),
        pytest.param(
            VERSION_1, {"cpu,cpuacct/pod/one/cpu.cfs_quota_us": "-1\n"}, None, id="1-none"
        ),
        pytest.param("0::/a/b\n", {"a/b/cpu.max": "max 100000\n"}, None, id="2-none"),
        pytest.param(
            "0::/a/b\n",
            {"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "250000 100000\n"},
            2.5,
            id="2-of-the-group-above",
        ),
        pytest.param("0::/host/x\n", {"cpu.max": "50000 100000\n"}, 0.5, id="2-in-a-container"),
        pytest.param("", {}, None, id="none"),
    ],
)
def test_the_quota_of_control_groups_is_read(groups, files, quota, tmp_path, monkeypatch):
    (tmp_path / "own").write_text(groups)
    for name, text in files.items():
        file = tmp_path / "sys" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        if name.endswith("quota_us"):
            file.with_name("cpu.cfs_period_us").write_text("100000\n")
    monkeypatch.setattr(threads, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(threads, "CGROUPS", tmp_path / "sys")
    assert threads.cpu_quota() == quota


@pytest.mark.parametrize(
    "count, quota, busy, named",
    [
        pytest.param(
            2, 1.5, 0.0, ("2 threads on the 1.5 cores of its CPU quota", "=1,"), id="quota"
        ),
        pytest.param(
            5, None, 0.0, ("5 threads on the 4 cores of its affinity", "=4,"), id="affinity"
        ),
        pytest.param(4, None, 9.2, ("9.2 threads are busy on 8 cores", "=1"), id="busy"),
        pytest.param(4, None, 7.9, None, id="free"),
        pytest.param(1, 0.5, 9.2, None, id="half-a-core"),
        pytest.param(1, None, 9.2, None, id="one-thread"),
    ],
)
def test_more_threads_than_cores_are_named_with_the_remedy(count, quota, busy, named, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "getloadavg", lambda: (busy, 0.0, 0.0))
    monkeypatch.setattr(threads, "cpu_quota", lambda: quota)
    problem = threads.oversubscription(count)
    if named is None:
        assert problem is None
    else:
        assert named[0] in problem.what and f"OMP_NUM_THREADS{named[1]}" in f"{problem.remedy},"


def test_the_report_names_quota_and_oversubscription(monkeypatch):
    problem = Problem("too many", "fewer")
    monkeypatch.setattr(threads, "oversubscription", lambda count: problem)
    monkeypatch.setattr(threads, "cpu_quota", lambda: 1.5)
    report = env.collect()
    assert report["cpu"]["quota"] == 1.5 and report["cpu"]["oversubscribed"] == vars(problem)
    text = env.render(report)
    assert "cores, quota 1.5\n" in text and "oversubscribed: too many; fewer\n" in text
