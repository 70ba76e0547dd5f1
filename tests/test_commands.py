"""Every fenced command of the pages that a newcomer follows runs, or is run by ``.ci/run``."""

import os
import re
import shutil
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
        sources = [(REPOSITORY / "run.sh").read_text()]
        if word := re.match(r"bash run\.sh (\w+)", command):
            assert re.search(rf"^  (-\w \| )?{word[1]}\)$", sources[0], re.M), word[1]
    if command.startswith("bash run.sh atlas"):
        sources += [(REPOSITORY / "benchmarks/atlas/__main__.py").read_text()]
    if command.startswith("bash run.sh bench"):  # has the options of the registry, too
        sources += [python("benchmarks", "--help").stdout]
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


def test_an_unknown_command_is_named():
    done = run("bash run.sh hlep", status=2)
    assert done.stderr.splitlines()[0] == "run.sh: unknown command 'hlep'"


def test_the_help_is_in_groups():
    said = run("bash run.sh --help").stdout
    groups = [said.index(f"\n{name}\n") for name in ("Try", "On an Atlas", "Develop")]
    assert groups == sorted(groups)


# ---- what installs -----------------------------------------------------------------------------

# takes what would install or create an environment into a log, and runs the rest
STUB = """#!/bin/bash
case " $* " in
  *" -m venv "*)
    echo "venv ${*:3}" >>"$STUB_LOG"
    where="${*: -1}"
    mkdir -p "$where/bin"
    cp "$0" "$where/bin/python"
    printf '#!/bin/bash\\n%s "$@"\\n' "$REAL -m custom_pypto_command" >"$where/bin/custom-pypto"
    chmod +x "$where/bin/custom-pypto"
    touch "$where/bin/activate"
    ;;
  *" -m pip index "*) echo "torch (2.13.0+cpu)" ;;
  *" -m pip wheel "*)
    folder="${*: -2:1}"
    mkdir -p "$folder"
    touch "$folder/custom_pypto-0-py3-none-any.whl"
    ;;
  *" -m pip --version "*) ;;
  *" -m pip "*) echo "pip in $(dirname "$(dirname "$0")"): ${*:3}" >>"$STUB_LOG" ;;
  " -I - ")
    code="$(cat)"
    if [[ "$code" == *'version("torch_npu")'* && -n "$STUB_TORCH_NPU" ]]; then
      echo "torch 2.13.0 and torch_npu $STUB_TORCH_NPU"
    else
      exec "$REAL" -I - <<<"$code"
    fi
    ;;
  *) exec "$REAL" "$@" ;;
esac
"""


@pytest.fixture
def clone(tmp_path):
    """The tree without what is built, and Pythons that install nothing."""
    tree = tmp_path / "clone"
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "csrc", "models")
    shutil.copytree(REPOSITORY / "custom_pypto", tree / "custom_pypto", ignore=ignored)
    (tree / "custom_pypto/csrc").mkdir()
    for name in ("run.sh", "build_and_install.sh", "setup.py", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, tree)
    shutil.copy(REPOSITORY / "custom_pypto_command.py", tree)
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for name in ("python3", "python3.10", "python3.11", "python3.12", "python3.13", "python3.14"):
        (stubs / name).write_text(STUB)
        (stubs / name).chmod(0o755)
    (tmp_path / "set_env.sh").touch()
    return tree


def install(clone, script: str, status: int = 0, **variables):
    """What a block prints, and what it installs where."""
    log = clone.parent / "log"
    log.write_text("")
    script = re.sub(r"source \S+/set_env\.sh", f"source {clone.parent}/set_env.sh", script)
    settings = {
        "PATH": f"{clone.parent / 'stubs'}{os.pathsep}/usr/bin:/bin",
        "REAL": sys.executable,
        "STUB_LOG": str(log),
        "STUB_TORCH_NPU": "",
        "HOME": str(clone.parent),
        "OMP_WAIT_POLICY": "passive",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    done = subprocess.run(
        ["bash", "-ec", script],
        cwd=clone,
        env=settings | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == status, done.stdout
    return done.stdout, log.read_text()


def installing_blocks(page: str) -> list[str]:
    return [
        "\n".join(line for line in block if re.match(INSTALLING, line))
        for block in blocks(page)
        if any(re.match(INSTALLS, line) for line in block)
    ]


README_BLOCKS = installing_blocks("README.md")


@pytest.mark.parametrize(
    "block", sorted({x for page in PAGES for x in installing_blocks(page)} - {*README_BLOCKS})
)
def test_a_block_that_installs_does_so_in_a_fresh_clone(block, clone):
    said, log = install(clone, block)
    assert f"installing into {clone}/.venv\n" in said
    assert re.search(rf"^venv --clear {clone}/\.venv$", log, re.M)
    assert "ls: cannot access" not in said


def test_the_blocks_of_the_readme_follow_each_other_in_a_fresh_clone(clone):
    said, log = install(clone, "\n".join(README_BLOCKS))
    assert said.count(f"installing into {clone}/.venv\n") == 3
    assert re.findall(r"^venv .*", log, re.M) == [f"venv --clear {clone}/.venv"]
    wheel = f"{clone}/build/wheel/custom_pypto-0-py3-none-any.whl[models]"
    installed = re.findall(r"\S+\.whl\[.*\]$|--editable .*$", log, re.M)
    assert installed == [wheel, "--editable .[models,sim]", wheel]


def test_the_environment_is_printed_before_anything_is_installed(clone):
    said, _ = install(clone, "bash run.sh setup")
    lines = said.splitlines()
    assert lines[0] == f"installing into {clone}/.venv"
    assert lines[-2:] == [
        f"custom_pypto is installed in {clone}/.venv",
        f"to use it: . {clone}/.venv/bin/activate",
    ]


WHERE = {
    "none": ({}, "{clone}/.venv"),
    "venv": ({"VIRTUAL_ENV": "/opt/venv"}, "/opt/venv"),
    "conda": ({"CONDA_PREFIX": "/opt/conda/envs/x", "CONDA_DEFAULT_ENV": "x"}, "/opt/conda/envs/x"),
    "conda-base": ({"CONDA_PREFIX": "/opt/conda", "CONDA_DEFAULT_ENV": "base"}, "{clone}/.venv"),
    "venv-in-conda-base": (
        {"VIRTUAL_ENV": "/v", "CONDA_PREFIX": "/opt/conda", "CONDA_DEFAULT_ENV": "base"},
        "/v",
    ),
}


@pytest.mark.parametrize("variables, where", WHERE.values(), ids=WHERE)
def test_the_active_environment_is_used_and_condas_base_is_none(variables, where, clone):
    said, log = install(clone, "bash build_and_install.sh --where", **variables)
    assert said == where.format(clone=clone) + "\n" and log == ""


def test_extras_are_a_word(clone):
    _, log = install(clone, "bash build_and_install.sh models,sim")
    assert re.search(
        r"install --quiet \S+/custom_pypto-0-py3-none-any\.whl\[models,sim\]$", log, re.M
    )
    _, log = install(clone, "bash run.sh setup sim")
    assert re.search(r"--editable \.\[sim\]$", log, re.M)
    said, log = install(clone, "bash build_and_install.sh modles", status=1)
    assert (
        said == "build_and_install.sh: EXTRAS must be some of models,sim,npu,test, got 'modles'\n"
    )
    assert log == ""


def test_a_container_whose_python_has_torch_npu_is_used(clone):
    said, log = install(clone, "bash run.sh setup npu", STUB_TORCH_NPU="2.13.0")
    assert f"venv --clear --system-site-packages {clone}/.venv\n" in log
    assert "has torch 2.13.0 and torch_npu 2.13.0" in said


def test_an_active_environment_without_setuptools_gets_it(clone):
    other = clone.parent / "mine"
    (other / "bin").mkdir(parents=True)
    stub = STUB.replace(
        '*) exec "$REAL" "$@"', '*"import ninja"* | *setuptools*) exit 1 ;;\n  *) exec "$REAL" "$@"'
    )
    (other / "bin/python").write_text(stub)
    (other / "bin/python").chmod(0o755)
    said, log = install(clone, "bash run.sh setup", VIRTUAL_ENV=str(other))
    assert f"installing into {other}\n" in said
    order = [log.index(part) for part in ("ninja", "setuptools>=77.0.3", "--editable")]
    assert order == sorted(order)


@pytest.mark.parametrize("command", ["env", "lint"])
def test_a_report_installs_nothing(command, clone):
    said, log = install(clone, f"bash run.sh {command} || true")
    assert log == "" and not (clone / ".venv").exists()
    assert ("What works here" in said) == (command == "env")
    if command == "lint":
        assert said.splitlines()[-1] == (
            f"run.sh lint: its tools are not in {clone}/.venv: bash run.sh setup models,sim,test"
        )


def test_an_isolated_build_ends_at_once_with_the_right_line(tmp_path):
    """pip's build environment has what ``build-system.requires`` names, and no torch."""
    code = "import sys, runpy; sys.modules['torch'] = None; runpy.run_path('setup.py')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert re.match(
        "setup.py: .*run bash build_and_install.sh, or .*--no-build-isolation", done.stderr
    )
