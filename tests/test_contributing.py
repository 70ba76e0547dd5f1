"""What "Add an op" in CONTRIBUTING.md says, against the files in which an op's name stands."""

import re
from pathlib import Path

import pytest
from repository import REPOSITORY, tracked_files

import custom_pypto
from custom_pypto.descriptions import ALL_OPS

# where an op stands besides: other code that calls it, figures, examples of any op. A new op has
# nothing to add there.
USERS = {
    "npu_kv_quant_update_pto": {
        "benchmarks/atlas/calls.py",
        "benchmarks/bench_ops.py",
        "custom_pypto/reference/npu_kv_quant_sparse_flash_attention_pto.py",
        "integrations/vllm/custom_pypto_vllm/caches.py",
        "models/cache/formats.py",
        "tests/cases/npu_kv_quant_sparse_flash_attention_pto.py",
        "tests/test_contributing.py",
    },
    # the smallest, there to be copied
    "add_custom": {
        ".ci/versions",  # one of the tests that each version runs
        "benchmarks/RESULTS.md",  # the cost of a call
        "benchmarks/bench_eager_launch.py",
        "benchmarks/bench_log.py",
        "benchmarks/bench_ops.py",  # which ops are timed is a choice
        "docs/npu.md",
        "docs/site/mkdocs.yml",
        "docs/zh/npu.md",
        "tests/kernel_package.py",
        "tests/test_aclnn.py",
        "tests/test_contributing.py",
        "tests/test_converter.py",
        "tests/test_env.py",
        "tests/test_generated.py",
        "tests/test_graph.py",
        "tests/test_graph_mode.py",
        "tests/test_graph_mode_faults.py",
        "tests/test_kernel_calls.py",
        "tests/test_kernels.py",
        "tests/test_layering.py",
        "tests/test_log.py",
        "tests/test_simulation.py",
        "tests/test_verify.py",
    },
}
# with four documents and two files of tests; no fewer while each layer has a file of its own
FILES = 12


def generated(op: str) -> set[str]:
    """Written by `python -m custom_pypto.graph`, and by nobody else."""
    return {f"custom_pypto/graph/{op}.h", "custom_pypto/graph/ops.py"}


def named(op: str) -> set[str]:
    """The files in whose name or text the op stands."""
    word = re.compile(rf"\b{op}\b".encode())
    return {
        name
        for name in tracked_files()
        if Path(name).stem in (op, f"test_{op}") or word.search((REPOSITORY / name).read_bytes())
    }


def steps(op: str) -> set[str]:
    """The files that the steps name and that this op has."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    section = text.partition("## Add an op")[2].partition("\n## ")[0]
    numbered = section[section.index("\n1. ") : section.index("\n\nAn op that")]
    paths = re.findall(r"`([\w/.<>-]+\.(?:py|cpp|md))`", numbered)
    return {path.replace("<op>", op) for path in paths} & named(op)


@pytest.mark.parametrize("op", USERS)
def test_an_op_stands_where_the_steps_say_and_in_few_files(op):
    assert named(op) - generated(op) - USERS[op] == steps(op)
    assert len(steps(op)) == FILES


@pytest.mark.parametrize("op", USERS)
def test_every_user_is_one(op):
    assert generated(op) | USERS[op] <= named(op)


def test_descriptions_and_public_functions_are_of_the_same_ops():
    assert set(ALL_OPS) == set(custom_pypto.__all__)


def test_the_commit_hooks_have_the_versions_of_the_test_extra():
    hooks = (REPOSITORY / ".pre-commit-config.yaml").read_text()
    extras = (REPOSITORY / "setup.py").read_text()
    for hook, package in (("ruff-pre-commit", "ruff"), ("mirrors-clang-format", "clang-format")):
        version = re.search(rf"/{hook}\n    rev: v(\S+)\n", hooks)[1]
        assert f'"{package}=={version}"' in extras
