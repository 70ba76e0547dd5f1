"""vLLM on the ops: two engines and the plugin's start, if vLLM's own environment is there; and what
its page says the plugin changes of vLLM."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from documents import cells

ROOT = Path(__file__).parents[1]
PLUGIN = ROOT / "integrations" / "vllm"
PYTHON = ROOT / "build" / "serving" / "bin" / "python"
PAGE = ROOT / "docs" / "serving.md"


def test_engines_of_vllm_equal_transformers():
    if not PYTHON.exists():
        pytest.skip(
            "vLLM has an environment of its own, 3.5 GB: `bash run.sh test --serving` makes it "
            "and runs all its tests"
        )
    command = [PYTHON, "-m", "pytest", "-m", "not matrix", "-p", "no:cacheprovider"]
    command += ["tests/test_engines.py", "tests/test_plugin.py"]
    run = subprocess.run(command, cwd=PLUGIN, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert " passed" in run.stdout


def patches(monkeypatch) -> list:
    monkeypatch.syspath_prepend(PLUGIN)
    from custom_pypto_vllm.patches import PATCHES

    return [patch for group in PATCHES.values() for patch in group]


def names(patch) -> str:
    return ", ".join(f"`{name.replace(':', '.')}`" for name in patch.changes)


def test_the_page_lists_every_patch_of_vllm(monkeypatch):
    declared = [[names(p), p.why, p.since, p.until] for p in patches(monkeypatch)]
    assert cells(PAGE.read_text(), "| changed | why |")[1:] == declared


def assignments(code: str) -> list[str]:
    """Assignments to what the code imports of vLLM or transformers."""
    tree, theirs, found = ast.parse(code), set(), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or node.names[0].name
            if module.partition(".")[0] in ("vllm", "transformers"):
                theirs |= {(x.asname or x.name).partition(".")[0] for x in node.names}
    for node in ast.walk(tree):
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        for target in targets if isinstance(node, ast.stmt) else ():
            root = target
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            if root is not target and isinstance(root, ast.Name) and root.id in theirs:
                found.append(ast.unparse(target))
    return found


def test_nothing_else_of_the_plugin_assigns_to_vllm():
    spoilt = "from vllm.models import m\nm.a = 1\nm.table['x'].y += 2\nn = m.a\nother.a = m"
    assert assignments(spoilt) == ["m.a", "m.table['x'].y"]
    files = sorted((PLUGIN / "custom_pypto_vllm").rglob("*.py"))
    assert len(files) > 20
    assert {file.name: found for file in files if (found := assignments(file.read_text()))} == {}


def test_the_record_of_patches_needs_no_vllm():
    code = "import sys, custom_pypto_vllm.patches; sys.exit('vllm' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=PLUGIN, check=True)
