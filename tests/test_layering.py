"""Who may import whom: the contracts of import-linter in pyproject.toml, and what it cannot say.

docs/architecture.md draws the arrows.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repository import REPOSITORY

# folder -> the packages of others, besides Python's, that its files may import: import-linter knows
# what is forbidden, not what alone is allowed
THIRD_PARTY = {
    "custom_pypto/reference": {"torch"},  # the definition
    "custom_pypto/kernels": {"pypto"},  # the NPU kernels: never torch
    "custom_pypto/graph": {"torchair"},
    "custom_pypto/converter": {"torch", "torch_npu", "torchair"},
    "custom_pypto/simulation": set("cmake filelock pypto torch torch_npu torchair tqdm".split()),
    "custom_pypto": {
        "custom_pypto",
        "huggingface_hub",
        "safetensors",
        "torch",
        "typing_extensions",
    },
    "commands": {"prepare"},  # before anything is installed
}
# file -> modules that it imports by a name made at run time, which import-linter cannot see
BY_NAME = {
    "custom_pypto/__init__.py": {"f'{__name__}.models'"},  # an attribute, when it is asked for
    "custom_pypto/npu/__init__.py": {"f'{__name__}.{op}'"},
    "custom_pypto/reference/__init__.py": {"f'{__name__}.{op}'"},
    "custom_pypto/npu/common.py": {"f'custom_pypto.kernels.{op}'"},  # the only way to PyPTO
}
TORCH_HEADER = r"(torch|ATen|c10)/"
INCLUDE = r"""^\s*#\s*include\s*([<"])([^>"]+)"""
# folder of csrc -> the folders whose headers it includes: ops call tasks, tasks call micro-kernels
CSRC = {"": set(), "ops": {"ops", "tasks"}, "tasks": {"tasks", "cpu"}, "cpu": {"cpu"}}
# import-linter compares neighbours; this finds a file in a circle with its own folder as well
CIRCLES = """
import graphlib, grimp
graph = grimp.build_graph("custom_pypto", "models", cache_dir=None)
imports = {m: graph.find_modules_directly_imported_by(m) - {m} for m in graph.modules}
graphlib.TopologicalSorter(imports).prepare()
"""
LINT = (
    "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
)


def run(code: str, root: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)


def broken_contracts(root: Path) -> dict[str, str]:
    """What import-linter says of each broken contract."""
    said = run(LINT, root).stdout
    contracts = re.findall(r"^(.*) (KEPT|BROKEN)$", said, re.MULTILINE)
    assert len(contracts) == 7, said
    titles = [name for name, state in contracts if state == "BROKEN"]
    parts = re.split(rf"^({'|'.join(map(re.escape, titles))})\n-+\n", said, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True)) if titles else {}


def violations(root: Path) -> list[str]:
    """What import-linter cannot see."""
    found = []
    folders = ("commands", "custom_pypto")
    for path in sorted(file for folder in folders for file in (root / folder).rglob("*.py")):
        name = str(path.relative_to(root))
        allowed = next(v for folder, v in THIRD_PARTY.items() if name.startswith(folder + "/"))
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                if ast.unparse(node.args[0]) not in BY_NAME.get(name, ()):
                    found.append(f"{name} imports {ast.unparse(node.args[0])}")
            for module in modules:
                if module.partition(".")[0] not in allowed | sys.stdlib_module_names:
                    found.append(f"{name} imports {module}")
    return found + violations_of_csrc(root)


def violations_of_csrc(root: Path) -> list[str]:
    found = []
    csrc = root / "custom_pypto/csrc"
    for path in sorted(csrc.rglob("*.*")):
        text, folder = path.read_text(), str(path.parent.relative_to(csrc)).strip(".")
        if "parallel_for(" in text and path.name != "run_tasks.h":
            # ThreadSanitizer sees the threads of run_tasks alone
            found.append(f"{path.relative_to(root)} starts threads, but not by run_tasks")
        for mark, header in re.findall(INCLUDE, text, re.MULTILINE):
            if mark == "<":
                plain = folder == "cpu"  # micro-kernels see no torch header
                wrong = "torch_npu" in header or (plain and re.match(TORCH_HEADER, header))
            else:
                place = Path(os.path.normpath(path.parent / header)).parent
                wrong = place.name not in CSRC[folder] or place.parent != csrc
            if wrong:
                found.append(f"{path.relative_to(root)} includes {header}")
    return found


@pytest.fixture
def tree(tmp_path) -> Path:
    """The sources, to be spoilt."""
    unwanted = shutil.ignore_patterns("*.so", "__pycache__", "*.safetensors")
    for folder in ("custom_pypto", "models", "examples"):
        shutil.copytree(REPOSITORY / folder, tmp_path / folder, ignore=unwanted, symlinks=True)
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    return tmp_path


def spoil(root: Path, path: str, line: str) -> None:
    (root / path).parent.mkdir(exist_ok=True)
    with open(root / path, "a") as file:
        file.write(f"\n{line}\n")


def test_no_dependency_points_backwards():
    assert broken_contracts(REPOSITORY) == {}
    assert violations(REPOSITORY) == []


def test_no_modules_depend_on_each_other_in_a_circle():
    done = run(CIRCLES, REPOSITORY)
    assert done.returncode == 0, done.stderr


BACKWARDS = {
    "custom_pypto/ops.py": "import models\nfrom . import models",
    "custom_pypto/kernels/a.py": "from tests.cases import x\nfrom .. import ops",
    "models/a.py": "if x:\n    import examples.generate\nimport custom_pypto.reference.checks",
    "examples/a.py": "import benchmarks.x as y",
    "custom_pypto/reference/a.py": "from .. import ops",
    "custom_pypto/npu/a.py": "from .. import simulation\ndef f():\n    from .. import converter",
    "custom_pypto/env.py": "from . import simulation",
    "custom_pypto/converter/a.py": "from ..simulation import calculator",
    "custom_pypto/schemas.py": "import custom_pypto.graph.prototypes",
    "custom_pypto/verify.py": "from . import converter",
    "custom_pypto/utils.py": "import torch",
}
# contract -> what import-linter says of it in a tree with all of these
BROKEN = {
    "examples stand on models, these on custom_pypto": (
        "custom_pypto.ops -> models",
        "models.a -> examples.generate",
    ),
    "the packages stand below programs and tests": (
        "custom_pypto.kernels.a -> tests",
        "examples.a -> benchmarks",
    ),
    "layers of custom_pypto, those of a line apart from each other": (
        "custom_pypto.ops -> custom_pypto.models",
        "custom_pypto.reference.a -> custom_pypto.ops",
        "custom_pypto.kernels.a -> custom_pypto.ops",
        "custom_pypto.npu.a -> custom_pypto.simulation",
        "custom_pypto.env -> custom_pypto.simulation",
        "custom_pypto.npu.a -> custom_pypto.converter",
        "custom_pypto.converter.a -> custom_pypto.simulation.calculator",
        "custom_pypto.schemas -> custom_pypto.graph.prototypes",
        "not listed as layers:\n\n- custom_pypto.utils\n",
    ),
    "no circles": (".npu -> .simulation", ".converter -> .simulation"),
    "the simulation is for verify": (
        "custom_pypto.npu.a -> custom_pypto.simulation",
        "custom_pypto.env -> custom_pypto.simulation",
        "custom_pypto.converter.a -> custom_pypto.simulation.calculator",
    ),
    "the reference is for verify": ("models.a -> custom_pypto.reference.checks",),
    "converters are registered by the package, env and the simulation": (
        "custom_pypto.npu.a -> custom_pypto.converter",
        "custom_pypto.verify -> custom_pypto.converter",
    ),
}


def test_a_dependency_that_points_backwards_is_found(tree):
    for path, line in BACKWARDS.items():
        spoil(tree, path, line)
    said = broken_contracts(tree)
    assert said.keys() == BROKEN.keys()
    assert not [(c, line) for c, lines in BROKEN.items() for line in lines if line not in said[c]]


UNSEEN = {
    "commands-to-torch": ("commands/a.py", "import torch"),
    "reference-to-another": ("custom_pypto/reference/a.py", "import numpy"),
    "kernels-to-torch": ("custom_pypto/kernels/a.py", "import torch"),
    "graph-to-torch": ("custom_pypto/graph/a.py", "import torch"),
    "package-to-pypto": ("custom_pypto/npu/a.py", "import pypto.x"),
    "npu-to-torchair": ("custom_pypto/npu/a.py", "from torchair import ge"),
    "env-to-torch-npu": ("custom_pypto/env.py", "import torch_npu"),
    "npu-to-converter-by-name": (
        "custom_pypto/npu/a.py",
        "import importlib\nimportlib.import_module(f'custom_pypto.converter.{op}')",
    ),
    "converter-to-pypto": ("custom_pypto/converter/a.py", "import pypto"),
    "csrc": ("custom_pypto/csrc/ops/a.cpp", "#include <torch_npu/x.h>"),
    "micro-kernel": ("custom_pypto/csrc/cpu/a.h", "#include <ATen/x.h>"),
    "cpu-to-tasks": ("custom_pypto/csrc/cpu/a.h", '#include "../tasks/x.h"'),
    "tasks-to-ops": ("custom_pypto/csrc/tasks/a.h", '#include "../ops/x.h"'),
    "ops-to-cpu": ("custom_pypto/csrc/ops/a.cpp", '#include "../cpu/x.h"'),
    "csrc-to-outside": ("custom_pypto/csrc/ops/a.cpp", '#include "../../x.h"'),
    "threads": ("custom_pypto/csrc/ops/a.cpp", "at::parallel_for(0, 8, 1, f);"),
}


@pytest.mark.parametrize("path, line", UNSEEN.values(), ids=UNSEEN)
def test_what_import_linter_cannot_see_is_found(tmp_path, path, line):
    (tmp_path / path).parent.mkdir(parents=True)
    spoil(tmp_path, path, line)
    assert len(violations(tmp_path)) == 1


CIRCULAR = {
    "three-modules-one-of-them-in-a-function": {
        "custom_pypto/simulation/a.py": "from . import b",
        "custom_pypto/simulation/b.py": "from . import c",
        "custom_pypto/simulation/c.py": "def f():\n    from .a import x",
    },
    "models": {
        "models/cache.py": "from . import attention",
        "models/a.py": "from . import cache",
        "models/attention.py": "from models import cache",
    },
    "a-file-and-its-folder": {
        "custom_pypto/graph/__init__.py": "from .headers import source",
        "custom_pypto/graph/headers.py": "from custom_pypto import graph",
    },
}


@pytest.mark.parametrize("files", CIRCULAR.values(), ids=CIRCULAR)
def test_a_circle_of_imports_is_found(tree, files):
    for path, line in files.items():
        spoil(tree, path, line)
    done = run(CIRCLES, tree)
    assert done.returncode and "CycleError" in done.stderr


def test_a_dependency_that_points_forwards_is_allowed(tree):
    for path, line in {
        "examples/a.py": "import custom_pypto, models",
        "models/a.py": "from custom_pypto import ops",
        "custom_pypto/reference/a.py": "import math\nimport torch\nfrom .sequences import x",
        "custom_pypto/kernels/a.py": "import pypto\nfrom . import tiling",
        "custom_pypto/simulation/a.py": "import pypto, torch\nfrom .. import npu",
        "custom_pypto/converter/a.py": "import torch, torchair\nfrom .. import npu",
        "custom_pypto/csrc/ops/a.cpp": '#include <ATen/ATen.h>\n#include "../tasks/a.h"',
        "custom_pypto/csrc/tasks/a.h": '#include <ATen/ATen.h>\n#include "../cpu/kernels.h"',
        "custom_pypto/csrc/cpu/a.cpp": '#include "kernels.h"',
    }.items():
        spoil(tree, path, line)
    assert broken_contracts(tree) == {} and violations(tree) == []
    assert run(CIRCLES, tree).returncode == 0
