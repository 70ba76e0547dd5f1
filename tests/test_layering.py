"""Folders depend on each other one way only, and no modules on each other in a circle;
docs/architecture.md draws the arrows."""

import ast
import graphlib
import re
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
# folder -> what its Python files may not import; the most specific folder decides
FORBIDDEN = {
    "custom_pypto": {"models", "examples", "tests", "benchmarks"},
    "models": {"examples", "tests", "benchmarks"},
    "examples": {"tests", "benchmarks"},
}
# folder -> the one package, besides itself and Python's, that it may import
ALLOWED = {
    "custom_pypto/reference": "torch",  # the definition
    "custom_pypto/kernels": "pypto",  # the NPU programs: never torch, never the ops
}
# who in custom_pypto may import what; npu.py reaches pypto through the kernels
ONLY_IN = {
    "pypto": ("custom_pypto/kernels/", "custom_pypto/simulation/"),
    "custom_pypto.simulation": ("custom_pypto/simulation/", "custom_pypto/verify.py"),
    "torch_npu": ("custom_pypto/converter/", "custom_pypto/simulation/"),
    "torchair": ("custom_pypto/converter/", "custom_pypto/graph/", "custom_pypto/simulation/"),
    "custom_pypto.converter": (
        "custom_pypto/converter/",
        "custom_pypto/simulation/",
        "custom_pypto/__init__.py",
        "custom_pypto/env.py",
    ),
}
REFERENCE = "custom_pypto/reference"
TORCH_HEADER = r"(torch|ATen|c10)/"


def imported_modules(path: Path, root: Path) -> set[str]:
    package = path.relative_to(root).parent.parts
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            origin = [*base, *([node.module] if node.module else [])]
            modules |= {".".join([*origin, alias.name]) for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            modules.add(named(node.args[0], ".".join(package)))
    return modules


def named(name: ast.expr, package: str) -> str:
    """What ``importlib.import_module(name)`` imports; ``*`` for what is not in the text."""
    known = ""
    for part in name.values if isinstance(name, ast.JoinedStr) else [name]:
        if isinstance(part, ast.Constant):
            known += part.value
        elif isinstance(part, ast.FormattedValue) and ast.unparse(part.value) == "__name__":
            known += package  # of an __init__.py
        else:
            return known + "*"
    return known


def dependencies(root: Path) -> dict[str, set[str]]:
    """Of each module of ours, those that it imports, at its top or inside a function."""
    paths = {}
    for folder in ("custom_pypto", "models"):
        for path in (root / folder).rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    found = {}
    for module, path in paths.items():
        found[module] = set()
        for name in imported_modules(path, root):
            if name.endswith("*"):
                found[module] |= {path for path in paths if path.startswith(name[:-1])} - {module}
            while name and name not in paths:  # what it imports of a module
                name = name.rpartition(".")[0]
            found[module] |= {name} - {"", module}
    return found


def by_folder(modules: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same of files and folders next to ``custom_pypto/__init__.py``, each folder as one."""

    def folder(module: str) -> str:
        return ".".join(module.split(".")[:2])

    found = {folder(module): set() for module in modules}
    for module, imported in modules.items():
        found[folder(module)] |= {folder(name) for name in imported} - {folder(module)}
    return found


def cycles(root: Path) -> list[str]:
    """At most one among modules, and one among folders."""
    found = []
    modules = dependencies(root)
    for graph in (modules, by_folder(modules)):
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            found.append(" <- ".join(error.args[1]))
    return found


def violations(root: Path) -> list[str]:
    found = []
    for folder, forbidden in FORBIDDEN.items():
        for path in sorted((root / folder).rglob("*.py")):
            for module in imported_modules(path, root):
                if module.partition(".")[0] in forbidden:
                    found.append(f"{path.relative_to(root)} imports {module}")
    for folder, allowed in ALLOWED.items():
        for path in sorted((root / folder).rglob("*.py")):
            for module in imported_modules(path, root):
                inside = (module + ".").startswith(folder.replace("/", ".") + ".")
                if not inside and module.partition(".")[0] not in (
                    allowed,
                    *sys.stdlib_module_names,
                ):
                    found.append(f"{path.relative_to(root)} imports {module}")
    for path in sorted((root / "custom_pypto").rglob("*.py")):
        for module in imported_modules(path, root):
            for package, places in ONLY_IN.items():
                inside = (module + ".").startswith(package + ".")
                if inside and not str(path.relative_to(root)).startswith(places):
                    found.append(f"{path.relative_to(root)} imports {module}")
    for path in sorted((root / "custom_pypto/csrc").rglob("*.*")):
        headers = re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)', path.read_text(), re.MULTILINE)
        plain = "cpu" in path.relative_to(root).parts  # micro-kernels see no torch header
        for header in headers:
            if "torch_npu" in header or (plain and re.match(TORCH_HEADER, header)):
                found.append(f"{path.relative_to(root)} includes {header}")
    return found


def test_no_dependency_points_backwards():
    assert violations(REPOSITORY) == []


def test_no_modules_depend_on_each_other_in_a_circle():
    assert cycles(REPOSITORY) == []


def test_every_import_between_modules_is_seen():
    found = dependencies(REPOSITORY)
    assert found["custom_pypto.ops"] == {"custom_pypto.standard"}
    program = "custom_pypto.kernels.npu_lightning_indexer_pto"
    assert {"custom_pypto.requirements", program} <= found["custom_pypto.npu"]
    assert "custom_pypto.converter.add_custom" in found["custom_pypto.converter"]
    assert "custom_pypto.npu" in found["custom_pypto.converter.add_custom"]
    assert "custom_pypto.env" in found["models.loading"]


@pytest.mark.parametrize(
    "files, cycle",
    [
        pytest.param(
            {"custom_pypto/a.py": "from . import b", "custom_pypto/b.py": "from .a import x"},
            {"custom_pypto.a", "custom_pypto.b"},
            id="two-modules",
        ),
        pytest.param(
            {
                "custom_pypto/a.py": "import custom_pypto.b",
                "custom_pypto/b.py": "from . import c",
                "custom_pypto/c.py": "def f():\n    from .a import x",
            },
            {"custom_pypto.a", "custom_pypto.b", "custom_pypto.c"},
            id="three-modules-one-of-them-in-a-function",
        ),
        pytest.param(
            {
                "custom_pypto/env.py": "from . import converter",
                "custom_pypto/npu.py": "from . import env",
                "custom_pypto/converter/__init__.py": "",
                "custom_pypto/converter/op.py": "from .. import npu",
            },
            {"custom_pypto.env", "custom_pypto.npu", "custom_pypto.converter"},
            id="through-a-folder",
        ),
        pytest.param(
            {
                "custom_pypto/a.py": "import importlib\nimportlib.import_module('custom_pypto.b')",
                "custom_pypto/b.py": "from . import a",
            },
            {"custom_pypto.a", "custom_pypto.b"},
            id="import_module",
        ),
        pytest.param(
            {
                "custom_pypto/a/__init__.py": "import_module(f'{__name__}.{op}')",
                "custom_pypto/a/b.py": "from custom_pypto import a",
            },
            {"custom_pypto.a", "custom_pypto.a.b"},
            id="inside-a-folder",
        ),
        pytest.param(
            {"models/a.py": "from .b import c", "models/b.py": "from models import a"},
            {"models.a", "models.b"},
            id="models",
        ),
    ],
)
def test_a_circle_of_imports_is_found(tmp_path, files, cycle):
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")
    assert cycle in [set(found.split(" <- ")) for found in cycles(tmp_path)]


@pytest.mark.parametrize(
    "path, line",
    [
        pytest.param("custom_pypto/ops.py", "import models", id="package-to-models"),
        pytest.param("custom_pypto/a/b.py", "from tests.cases import x", id="package-to-tests"),
        pytest.param("models/a.py", "if x:\n    import examples", id="models-to-examples"),
        pytest.param("examples/a.py", "import benchmarks.x as y", id="examples-to-benchmarks"),
        pytest.param(f"{REFERENCE}/a.py", "import numpy", id="reference-to-another-package"),
        pytest.param(f"{REFERENCE}/a.py", "from .. import ops", id="reference-to-the-ops"),
        pytest.param("custom_pypto/kernels/a.py", "import torch", id="kernels-to-torch"),
        pytest.param("custom_pypto/kernels/a.py", "from .. import ops", id="kernels-to-the-ops"),
        pytest.param("custom_pypto/graph/a.py", "import pypto", id="graph-to-pypto"),
        pytest.param("custom_pypto/npu.py", "import pypto", id="package-to-pypto"),
        pytest.param("custom_pypto/npu.py", "from . import simulation", id="npu-to-simulation"),
        pytest.param("custom_pypto/npu.py", "import torchair", id="npu-to-torchair"),
        pytest.param("custom_pypto/env.py", "import torch_npu", id="env-to-torch-npu"),
        pytest.param("custom_pypto/npu.py", "from . import converter", id="npu-to-converter"),
        pytest.param(
            "custom_pypto/npu.py",
            "import importlib\nimportlib.import_module(f'custom_pypto.converter.{op}')",
            id="npu-to-converter-by-name",
        ),
        pytest.param("custom_pypto/converter/a.py", "import pypto", id="converter-to-pypto"),
        pytest.param(
            "custom_pypto/converter/a.py",
            "from ..simulation import b",
            id="converter-to-simulation",
        ),
        pytest.param("custom_pypto/csrc/a.cpp", "#include <torch_npu/x.h>", id="csrc"),
        pytest.param("custom_pypto/csrc/cpu/a.h", "#include <ATen/x.h>", id="micro-kernel"),
    ],
)
def test_a_dependency_that_points_backwards_is_found(tmp_path, path, line):
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(line + "\n")
    assert len(violations(tmp_path)) == 1


@pytest.mark.parametrize(
    "path, line",
    [
        pytest.param("examples/a.py", "import custom_pypto, models", id="examples"),
        pytest.param("models/a.py", "from custom_pypto import ops", id="models"),
        pytest.param(f"{REFERENCE}/a.py", "import math\nfrom .b import c", id="reference"),
        pytest.param("custom_pypto/kernels/a.py", "import pypto\nfrom . import b", id="kernels"),
        pytest.param("custom_pypto/simulation/a.py", "import pypto, torch", id="simulation"),
        pytest.param("custom_pypto/converter/a.py", "import torch, torchair", id="converter"),
        pytest.param("custom_pypto/converter/a.py", "from .. import npu", id="converter-to-npu"),
        pytest.param(
            "custom_pypto/npu.py",
            "import_module(f'custom_pypto.kernels.{op}')",
            id="npu-to-kernels",
        ),
        pytest.param("custom_pypto/csrc/a.cpp", "#include <ATen/ATen.h>", id="csrc"),
        pytest.param("custom_pypto/csrc/cpu/a.cpp", '#include "kernels.h"', id="micro-kernel"),
    ],
)
def test_a_dependency_that_points_forwards_is_allowed(tmp_path, path, line):
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(line + "\n")
    assert violations(tmp_path) == []
