"""What a type checker sees of the public functions, installed from a wheel or in place."""

import ast
import inspect
import re
import shutil
import subprocess
import sys
import sysconfig
import typing
import venv
from pathlib import Path

import pytest
import typing_extensions
from repository import REPOSITORY

import custom_pypto
from custom_pypto import models, ops, quantized_ops, training_ops, weight_ops
from custom_pypto.standard import KEYWORDS

# below, mypy must accept every line but those with an error beside them
CALLS = """
import torch
import custom_pypto
from custom_pypto import models

x = torch.ones(1)
one: torch.Tensor = custom_pypto.npu_lightning_indexer_pto(x, x, x, pre_tokens=2**63 - 1)
two: tuple[torch.Tensor, torch.Tensor]
two = custom_pypto.npu_lightning_indexer_pto(x, x, x, return_value=True)
three: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
three = custom_pypto.npu_sparse_flash_attention_pto(x, x, None, x, 1.0, return_softmax_lse=True)
custom_pypto.npu_lightning_indexer_pto(x, x, x, return_value=bool(x))
custom_pypto.npu_lightning_indexer_pto(x, x, x, sparse_counts=1)  # call-overload
custom_pypto.npu_lightning_indexer_pto(x, x, x, layout_key="BNSD")  # call-overload
custom_pypto.npu_lightning_indexer_pto(x, x, x).shape
custom_pypto.npu_lightning_indexer_pto(x, x, x, return_value=True).shape  # attr-defined
custom_pypto.npu_lightning_indexer_grad_pto(x, x, x, x, x, pre_token=1)  # call-arg
custom_pypto.npu_lightning_indexer_grad_pto(x, x, x, x, x, layout="PA_BSND")  # arg-type
custom_pypto.npu_lightning_indexer_grad_pto(x, x, x, x, [1])  # arg-type
custom_pypto.npu_lightning_indexers_pto(x, x, x)  # attr-defined
model = models.load("a", weights="int4", dtype="bfloat16")
models.load("a", weights={"experts": "int8", "rest": None})
models.load("a", weights="int3")  # arg-type
models.load("a", weights={"expert": "int8"})  # arg-type
models.load("a", weight="int4")  # arg-type
models.load("a", dtype="bf16")  # arg-type
models.use_custom_pypto(model, training="ops", indexer_loss="dense", kv_dtype="int8")
models.use_custom_pypto(model, training="op")  # arg-type
models.use_custom_pypto(model, blocksize=16)  # call-arg
models.use_custom_pypto(model, indexer_loss="all")  # arg-type
models.use_custom_pypto(model, kv_dtype="fp8")  # arg-type
models.PagedCache(model, 1, "4096")  # arg-type
models.loads("a")  # attr-defined
"""
NAMES = {"custom_pypto": custom_pypto.__all__, "custom_pypto.models": models.__all__}
# as of the user's own project, but for packages whose types are not asked for
CONFIG = """
[mypy]
[mypy-transformers.*]
follow_imports = skip
[mypy-torch._dynamo.*,torch._inductor.*,torch.fx.*,torch.onnx.*,torch.distributed.*]
follow_imports = skip
"""


def from_a_wheel(site: Path) -> None:
    """Every file of the package that a wheel has, but for the library."""
    unwanted = shutil.ignore_patterns("*.so", "csrc", "__pycache__", "ascend_host", "isa")
    shutil.copytree(REPOSITORY / "custom_pypto", site / "custom_pypto", ignore=unwanted)


def in_place(site: Path) -> None:
    """What an editable installation in setuptools' mode "compat" adds."""
    (site / "__editable__.custom_pypto.pth").write_text(f"{REPOSITORY}\n")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """What mypy keeps of torch, half of its time."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("install", [from_a_wheel, in_place])
def test_a_type_checker_sees_every_public_name_and_rejects_wrong_calls(install, cache, tmp_path):
    venv.create(tmp_path / "venv", with_pip=False)
    [site] = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install(site)
    uses = [f"from {module} import {name}" for module, names in NAMES.items() for name in names]
    (tmp_path / "user").mkdir()
    file = tmp_path / "user/program.py"
    file.write_text("\n".join(uses) + CALLS)
    (tmp_path / "user/mypy.ini").write_text(CONFIG)
    command = [sys.executable, "-m", "mypy", "--python-executable", tmp_path / "venv/bin/python"]
    done = subprocess.run(
        [*command, "--cache-dir", cache, "--hide-error-context", file.name],
        cwd=file.parent,
        capture_output=True,
        text=True,
    )
    found: dict[int, set[str]] = {}
    for line in done.stdout.splitlines():
        place, is_error, text = line.partition(": error: ")
        if is_error:
            found.setdefault(int(place.split(":")[1]), set()).add(text.rpartition("[")[2][:-1])
    wanted = {}
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if kinds := line.partition("  # ")[2]:
            wanted[number] = {*kinds.split(", ")}
    assert found == wanted, done.stdout + done.stderr


def names_of(file: str) -> list[str]:
    """The list ``__all__`` of a module, of which type checkers read no more than literals."""
    for node in ast.parse(Path(file).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{file} has no __all__")


def test_the_names_of_all_ops_are_those_of_their_modules():
    parts = [name for part in (quantized_ops, training_ops, weight_ops) for name in part.__all__]
    own = [name for name, one in vars(ops).items() if getattr(one, "__module__", 0) == ops.__name__]
    public = [name for name in own if not name.startswith("_")]
    assert names_of(ops.__file__) == sorted({*parts, *public}) == custom_pypto.__all__
    assert names_of(models.__file__) == sorted(models.__all__)


def test_the_types_of_standard_keywords_are_those_that_the_ops_take():
    for op in custom_pypto.__all__:
        hints = typing.get_type_hints(getattr(custom_pypto, op))
        if op not in KEYWORDS:
            assert "standard" not in hints
            continue
        [keywords] = typing_extensions.get_args(hints["standard"])
        assert typing.get_type_hints(keywords).keys() == KEYWORDS[op].keys()


@pytest.mark.parametrize("op", ["npu_lightning_indexer_pto", "npu_sparse_flash_attention_pto"])
def test_every_overload_has_the_types_of_the_function(op):
    whole = typing.get_type_hints(getattr(custom_pypto, op))
    del whole["standard"], whole["return"]
    source = ast.parse(Path(ops.__file__).read_text())
    overloads = [node for node in source.body if getattr(node, "name", "") == op][:-1]
    assert len(overloads) == 3
    for overload in overloads:
        positional = {arg.arg: ast.unparse(arg.annotation) for arg in overload.args.args}
        hints = {name: eval(text, vars(ops)) for name, text in positional.items()}
        [flag] = [arg.arg for arg in overload.args.kwonlyargs]
        keywords = overload.args.kwarg.annotation.slice
        named = typing.get_type_hints(getattr(ops, keywords.id))
        own = {name: kind for name, kind in named.items() if name not in KEYWORDS[op]}
        assert hints | own | {flag: bool} == whole


@pytest.mark.parametrize("module", [custom_pypto, models], ids=NAMES)
def test_dir_has_public_names_alone(module):
    shown = {name for name in dir(module) if not name.startswith("__")}
    assert shown == {*module.__all__, *["models"] * (module is custom_pypto)}
    assert all(hasattr(module, name) for name in shown)
    assert module is models or "custom_pypto.models" in module.__doc__


@pytest.mark.parametrize("op", custom_pypto.__all__)
def test_every_argument_of_an_op_is_described_by_name(op):
    text = getattr(custom_pypto, op).__doc__
    described = set(re.findall(r"\w+", text.split("Args:")[1].split("Raises:")[0]))
    names = set(inspect.signature(getattr(custom_pypto, op)).parameters)
    assert names - described == set()
    assert ">>> " in text


@pytest.mark.parametrize("name", sorted({*models.__all__} - {"CACHE", "use_transformers"}))
def test_what_models_offers_has_an_example(name):
    text = getattr(models, name).__doc__
    assert "::\n" in text or name == "replay_indices"  # its example is record_indices'
    assert "Returns:" in text or name in ("PagedCache", "Record", "replay_indices")
