"""`run.sh atlas`: the run goes on whatever a part does.

The parts here are small programs; the last test runs the real ones on the host simulator of CANN.
"""

import faulthandler
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import psutil
import pytest

REPOSITORY = Path(__file__).parents[1]
BENCHMARKS = REPOSITORY / "benchmarks"
sys.path.append(str(BENCHMARKS))

from atlas import summary  # noqa: E402
from atlas.children import FAILED, Ended  # noqa: E402
from atlas.parts import PARTS, Machine, Step, next_step  # noqa: E402
from atlas.run import Result  # noqa: E402

ATLAS = str(BENCHMARKS / "atlas")
REPORT = {
    "env": {
        "custom_pypto": {"version": "0.2.0", "commit": None},
        "versions": dict.fromkeys(["CANN", "torch", "torch_npu", "pypto", "python"], "1.0"),
        "npu": {"devices": ["Ascend910_9391"]},
        "ways": {"ops on the NPU": {"works": True, "missing": []}},
    },
    "ops": [],
    "packaged": [],
}
# the driver with other parts: name, Python code, seconds, reason to skip, steps
DRIVER = """
import json, sys
from argparse import Namespace
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from atlas.__main__ import main
from atlas.parts import Part, Step

def part(name, code, seconds=60, lacks="", steps=("one",), files=""):
    return Part(name, f"shows {name}", seconds, lambda machine: [
        Step(step, [sys.executable, "-c", code, str(machine.scratch)]) for step in steps
    ], f"look at {name}, {{step}}", lambda machine: lacks, tables=True, files=files)

parts = [part(*each) for each in json.loads(sys.argv[2])]
sys.exit(main(parts, Namespace(limit=1.0, output=Path(sys.argv[3]), simulator=False)))
"""
WRITES_REPORT = (
    "installed",
    f"import sys; open(sys.argv[1] + '/env.json', 'w').write({json.dumps(REPORT)!r})",
)
SLEEPER = "[sys.executable, '-c', 'import time; time.sleep(600)']"


def start(tmp_path, *parts, **kwargs) -> tuple[subprocess.Popen, Path]:
    archive = tmp_path / "found.zip"
    program = tmp_path / "driver.py"
    program.write_text(DRIVER)
    listed = json.dumps([WRITES_REPORT, *parts])
    return subprocess.Popen(
        [sys.executable, str(program), str(BENCHMARKS), listed, str(archive)],
        stdout=subprocess.PIPE,
        text=True,
        **kwargs,
    ), archive


def members(archive: Path) -> dict[str, str]:
    with zipfile.ZipFile(archive) as file:
        return {name: file.read(name).decode() for name in file.namelist()}


def results(page: str) -> dict[str, str]:
    """Part -> its result, from the table of the summary."""
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return {row[0].removeprefix("| "): row[2] for row in rows[2:] if len(row) == 5}


def of_failure(page: str, part: str) -> str:
    return page.partition(f"\n## Failed: {part}")[2].partition("\n## ")[0]


def sleeping_child(file: Path, more: str = "") -> str:
    """Code that starts a process in a session of its own, and writes its id."""
    return (
        f"import subprocess, sys, time\nchild = subprocess.Popen({SLEEPER}, "
        f"start_new_session=True)\nopen({str(file)!r}, 'w').write(str(child.pid))\n{more}"
    )


def test_a_failing_a_hanging_and_a_dying_part_do_not_stop_the_others(tmp_path):
    foreign = "raise SystemExit('LightningIndexerPto in /a/b/list.json is another operator: x')"
    hung, left = tmp_path / "hung", tmp_path / "left"
    driver, archive = start(
        tmp_path,
        ("fails", "import sys\nprint('why')\nsys.exit(3)"),
        ("foreign", foreign),
        # on a busy machine a Python takes seconds to begin
        ("hangs", sleeping_child(hung, "print('waits', flush=True)\ntime.sleep(600)"), 10),
        ("dies", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)"),
        ("leaves", sleeping_child(left)),
        ("elsewhere", "import sys\nprint('one NPU only')\nsys.exit(77)"),
        ("lacking", "", 60, "nothing is installed"),
        ("works", "print('| op | µs |\\n| --- | --- |\\n| a | 1.0 |\\n> of a device\\nall right')"),
    )
    out, _ = driver.communicate(timeout=120)
    assert driver.returncode == 1
    found = members(archive)
    page = found["summary.md"]
    assert results(page) == {
        "installed": "ok",
        "fails": "FAILED",
        "foreign": "FAILED",
        "hangs": "FAILED",
        "dies": "FAILED",
        "leaves": "ok",
        "elsewhere": "skipped",
        "lacking": "skipped",
        "works": "ok",
    }
    assert "exit code 3" in of_failure(page, "fails") and "why" in of_failure(page, "fails")
    assert "Next: look at fails, one." in of_failure(page, "fails")
    assert "`bash run.sh atlas --only fails`" in of_failure(page, "fails")
    assert "Next: /a/b/list.json has an operator LightningIndexerPto that is not ours" in page
    assert "stopped after 10 s" in of_failure(page, "hangs")
    assert "--limit" in of_failure(page, "hangs")
    assert "died of SIGSEGV" in of_failure(page, "dies") and "CUSTOM_PYPTO_LOG=2" in page
    assert "| one NPU only |" in page and "| nothing is installed |" in page
    assert "| op | µs |\n| --- | --- |\n| a | 1.0 |\n\n> of a device" in page
    assert found["hangs.log"].count("waits") == 1
    assert "Fatal Python error: Aborted" in found["hangs.log"]  # where it hung
    assert 'File "<string>", line 5' in found["hangs.log"]
    assert set(found) == {"summary.md", "env.json"} | {f"{x}.log" for x in results(page)} - {
        "lacking.log"
    }
    for file in (hung, left):
        assert not psutil.pid_exists(int(file.read_text()))
    for line in ("FAILED  dies one: died of SIGSEGV", "skipped lacking: nothing is installed"):
        assert line in out
    assert re.search(
        r"^ +\d+:\d\d \[ 4/9\] hangs one +FAILED, \d\d\.\d s: stopped after 10 s$", out, re.M
    )
    assert out.splitlines()[-1] == str(archive)


def test_after_two_hangs_the_rest_of_a_part_is_left_out(tmp_path):
    hangs = ("hangs", "import time\ntime.sleep(600)", 0.5, "", ["a", "b", "c", "d"])
    driver, archive = start(tmp_path, hangs, ("works", "", 60, "", ["a", "b", "c"]))
    driver.communicate(timeout=60)
    page = members(archive)["summary.md"]
    assert "| 2 of 2: a stopped after 0 s, b stopped after 0 s; 2 not run after that |" in page
    assert "| 3 of 3 passed |" in page


def test_launches_are_tried_with_each_setting_of_the_task_queue(tmp_path):
    (part,) = (part for part in PARTS if part.name == "launches")
    steps = part.steps(Machine({}, tmp_path, simulator=False))
    assert {step.variables.get("TASK_QUEUE_ENABLE") for step in steps} == {None, "0", "1", "2"}


def test_without_a_failure_the_exit_code_is_0(tmp_path):
    driver, archive = start(tmp_path, ("works", ""), ("lacking", "", 60, "nothing"))
    driver.communicate(timeout=60)
    assert driver.returncode == 0
    assert results(members(archive)["summary.md"])["works"] == "ok"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_an_archive_and_no_process(how, tmp_path):
    hung = tmp_path / "hung"
    waits = ("waits", sleeping_child(hung, "time.sleep(600)"))
    driver, archive = start(tmp_path, ("works", ""), waits, ("after", ""))
    while not (hung.exists() and hung.read_text()):
        assert driver.poll() is None
    driver.send_signal(how)
    out, _ = driver.communicate(timeout=60)
    assert driver.returncode == 130
    assert results(members(archive)["summary.md"]) == {
        "installed": "ok",
        "works": "ok",
        "waits": "interrupted",
        "after": "not run",
    }
    assert not psutil.pid_exists(int(hung.read_text())) and "not run after" in out


def test_the_files_of_a_part_are_in_the_archive(tmp_path):
    code = (
        "import json, os, sys\n"
        "folder = sys.argv[1] + '/profile/decode_1'\n"
        "os.makedirs(folder + '/a_folder')\n"
        "json.dump([{'name': 'aten::add'}], open(folder + '/trace_view.json', 'w'))"
    )
    made = ("makes", code, 60, "", ["one"], "profile/*/*")
    driver, archive = start(tmp_path, made, ("nothing", "", 60, "", ["one"], "nowhere/*"))
    driver.communicate(timeout=60)
    assert driver.returncode == 0
    found = members(archive)
    assert {name for name in found if "/" in name} == {"makes/trace_view.json"}
    assert json.loads(found["makes/trace_view.json"]) == [{"name": "aten::add"}]


@pytest.mark.parametrize(
    "how, log, says",
    [
        ("stopped after 900 s", "", "--limit"),
        ("died of SIGKILL", "", "memory"),
        ("died of SIGBUS", "", "SIGBUS"),
        ("exit code 1", "aclnnX or aclnnXGetWorkspaceSize not in libopapi.so", "no aclnnX"),
        ("exit code 1", "EZ9999 aicore exception, error code 507015", "ASCEND_LAUNCH_BLOCKING"),
        ("exit code 1", "sh: bisheng: not found", "compiler bisheng"),
        ("exit code 1", "ImportError: libhccl.so: cannot open shared object file", "libhccl.so"),
        ("stopped after 900 s", "libge.so: undefined symbol: _Zx", "_Zx"),
        ("exit code 1", "AssertionError", "the part's own"),
    ],
)
def test_the_next_step_depends_on_how_a_part_failed(how, log, says):
    assert says in next_step(how, log, "the part's own")


def test_the_log_of_a_failure_cannot_end_its_block():
    ended = Ended(FAILED, "exit code 1", 1.0)
    failed = Result(PARTS[0], steps=[(Step("", []), ended, "```\n| x |\n")])
    page = summary.page([failed], Machine(REPORT, Path(), True), summary.datetime.now())
    assert page.count("```") == 2
    assert page.splitlines()[2].startswith("**Host simulator of CANN: this was no NPU.**")


def no_npu(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    if importlib.util.find_spec("torch_npu") and Path("/dev/davinci0").exists():
        pytest.skip("an NPU is here")
    return subprocess.run(
        [sys.executable, ATLAS, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120
    )


def test_without_an_npu_it_says_so_with_the_remedy(tmp_path):
    done = no_npu(cwd=tmp_path)
    assert done.returncode == 1
    said = done.stderr.splitlines()
    assert said[0] == "no NPU"
    assert re.match("  missing: (an NPU: here are no|.*(torch_npu|pypto)|CANN)", said[1])
    assert said[2].startswith("  remedy:  ")
    assert said[-1].startswith("bash run.sh atlas --simulator")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--only", "npu,nothing"], "must name parts (installed, cpu, npu, "),
        (["--output", "nowhere/x.zip"], "--output must be in a folder, got nowhere/x.zip"),
    ],
)
def test_a_wrong_option_is_named(arguments, says, tmp_path):
    done = no_npu(*arguments, cwd=tmp_path)
    assert done.returncode == 2 and says in done.stderr


def test_the_guide_lists_every_part():
    text = (REPOSITORY / "docs/npu.md").read_text()
    guide = text.partition("### What to run on hardware")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", guide, re.M) == [part.name for part in PARTS]


# ---- on the host simulator of CANN


def foreign_package(folder: Path) -> Path:
    """A kernel package one of whose operators has another input than ours."""
    command = ["-m", "custom_pypto.simulation.ascend_host.kernel_package", str(folder)]
    subprocess.run([sys.executable, *command], check=True, capture_output=True)
    (listed,) = folder.glob("op_impl/ai_core/tbe/config/*/aic-*-ops-info.json")
    operators = json.loads(listed.read_text())
    operators["KvQuantUpdatePto"]["input0"]["name"] = "kv"
    listed.write_text(json.dumps(operators))
    return folder


@pytest.mark.slow
@pytest.mark.ascend_host
def test_the_whole_run_with_a_part_that_fails(tmp_path):
    # instead of pytest's time limit, which a busy machine may exceed, that of the run below
    faulthandler.cancel_dump_traceback_later()
    package, archive = foreign_package(tmp_path / "vendor"), tmp_path / "found.zip"
    done = subprocess.run(
        [sys.executable, ATLAS, "--simulator", "--output", str(archive)],
        env=os.environ | {"ASCEND_CUSTOM_OPP_PATH": str(package)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found = members(archive)
    page = found["summary.md"]
    expected = {part.name: "ok" for part in PARTS} | {"aclnn": "FAILED"}
    expected["profile"] = "skipped"
    assert results(page) == expected, done.stdout
    assert page.splitlines()[2].startswith("**Host simulator of CANN: this was no NPU.**")
    assert re.search(
        r"Next: \S+/op_impl/\S+\.json has an operator KvQuantUpdatePto that is not "
        r"ours.* ASCEND_CUSTOM_OPP_PATH\..*`bash run\.sh atlas --simulator --only aclnn`",
        of_failure(page, "aclnn"),
        re.S,
    )
    for part in ("times", "replayed"):
        table = page.partition(f"\n## {part}")[2].partition("\n## ")[0]
        rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")]
        assert len(rows) == 4 and all(float(row[2]) > 0 for row in rows[2:])
        assert "no times of an NPU" in table and "cost model, no times of a device" in table


@pytest.mark.slow
@pytest.mark.ascend_host
def test_the_simulator_is_named_where_it_has_no_trace(tmp_path):
    """The step runs in torch_npu's profiler, which starts nothing without CANN's library."""
    archive = tmp_path / "found.zip"
    subprocess.run(
        [sys.executable, ATLAS, "--simulator", "--only", "profile", "--output", str(archive)],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    found = members(archive)
    assert set(found) == {"summary.md", "env.json", "installed.log", "profile.log"}
    assert "Failed to find function aclprofInit" in found["profile.log"]
    (line,) = [x for x in found["summary.md"].splitlines() if x.startswith("| profile")]
    assert "| skipped |" in line and "the simulator has no profiler: " in line
