"""Folders depend on each other one way only; docs/architecture.md draws the arrows."""

import ast
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
    "custom_pypto/graph": "torchair",  # GE prototypes and what is generated from them
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
    return modules


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
        pytest.param("custom_pypto/graph/a.py", "import torch", id="graph-to-torch"),
        pytest.param("custom_pypto/npu.py", "import pypto", id="package-to-pypto"),
        pytest.param("custom_pypto/npu.py", "from . import simulation", id="npu-to-simulation"),
        pytest.param("custom_pypto/npu.py", "import torchair", id="npu-to-torchair"),
        pytest.param("custom_pypto/env.py", "import torch_npu", id="env-to-torch-npu"),
        pytest.param("custom_pypto/npu.py", "from . import converter", id="npu-to-converter"),
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
        pytest.param("custom_pypto/csrc/a.cpp", "#include <ATen/ATen.h>", id="csrc"),
        pytest.param("custom_pypto/csrc/cpu/a.cpp", '#include "kernels.h"', id="micro-kernel"),
    ],
)
def test_a_dependency_that_points_forwards_is_allowed(tmp_path, path, line):
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(line + "\n")
    assert violations(tmp_path) == []
