"""``run.sh`` and ``build_and_install.sh``: what they answer at once, what they install, and where.

In a copy of the tree, whose Pythons write down what they would install.
"""

import os
import platform
import re
import shutil
import signal
import subprocess
import sys

import pytest
from repository import REPOSITORY
from test_commands import INSTALLING, INSTALLS, PAGES, blocks, run

from custom_pypto import requirements

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
    printf '%s\\n' "  [1/2] g++ a.cpp" "  [2/2] g++ b.cpp: $STUB_ERROR"
    [[ -z "$STUB_ERROR" ]] || exit 1
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
      exec $REAL -I - <<<"$code"
    fi
    ;;
  " -I -c "*"import custom_pypto"*) $STUB_IMPORT "$@" ;;
  *) exec $REAL "$@" ;;
esac
"""


@pytest.fixture
def clone(tmp_path):
    """The tree without what is built, and Pythons that install nothing."""
    tree = tmp_path / "clone"
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "csrc", "models")
    shutil.copytree(REPOSITORY / "custom_pypto", tree / "custom_pypto", ignore=ignored)
    (tree / "custom_pypto/csrc").mkdir()
    shutil.copytree(REPOSITORY / "commands", tree / "commands", ignore=ignored)
    for name in ("benchmarks", "tests"):
        (tree / name).symlink_to(REPOSITORY / name)
    (tree / "examples/checkpoints").mkdir(parents=True)
    (tree / "examples/generate.py").write_text("print('the demo')")
    shutil.copy(REPOSITORY / "examples/modes.py", tree / "examples")
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
        "STUB_ERROR": "",
        "STUB_IMPORT": "true",  # succeeds at once, instead of two seconds with torch
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
    assert said.count(f"installing into {clone}/.venv\n") == 4
    assert re.findall(r"^venv .*", log, re.M) == [f"venv --clear {clone}/.venv"]
    wheel = f"{clone}/build/wheel/custom_pypto-0-py3-none-any.whl[models]"
    installed = re.findall(r"\S+\.whl\[.*\]$|--editable .*$", log, re.M)
    assert installed == ["--editable .[models]", "--editable .[models,sim]", wheel, wheel]


@pytest.mark.parametrize("script", ["run.sh setup", "build_and_install.sh", "run.sh"])
def test_the_environment_is_printed_first_and_how_to_use_it_last(script, clone):
    said, _ = install(clone, f"bash {script}")
    first, *_, last_but_one, last = said.splitlines()
    assert first == f"installing into {clone}/.venv"
    assert last == f"to use it: . {clone}/.venv/bin/activate"
    assert (last_but_one == "the demo") == (script == "run.sh")
    said, _ = install(clone, f"bash {script}", VIRTUAL_ENV=f"{clone}/.venv")
    assert "to use it" not in said


def test_what_was_installed_is_imported(clone):
    said, _ = install(clone, "bash build_and_install.sh", STUB_IMPORT=sys.executable)
    assert re.search(r"^installed custom_pypto \S+ in ", said, re.M)
    said, _ = install(clone, "bash run.sh setup", status=1, STUB_IMPORT="false")
    assert said.endswith("the package was built but cannot be imported, see above\n")


def test_the_output_of_a_demo_with_arguments_is_its_own(clone):
    said, _ = install(clone, "bash run.sh --json 2>/dev/null")
    assert said == "the demo\n"


# ---- what is answered before anything is installed ----------------------------------------------

NAMES = "setup env serve atlas graph test bench fuzz sanitize lint docs".split()
ANSWERS = {
    **{f"{name} --help": rf"^usage: run\.sh {name} " for name in NAMES},
    "--help": "^  " + ".*\n(.*\n)*  ".join(NAMES),
    "bench --list": r"^  ops .*\n.*\n  parts ",
    "bench --compare HEAD HEAD": r"^A: HEAD, B: HEAD;",
}
WRONG = {
    "hlep": "argument COMMAND: invalid choice: 'hlep' .choose from",
    "setup modles": "EXTRAS must be some of models,sim,npu,test, got 'modles'",
    "setup models sim": "unrecognized arguments: sim",
    "serve /nowhere": "CHECKPOINT must be a folder with config.json, or .*, got '/nowhere'",
    "serve examples/checkpoints": "CHECKPOINT must be .*, got 'examples/checkpoints'",
    "serve ./model": "CHECKPOINT must be .*, got './model'",
    "atlas --only fall": "must name parts",
    "test --arch riscv": "invalid choice: 'riscv'",
    "test --pypto": "expected one argument",
    "test --pypto none.whl": "--pypto needs a wheel or a folder, got 'none.whl'",
    "test --vllm 0.31.0": "--vllm needs --serving",
    "bench opps": "no benchmark is called 'opps': ops, parts",
    "bench ops --tokens 3": "--tokens is no option of ops",
    "fuzz --minuts 1": "unrecognized arguments: --minuts 1",
    "sanitize memory": "invalid choice: 'memory'",
    "lint custom_pypto": "unrecognized arguments: custom_pypto",
    "docs --open": "unrecognized arguments: --open",
}


@pytest.mark.parametrize("arguments", [*ANSWERS, *WRONG])
def test_a_question_or_a_wrong_argument_is_answered_at_once(arguments, clone):
    status, answer = (2, WRONG[arguments]) if arguments in WRONG else (0, ANSWERS[arguments])
    # -S: without packages
    said, log = install(clone, f"bash run.sh {arguments}", status, REAL=f"{sys.executable} -S")
    assert re.search(answer, said, re.M), said
    assert log == "" and not (clone / ".venv").exists() and not (clone / "build").exists()


def test_the_help_is_in_groups():
    said = run("bash run.sh --help").stdout
    groups = [said.index(f"\n{name}\n") for name in ("Try", "On an Atlas", "Develop")]
    assert groups == sorted(groups)


def test_a_machine_without_python_is_told_what_to_install(clone):
    for name in ("bash", "dirname"):
        (clone.parent / "stubs" / name).symlink_to(shutil.which(name))
    for name in (clone.parent / "stubs").glob("python*"):
        name.write_text("#!/bin/bash\nexit 1")  # as a version manager's that has no such version
    said, _ = install(clone, "bash run.sh env", status=1, PATH=str(clone.parent / "stubs"))
    assert said.endswith("(Debian, Ubuntu: apt install python3 python3-venv python3-dev)\n")
    assert len(said.splitlines()) == 1


def test_an_interrupted_command_lets_its_program_end_and_says_one_line(clone):
    program = clone / "build/docs/bin/python"
    program.parent.mkdir(parents=True)
    program.write_text(
        "#!/bin/bash\ntrap 'sleep 1; echo ended >&2; exit 1' INT\n"
        "sleep 2; echo ready >&2\nsleep 60\n"  # until run.sh waits for it
    )
    program.chmod(0o755)
    process = subprocess.Popen(
        ["bash", "run.sh", "docs"],
        cwd=clone,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    assert process.stderr.read() == "ended\nrun.sh: interrupted\n"
    assert process.wait() == 130


@pytest.mark.parametrize("arguments", ["--help", "bench --list"])
def test_a_closed_pipe_ends_a_command_quietly(arguments):
    done = run(f"set -o pipefail; bash run.sh {arguments} | true", 128 + signal.SIGPIPE)
    assert done.stderr == ""


# ---- what is installed, and where ----------------------------------------------------------------

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


def test_a_compilation_shows_its_count_on_a_terminal_and_its_output_if_it_fails(clone):
    version = platform.python_version()
    line = f"building custom_pypto with Python {version}, g++: compiling what is new of 0 files"
    said, log = install(clone, "bash build_and_install.sh")
    assert line in said and "[1/2]" not in said
    said, _ = install(clone, "bash build_and_install.sh", status=1, STUB_ERROR="b.cpp is wrong")
    assert "[2/2] g++ b.cpp: b.cpp is wrong\n" in said
    assert said.endswith("build_and_install.sh: building custom_pypto failed, see above\n")
    said, _ = install(clone, "script --quiet --command 'bash build_and_install.sh' /dev/null")
    assert line in said
    assert "\n[1/2] \n[2/2] \n\033[K" in said  # each \n was a \r


def test_a_download_of_torch_shows_its_progress_on_a_terminal(clone):
    for stub in (clone.parent / "stubs").iterdir():
        stub.write_text(
            STUB.replace("*) exec", """*'version("torch").split'*) exit 1 ;;\n  *) exec""")
        )
    wanted = f"torch=={requirements.DEFAULT_TORCH}+cpu numpy"
    _, log = install(clone, "bash build_and_install.sh")
    assert f": install --quiet {wanted}\n" in log
    _, log = install(clone, "script --quiet --command 'bash build_and_install.sh' /dev/null")
    assert f": install {wanted}\n" in log


def test_a_container_whose_python_has_torch_npu_is_used(clone):
    said, log = install(clone, "bash run.sh setup npu", STUB_TORCH_NPU="2.13.0")
    assert f"venv --clear --system-site-packages {clone}/.venv\n" in log
    assert "python3.12 has torch 2.13.0 and torch_npu 2.13.0" in said


def test_an_active_environment_without_setuptools_gets_it(clone):
    other = clone.parent / "mine"
    (other / "bin").mkdir(parents=True)
    stub = STUB.replace(
        '*) exec $REAL "$@"', '*"import ninja"* | *setuptools*) exit 1 ;;\n  *) exec $REAL "$@"'
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
