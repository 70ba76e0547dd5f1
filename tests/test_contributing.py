"""Each op has its file in each layer, and its row in each table."""

import re

from repository import REPOSITORY, tracked_files

import custom_pypto
from custom_pypto.descriptions import ALL_OPS, OPS

# layers that an op has only if it has an NPU kernel
OF_NPU = ("custom_pypto/kernels/", "custom_pypto/npu/")


def test_each_op_has_its_file_in_each_layer_and_a_document():
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    section = text.partition("## Add an op")[2].partition("\n## ")[0]
    layers = {path for path in re.findall(r"`([\w/]+<op>\.\w+)`", section) if "docs/" not in path}
    assert len(layers) == 6
    files = tracked_files()
    for layer in layers:
        ops = OPS if layer.startswith(OF_NPU) else ALL_OPS
        assert [
            layer.replace("<op>", op) for op in ops if layer.replace("<op>", op) not in files
        ] == []
    documents = "".join((REPOSITORY / p).read_text() for p in files if re.match(r"docs/\w+\.md", p))
    assert [op for op in ALL_OPS if op not in documents] == []


def test_descriptions_and_public_functions_are_of_the_same_ops():
    assert set(ALL_OPS) == set(custom_pypto.__all__)


def test_the_commit_hooks_have_the_versions_of_the_test_extra():
    hooks = (REPOSITORY / ".pre-commit-config.yaml").read_text()
    extras = (REPOSITORY / "setup.py").read_text()
    for hook, package in (("ruff-pre-commit", "ruff"), ("mirrors-clang-format", "clang-format")):
        version = re.search(rf"/{hook}\n    rev: v(\S+)\n", hooks)[1]
        assert f'"{package}=={version}"' in extras


def test_each_module_and_header_begins_with_what_it_holds():
    """So that docs/architecture.md needs no row for each of them."""
    begins = {".py": '"""', ".h": "// "}
    files = [
        REPOSITORY / name for name in tracked_files() if name.startswith(("custom_", "models"))
    ]
    definitions = {f"custom_pypto/reference/{op}.py" for op in ALL_OPS} | {
        "custom_pypto/version.py"
    }
    silent = [
        str(file.relative_to(REPOSITORY))
        for file in files
        if file.suffix in begins and not file.read_text().startswith(begins[file.suffix])
    ]
    assert len(files) > 200 and set(silent) <= definitions
