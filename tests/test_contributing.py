"""What documents and first lines of sources name exists, and each op has its file in each layer."""

import re

import pytest
from repository import REPOSITORY, tracked_files

import custom_pypto
from custom_pypto.descriptions import ALL_OPS, OPS

FILES = tracked_files()
FOLDERS = {name.partition("/")[0] for name in FILES if "/" in name}  # build/ is not of them
# a path of the repository: `custom_pypto/kernels/<op>.py`, `tests/test_npu_{ops,slots}.py`
PATH = re.compile(rf"(?<![\w./:-])(?:{'|'.join(map(re.escape, FOLDERS))})/[\w.<>{{}},*/-]*")
# layers that an op has only if it has an NPU program
OF_NPU = ("custom_pypto/kernels/", "custom_pypto/npu/")


def in_braces(path: str) -> list[str]:
    """The paths of one with alternatives in braces."""
    if not (braces := re.search(r"{([^{}]*)}", path)):
        return [path]
    begin, end = path[: braces.start()], path[braces.end() :]
    return [p for part in braces[1].split(",") for p in in_braces(begin + part + end)]


def missing(text: str) -> list[str]:
    """The paths that a text names, of which there is no file; ``<op>`` and ``*`` are any name."""
    found = [p for path in PATH.findall(text) for p in in_braces(path.rstrip(".,"))]
    patterns = [re.sub(r"<\w+>", "*", path).rstrip("/") for path in found]
    return [path for path in patterns if not any(REPOSITORY.glob(path))]


def named_in(name: str) -> str:
    """The part of a file that must name existing paths."""
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    if name.endswith(".md"):
        return text
    lines = text.splitlines() or [""]
    return lines[1] if lines[0].startswith("#!") and len(lines) > 1 else lines[0]


@pytest.mark.parametrize("kind", [".md", ".py", ".cpp", ".h", ".sh"])
def test_every_path_that_is_named_exists(kind):
    of_others = ("CHANGELOG.md", "tests/cann/")  # what was; CANN's
    names = [name for name in FILES if name.endswith(kind) and not name.startswith(of_others)]
    wrong = {name: paths for name in names if (paths := missing(named_in(name)))}
    assert names and not wrong


def test_a_path_that_does_not_exist_is_found():
    text = "`docs/npu.md`, tests/test_{ops,env}.py: docs/<name>.md https://x/docs/y models/z*/a."
    assert missing(text) == ["tests/test_ops.py", "models/z*/a"]


def test_each_op_has_its_file_in_each_layer_and_a_document():
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    section = text.partition("## Add an op")[2].partition("\n## ")[0]
    layers = {path for path in re.findall(r"`([\w/]+<op>\.\w+)`", section) if "docs/" not in path}
    assert len(layers) == 6
    for layer in layers:
        ops = OPS if layer.startswith(OF_NPU) else ALL_OPS
        assert [
            layer.replace("<op>", op) for op in ops if layer.replace("<op>", op) not in FILES
        ] == []
    documents = "".join((REPOSITORY / p).read_text() for p in FILES if re.match(r"docs/\w+\.md", p))
    assert [op for op in ALL_OPS if op not in documents] == []
    for readme in ("README.md", "README.zh-CN.md"):
        rows = re.findall(r"^\|.*$", (REPOSITORY / readme).read_text(), re.MULTILINE)
        assert [op for op in ALL_OPS if sum(op in row for row in rows) < 2] == []


def test_descriptions_and_public_functions_are_of_the_same_ops():
    assert set(ALL_OPS) == set(custom_pypto.__all__)


def test_the_commit_hooks_have_the_versions_of_the_test_extra():
    hooks = (REPOSITORY / ".pre-commit-config.yaml").read_text()
    extras = (REPOSITORY / "setup.py").read_text()
    for hook, package in (("ruff-pre-commit", "ruff"), ("mirrors-clang-format", "clang-format")):
        version = re.search(rf"/{hook}\n    rev: v(\S+)\n", hooks)[1]
        assert f'"{package}=={version}"' in extras
