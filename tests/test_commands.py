"""Every fenced command of the pages that a newcomer follows runs, or is run by ``.ci/run``."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import python
from repository import REPOSITORY

PAGES = ["README.md", "docs/install.md", "docs/npu.md", "CONTRIBUTING.md"]
# these install: they run in a copy of the tree whose pip is a stub
INSTALLS = r"bash (build_and_install\.sh|run\.sh setup)"
INSTALLING = rf"({INSTALLS}|source .*/set_env\.sh|\. \.venv/|pip )"
# run here, for real
CHEAP = [r"custom-pypto (env|verify|--version)$", r"bash run\.sh env", r"python \S+\.py --help"]
# run for real by `bash run.sh test --all`
EXPENSIVE = [r"torchrun .*", r"bash run\.sh graph"]
# too long or too large for a test: the line of .ci/run that runs it
IN_CI = {
    r"custom-pypto verify --device interpreter": "verify --device interpreter",
    r"custom-pypto verify --device generated": "verify --device generated",
    r"bash run\.sh": "bash run.sh | cat",
    r"bash run\.sh test( -k indexer| --all)?": "bash run.sh test",
    r"bash run\.sh test --pypto .*": "bash run.sh test --pypto",
    r"bash run\.sh test --arch aarch64": "bash run.sh test --arch aarch64 --compile-only",
    r"bash run\.sh lint": "bash run.sh lint",
    r"bash run\.sh docs": "bash run.sh docs",
    r"bash run\.sh sanitize": "bash run.sh sanitize address",
    r"bash \.ci/versions .*": "bash .ci/versions",
    r"bash \.ci/run": "What must pass before a change is merged",
}
# hours, an NPU, another repository or a file of the reader: only what they name is checked
NAMED = [
    r"bash run\.sh (serve|fuzz|bench|atlas|test --serving).*",
    r"custom-pypto verify --device npu",
    r"python (examples|benchmarks)/\S+\.py .*",
    r"python examples/(needle|train_sparse)\.py",
    r"python -m pytest tests/test_programs\.py .*",
    r"CUSTOM_PYPTO_LOG=2 python your_program\.py",
    r"git clone .*",
    r"PYPTO_ALLOW_WHL_BUILD=1 .* pip wheel .*",
]


def blocks(page: str) -> list[list[str]]:
    """Commands of each fenced block, without comments."""
    file = REPOSITORY / page
    text = file.read_text() if file.exists() else ""
    found = re.findall(r"^```(?:bash|sh|console)\n(.*?)^```", text, re.S | re.M)
    lines = [re.sub(r"\s+#.*", "", block.replace("\\\n", "")).splitlines() for block in found]
    return [[line.strip() for line in block if line.strip()] for block in lines]


COMMANDS = sorted({command for page in PAGES for block in blocks(page) for command in block})


def of(*patterns: str) -> list[str]:
    return [command for command in COMMANDS if any(re.fullmatch(p, command) for p in patterns)]


def run(command: str, status: int = 0, cwd=REPOSITORY, **variables) -> subprocess.CompletedProcess:
    """As a reader would, in the environment of the tests."""
    command = re.sub(r"^(custom-pypto)\b", f"{sys.executable} -m custom_pypto_command", command)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    settings = {"PATH": path, "VIRTUAL_ENV": sys.prefix, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=cwd,
        env=os.environ | settings | variables,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_pages_has_a_check(command):
    checks = [INSTALLING + ".*", *CHEAP, *EXPENSIVE, *IN_CI, *NAMED]
    assert any(re.fullmatch(check, command) for check in checks)
    ci = (REPOSITORY / ".ci/run").read_text()
    for pattern, line in IN_CI.items():
        assert line in ci or not re.fullmatch(pattern, command)


@pytest.mark.parametrize("command", sorted({*of(*NAMED, *IN_CI, *EXPENSIVE)} - {*of(*CHEAP)}))
def test_what_a_command_names_exists(command):
    for file in re.findall(r"(?:^|\s)((?:examples|benchmarks|tests|\.ci)/[\w./]+)", command):
        assert (REPOSITORY / file).exists(), file
    programs = re.findall(r"\S+\.py", command) if "your_program" not in command else []
    sources = [(REPOSITORY / program).read_text() for program in programs]
    if command.startswith("bash run.sh"):
        word = re.match(r"bash run\.sh( \w+)?", command)
        sources = [run(f"{word[0]} --help").stdout]  # of an unknown word this fails
    if sources and "pytest" not in command and "torchrun" not in command:
        for option in re.findall(r"\s(--[\w-]+)", command):
            assert any(option in source for source in sources), option


@pytest.mark.parametrize("command", of(*CHEAP))
def test_a_cheap_command_runs(command):
    run(command)


@pytest.mark.slow
@pytest.mark.parametrize("command", of(*EXPENSIVE))
def test_an_expensive_command_runs(command):
    run(command)


def test_the_command_has_a_version():
    from custom_pypto import __version__

    assert run("custom-pypto --version").stdout == f"custom-pypto {__version__}\n"


def test_a_package_that_does_not_load_names_the_command_by_its_python(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('no torch')")
    done = python("-c", "import custom_pypto", path=[tmp_path])
    assert done.stderr.splitlines()[-1].endswith(
        f"`{sys.executable} -m custom_pypto_command env` reports what is missing"
    )
