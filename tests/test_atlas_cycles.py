"""`run.sh atlas` with a CANN toolkit and no NPU, on a stand-in for `msprof op simulator`."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from atlas import cycles  # noqa: E402

ATLAS = str(BENCHMARKS / "atlas")
# `msprof op simulator` as its guide has it: checks the command, runs the program by STARTS, and
# writes the traces of two launches, with those of their cores
MSPROF = """#!{python}
import os, subprocess, sys
from pathlib import Path

options = [x.partition("=") for x in sys.argv[3:] if x.startswith("--")][:5]
options = {{name.removeprefix("--"): value for name, _, value in options}}
program = sys.argv[3 + len(options):]
assert sys.argv[1:3] == ["op", "simulator"] and options["kernel-name"].isalnum(), sys.argv
assert options["soc-version"] == "Ascend910B1" and 1 <= int(options["launch-count"]) <= 5000
assert 1 <= int(options["timeout"]) <= 2880 and os.stat(options["output"]).st_mode & 0o22 == 0
assert program[1:4] == ["-m", "custom_pypto", "verify"]
code = subprocess.run({starts!r} + program[1:]).returncode
for launch in {launches!r}:
    folder = Path(options["output"]) / "OPPROF_2026_X" / launch / "simulator"
    (folder / "core0.veccore0").mkdir(parents=True)
    for file in (folder / "trace.json", folder / "core0.veccore0/trace.json"):
        file.write_text('{{"traceEvents": []}}')
sys.exit(code)
"""
LAUNCHED = ["PyPTO_add/0", "PyPTO_add/1"]


def stand_in(folder: Path, starts: list[str], launches=LAUNCHED, chips=("Ascend910B1",)) -> dict:
    """The environment of a toolkit with such an msprof and simulators of those chips."""
    for chip in chips:
        (folder / "tools/simulator" / chip).mkdir(parents=True)
    msprof = folder / "tools/profiler/bin/msprof"
    msprof.parent.mkdir(parents=True)
    msprof.write_text(MSPROF.format(python=sys.executable, starts=starts, launches=launches))
    msprof.chmod(0o755)
    return os.environ | {"PATH": f"{msprof.parent}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.parametrize(
    "chips, says",
    [
        (["Ascend310P1", "Ascend910B1", "Ascend950PR_9599"], ""),
        (["Ascend910_9391"], ""),
        (["Ascend950PR_9599"], "has no simulator of Atlas A2 or A3"),
        ([], "has no simulator of Atlas A2 or A3"),
        (None, "msprof is not on PATH"),
    ],
)
def test_the_chip_is_simulated_where_a_toolkit_can(chips, says, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    if chips is not None:
        monkeypatch.setenv("PATH", stand_in(tmp_path, [], chips=chips)["PATH"])
    lacking = cycles.lacking()
    assert says in lacking and bool(says) == bool(lacking)
    assert bool(cycles.toolkit()[1]) == (not says)


@pytest.mark.parametrize(
    "starts, launches, code",
    [(["true"], LAUNCHED, 0), (["false"], LAUNCHED, 1), (["true"], [], 1), (["true"], ["."], 0)],
)
def test_the_traces_of_the_chip_are_kept(starts, launches, code, tmp_path):
    environment = stand_in(tmp_path / "toolkit", starts, launches)
    command = [sys.executable, ATLAS + "/cycles.py", "add_custom", str(tmp_path / "found")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    kept = sorted(file.name for file in (tmp_path / "found").glob("*.json"))
    assert kept == [f"add_custom-{number}.json" for number in range(len(launches))]
    assert ("wrote no simulator/trace.json" in done.stdout) == (not launches)


@pytest.mark.slow
@pytest.mark.ascend_host
def test_a_toolkit_without_an_npu_simulates_the_chip(tmp_path):
    """The stand-in starts the program on the host simulator, msprof on the simulator of a chip."""
    starts = [sys.executable, "-m", "custom_pypto.simulation.ascend_host"]
    archive = tmp_path / "found.zip"
    done = subprocess.run(
        [sys.executable, ATLAS, "--only", "npu,cycles", "--output", str(archive)],
        env=stand_in(tmp_path / "toolkit", starts),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(archive) as file:
        found = {name: file.read(name).decode() for name in file.namelist()}
    page = found["summary.md"]
    assert page.startswith("# custom_pypto on a machine without an NPU")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")][2:]
    assert [(row[0], row[2], row[4]) for row in rows[1:2]] == [("| npu", "skipped", "no NPU |")]
    assert [row[2] for row in rows] == ["ok", "skipped", "ok"]
    assert "npu_sparse_flash_attention_pto" in found["cycles.log"]
    assert {name for name in found if name.startswith("cycles/add_custom")} == {
        "cycles/add_custom-0.json",
        "cycles/add_custom-1.json",
    }
