"""What "Add an op" in CONTRIBUTING.md says, against the files in which an op's name stands."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import custom_pypto
from custom_pypto.descriptions import OPS

REPOSITORY = Path(__file__).parents[1]
OP = "add_custom"  # the smallest, there to be copied
# written by `python -m custom_pypto.graph`, and by nobody else
GENERATED = {f"custom_pypto/graph/{OP}.h", "custom_pypto/graph/ops.py"}
# where it stands as an example of any op, or as an exception; a new op has nothing to add there
EXAMPLES = {
    ".ci/versions",  # one of the tests that each version runs
    "CHANGELOG.md",
    "benchmarks/RESULTS.md",  # the cost of a call
    "benchmarks/bench_eager_launch.py",
    "benchmarks/bench_log.py",
    "benchmarks/bench_ops.py",  # which ops are timed is a choice
    "docs/npu.md",
    "docs/site/mkdocs.yml",
    "docs/zh/npu.md",
    "tests/test_aclnn.py",
    "tests/test_contributing.py",
    "tests/test_converter.py",
    "tests/test_env.py",
    "tests/test_graph.py",
    "tests/test_generated.py",
    "tests/test_graph_mode.py",
    "tests/test_kernel_packages.py",
    "tests/test_kernels.py",
    "tests/test_layering.py",
    "tests/test_log.py",
    "tests/test_simulation.py",
    "tests/test_verify.py",
}
# with three documents and two files of tests; no fewer while each layer has a file of its own, and
# the C++ side two
FILES = 12


def tracked_files() -> list[str]:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip("not a git checkout")
    files = [name for name in done.stdout.splitlines() if (REPOSITORY / name).is_file()]
    if not files:
        pytest.skip("git ignores this folder")
    return files


def names_the_op(name: str) -> bool:
    text = (REPOSITORY / name).read_bytes()
    return OP in name or re.search(rf"\b{OP}\b".encode(), text) is not None


def steps() -> set[str]:
    """The files that the steps name."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    section = text.partition("## Add an op")[2].partition("\n## ")[0]
    numbered = section[section.index("\n1. ") : section.index("\n\nAn op that")]
    paths = re.findall(r"`([\w/.<>-]+\.(?:py|cpp|md))`", numbered)
    tracked = tracked_files()
    return {path for p in paths if (path := p.replace("<op>", OP)) in tracked}


def test_an_op_stands_where_the_steps_say_and_in_few_files():
    named = {name for name in tracked_files() if names_the_op(name)}
    assert named - GENERATED - EXAMPLES == steps()
    assert len(steps()) == FILES


def test_every_example_is_one():
    assert all(map(names_the_op, GENERATED | EXAMPLES))


def test_descriptions_and_public_functions_are_of_the_same_ops():
    assert set(OPS) == set(custom_pypto.__all__)


def test_the_commit_hooks_have_the_versions_of_the_test_extra():
    hooks = (REPOSITORY / ".pre-commit-config.yaml").read_text()
    extras = (REPOSITORY / "setup.py").read_text()
    for hook, package in (("ruff-pre-commit", "ruff"), ("mirrors-clang-format", "clang-format")):
        version = re.search(rf"/{hook}\n    rev: v(\S+)\n", hooks)[1]
        assert f'"{package}=={version}"' in extras
