"""The package and its report on machines that are not as they should be."""

import ctypes
import importlib.machinery
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import install, python
from repository import REPOSITORY

import custom_pypto
from custom_pypto import env, machine, requirements

COMMAND = ("-m", "custom_pypto_command", "env")
RUN = "import runpy; runpy.run_module('custom_pypto_command', run_name='__main__')"
ADD = "import torch, custom_pypto; print(custom_pypto.add_custom(torch.ones(2), torch.ones(2)))"


@pytest.fixture
def torch_npu_without_cann(tmp_path):
    return install(
        tmp_path / "site",
        "torch_npu",
        "2.13.0",
        "raise ImportError('libhccl.so: cannot open shared object file')",
        "[torch.backends]\ntorch_npu = torch_npu:_autoload\n",
    )


@pytest.fixture
def package_with_half_a_library(tmp_path):
    shutil.copytree(
        REPOSITORY / "custom_pypto",
        tmp_path / "custom_pypto",
        ignore=shutil.ignore_patterns("*.so"),
    )
    (tmp_path / "custom_pypto/_C.abi3.so").touch()
    shutil.copy(REPOSITORY / "custom_pypto_command.py", tmp_path)
    return tmp_path


def test_report_names_what_is_loaded_in_this_process():
    report = env.collect()
    assert report["custom_pypto"]["load_error"] is None
    assert report["custom_pypto"]["version"] == custom_pypto.__version__
    assert report["versions"]["torch"] == torch.__version__
    assert report["cpu"]["kernels_isa"] == torch.ops.custom_pypto.cpu_isa()
    assert report["cpu"]["threads"] == torch.get_num_threads()
    assert report["ways"]["ops on the CPU"] == {"works": True, "missing": []}


def test_command_prints_the_report_as_text_and_as_json(with_torch):
    text, as_json = with_torch(RUN, "env"), with_torch(RUN, "env", "--json")
    assert (text.returncode, as_json.returncode) == (0, 0), text.stderr + as_json.stderr
    report = json.loads(as_json.stdout)
    for name, version in report["versions"].items():
        assert re.search(rf"^  {name} +{re.escape(version or 'not installed')}$", text.stdout, re.M)
    for way, state in report["ways"].items():
        said = "yes" if state["works"] else "no "
        assert re.search(rf"^  {said}  {re.escape(way)}(: needs [\d, ]+)?$", text.stdout, re.M)
        assert state["works"] == (not state["missing"])


def test_torch_npu_without_cann_breaks_torch_but_not_the_package(torch_npu_without_cann):
    alone = python("-c", "import torch", path=[torch_npu_without_cann])
    assert "Failed to load the backend extension: torch_npu" in alone.stderr
    with_package = python("-c", "import custom_pypto;" + ADD, path=[torch_npu_without_cann])
    assert with_package.stdout == "tensor([2., 2.])\n", with_package.stderr


def test_torch_npu_without_cann_is_reported_with_the_remedy(torch_npu_without_cann, tmp_path):
    here = {"ASCEND_HOME_PATH": str(tmp_path)}  # a CANN whose set_env.sh was not sourced
    result = python(*COMMAND, "--json", path=[torch_npu_without_cann], **here)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["versions"]["torch_npu"] == "2.13.0"
    assert "CANN cannot be loaded: libascendcl.so" in report["npu"]["problem"]["what"]
    assert "set_env.sh" in report["npu"]["problem"]["remedy"]
    assert report["ways"]["ops on the CPU"]["works"]
    assert not report["ways"]["ops on the NPU"]["works"]
    # transformers imports any torch_npu that it finds
    models = "models of transformers on the CPU"
    assert not report["ways"][models]["works"]
    transformers = python(
        "-c", "import custom_pypto, transformers.activations", path=[torch_npu_without_cann]
    )
    assert "libhccl.so" in transformers.stderr.splitlines()[-1]


def test_what_the_user_set_for_autoload_is_left_alone(torch_npu_without_cann):
    result = python(
        "-c",
        "import custom_pypto",
        path=[torch_npu_without_cann],
        TORCH_DEVICE_BACKEND_AUTOLOAD="1",
    )
    assert "ImportError: custom_pypto: cannot load torch or the compiled ops" in result.stderr
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in result.stderr


def test_autoload_is_left_alone_where_there_is_no_torch_npu(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    machine.disable_broken_autoload()
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" not in os.environ


FLAGS_OF_A_TENSOR = """
import os, re
{before}
import custom_pypto, torch
tensor = torch.empty(2**25, dtype=torch.uint8)
address = tensor.data_ptr() + 2**24
within = False
for line in open("/proc/self/smaps"):
    if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
        within = int(found[1], 16) <= address < int(found[2], 16)
    elif within and line.startswith("VmFlags:"):
        print(line)
"""


@pytest.mark.skipif(not os.path.exists(machine.LARGE_PAGES), reason="Linux without pages of 2 MiB")
@pytest.mark.parametrize("user, large", [(None, True), ("1", True), ("0", False)])
def test_tensors_are_in_large_pages_unless_the_user_says_no(user, large):
    name = "THP_MEM_ALLOC_ENABLE"
    set_it = (
        f"os.environ.pop({name!r}, None)" if user is None else f"os.environ[{name!r}] = {user!r}"
    )
    ran = python("-c", FLAGS_OF_A_TENSOR.format(before=set_it))
    assert ran.returncode == 0, ran.stderr
    assert ("hg" in ran.stdout.split()) is large


def test_torch_npu_for_another_torch_is_reported_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    monkeypatch.syspath_prepend(install(tmp_path, "torch_npu", "2.7.1.post2", ""))
    monkeypatch.setattr(ctypes, "CDLL", lambda library: None)  # a machine with CANN
    monkeypatch.delattr(torch, "npu", raising=False)
    assert env.collect()["npu"]["problem"] == {
        "what": f"torch_npu 2.7.1.post2 does not match torch {torch.__version__}",
        "remedy": requirements.torch_npu_remedy(torch.__version__),
    }


@pytest.mark.parametrize("installed", [("torch", "torch_npu"), ("torch",)], ids=len)
def test_torch_for_cuda_is_reported_with_the_remedy(tmp_path, monkeypatch, installed):
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    for name in installed:  # the default index has no builds in its versions
        install(tmp_path, name, "2.13.0", "")
    (tmp_path / "torch/version.py").write_text("__version__ = '2.13.0+cu130'\ndebug = False\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", importlib.machinery.PathFinder.find_spec)
    monkeypatch.setattr(ctypes, "CDLL", lambda library: None)  # a machine with CANN
    monkeypatch.delattr(torch, "npu", raising=False)
    report = env.collect()
    assert report["versions"]["torch"] == "2.13.0+cu130"
    problem = {
        "what": "torch_npu cannot be loaded with torch 2.13.0+cu130, a CUDA build",
        "remedy": "pip install torch==2.13.0+cpu "
        "--extra-index-url https://download.pytorch.org/whl/cpu",
    }
    assert problem in report["ways"]["ops on the NPU"]["missing"]
    assert (report["npu"]["problem"] == problem) == ("torch_npu" in installed)


def test_import_of_half_a_library_says_how_to_build_it(package_with_half_a_library, with_torch):
    result = with_torch("import custom_pypto", cwd=package_with_half_a_library)
    assert result.returncode == 1
    assert "_C.abi3.so: file too short" in result.stderr
    assert "bash build_and_install.sh" in result.stderr.splitlines()[-1]


def test_command_reports_a_library_that_does_not_load(package_with_half_a_library, with_torch):
    result = with_torch(RUN, "env", "--json", cwd=package_with_half_a_library)
    assert result.returncode == 1, result.stderr
    report = json.loads(result.stdout)
    assert "_C.abi3.so: file too short" in report["custom_pypto"]["load_error"]
    missing = report["ways"]["ops on the CPU"]["missing"]
    assert [problem["remedy"] for problem in missing] == [requirements.BUILD]


def test_the_report_names_the_commit_of_a_clone_and_of_a_wheel(tmp_path, monkeypatch):
    package = tmp_path / "custom_pypto"
    package.mkdir()
    monkeypatch.setattr(machine, "__file__", str(package / "machine.py"))
    for version, commit in [
        ("0.4.0.dev0+torch2.13.g0123456789", "0123456789"),
        ("0.4.0.dev0+torch2.13.g0123456789.dirty", "0123456789-dirty"),
        ("0.4.0.dev0+torch2.13", None),
    ]:
        monkeypatch.setattr(machine, "installed_version", lambda _, version=version: version)
        assert machine.commit() == commit
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=b"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "Add"]):
        subprocess.run([*git, *words], check=True)
    report = env.collect()
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    assert report["custom_pypto"]["commit"] == head[:10]
    assert f"(commit {head[:10]})" in env.render(report).splitlines()[0]


def test_command_reports_a_torch_that_does_not_load(tmp_path):
    init = "raise OSError('libtorch_global_deps.so: cannot open shared object file')"
    result = python(*COMMAND, path=[install(tmp_path, "torch", "2.13.0", init)])
    assert result.returncode == 1, result.stderr
    assert "ops (libtorch_global_deps.so: cannot open shared object file)" in result.stdout
    assert re.search(r"^  torch +2\.13\.0$", result.stdout, re.M)


@pytest.mark.parametrize(
    "file, version",
    [
        pytest.param("aarch64-linux/ascend_toolkit_install.info", "8.5.0", id="in-arch-folder"),
        pytest.param("ascend_cann_install.info", "9.0.0", id="at-the-top"),
    ],
)
def test_cann_version_is_read_from_where_it_is_installed(tmp_path, monkeypatch, file, version):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(f"package_name=x\nversion={version}\narch=aarch64\n")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert env.collect()["versions"]["CANN"] == f"{version} in {tmp_path}"


V8_2 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm"


def lscpu(folder: Path, printed: str) -> None:
    """A program of that name, in a folder for the PATH."""
    program = folder / "lscpu"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{printed}\nEND\n")
    program.chmod(0o755)


@pytest.mark.parametrize(
    "printed, model, features",
    [
        pytest.param(
            "Architecture:        aarch64\nByte Order:          Little Endian\n"
            "Vendor ID:           HiSilicon\nModel name:          Kunpeng-920\nModel:   0\n"
            f"Flags:               {V8_2} jscvt fcma dcpop asimddp asimdfhm",
            "Kunpeng-920",
            "asimd asimdhp asimddp asimdfhm",
            id="arm",
        ),
        pytest.param(
            "Architecture:          x86_64\nVendor ID:             AuthenticAMD\n"
            "  Model name:          AMD EPYC 9754 128-Core Processor\n    CPU family:   25\n"
            "    Flags:             fpu sse2 fma avx2\n"
            "Vulnerabilities:       \n  Retbleed:            Not affected",
            "AMD EPYC 9754 128-Core Processor",
            "fma avx2",
            id="x86-indented",
        ),
        pytest.param("Architecture:   riscv64", "unknown", "", id="neither"),
    ],
)
def test_cpu_is_named_as_lscpu_does(printed, model, features, tmp_path, monkeypatch):
    lscpu(tmp_path, printed)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    cpu = env.collect()["cpu"]
    assert (cpu["model"], " ".join(cpu["features"])) == (model, features)


def test_there_is_a_report_without_lscpu_and_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    report = env.collect()
    assert (report["cpu"]["model"], report["cpu"]["features"]) == ("unknown", [])
    assert report["versions"]["compiler"] is None
    assert "unknown" in env.render(report)


def test_the_copy_of_pypto_in_use_is_named_with_its_folder(tmp_path, monkeypatch):
    """CANN puts its own on PYTHONPATH, before that of the environment."""
    site = tmp_path / "cann/python/site-packages"
    (site / "pypto").mkdir(parents=True)
    (site / "pypto/__init__.py").touch()
    (site / "pypto-0.2.1.dist-info").mkdir()
    facts = "Metadata-Version: 2.1\nName: pypto\nVersion: 0.2.1\nX-Run-Version: 9.1.0\n"
    (site / "pypto-0.2.1.dist-info/METADATA").write_text(facts)
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "pypto", raising=False)
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    assert requirements.pypto_copy() == f"0.2.1 in {site.resolve()}/pypto"
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "cann"))
    assert requirements.pypto_copy() == f"0.2.1 of CANN 9.1.0 in {site.resolve()}/pypto"
    assert requirements.pypto_problem() is requirements.untested_pypto() is None
    metadata = site / "pypto-0.2.1.dist-info/METADATA"
    metadata.write_text(facts.replace("0.2.1", "0.1.9"))
    problem = requirements.pypto_problem()
    found = f"found 0.1.9 of CANN 9.1.0 in {site.resolve()}/pypto"
    assert problem.what == f"needs pypto 0.2.0 or 0.2.1, {found}"
    assert problem.remedy.startswith(
        "source the set_env.sh of CANN 9.1 or later, which has its own, else pip install "
        "pypto==0.2.0"
    )
    metadata.write_text(facts.replace("0.2.1", "0.3.0"))
    assert requirements.pypto_problem() is None
    copy = f"0.3.0 of CANN 9.1.0 in {site.resolve()}/pypto"
    said = f"pypto {copy} is untested; tested are 0.2.0 and 0.2.1"
    assert requirements.untested_pypto() == said
    assert env.collect()["versions"]["pypto"] == f"{copy}, untested"
    requirements.warn_of_untested_pypto.cache_clear()
    with pytest.warns(RuntimeWarning) as warned:
        requirements.warn_of_untested_pypto()
        requirements.warn_of_untested_pypto()  # once for each process
    assert [str(warning.message) for warning in warned] == [f"custom_pypto: {said}"]
    requirements.warn_of_untested_pypto.cache_clear()


def test_a_machine_without_an_npu_is_recommended_nothing_that_needs_one(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_device_nodes", lambda: 0)
    monkeypatch.setattr(requirements, "CANN", str(tmp_path / "none"))
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.delattr(torch, "npu", raising=False)
    monkeypatch.setattr(env, "pypto_problem", lambda: requirements.Problem("pypto", "PYPTO"))
    report = env.collect()
    on_npu = {
        way: state for way, state in report["ways"].items() if re.search("on the NPU|graph", way)
    }
    assert len(on_npu) == 5
    for state in on_npu.values():
        assert state == {"works": False, "missing": [vars(machine.NO_NPU)]}
    assert "torch_npu" not in env.render(report).partition("What works here")[2]
    remedies = {x["remedy"] for state in report["ways"].values() for x in state["missing"]}
    assert remedies == {"PYPTO", machine.NO_NPU.remedy}


def test_the_ways_to_graph_mode_are_those_of_its_page(monkeypatch, tmp_path):
    """PyPTO alone runs what is captured, and what a GE with callbacks calls back."""
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    monkeypatch.setattr(
        machine,
        "npu",
        lambda: {"devices": ["910B"], "device_nodes": 1, "problem": None, "autoload": None},
    )
    monkeypatch.setattr(machine, "build_problem", lambda: None)
    monkeypatch.setattr(env, "pypto_problem", lambda: None)
    monkeypatch.delenv("ASCEND_CUSTOM_OPP_PATH", raising=False)
    monkeypatch.delenv("ASCEND_OPP_PATH", raising=False)
    capture, callback, package = (
        f"graph mode {way}"
        for way in (
            "npugraph_ex, by capture",
            "max-autotune, by a callback of PyPTO",
            "max-autotune, by a kernel package",
        )
    )
    ways = env.collect()["ways"]
    assert ways[capture]["works"] and not ways[package]["works"]
    (missing,) = ways[callback]["missing"]
    assert missing["what"].startswith(f"{tmp_path}/include/graph/custom_op.h")
    assert missing["remedy"] == "use npugraph_ex"
    (tmp_path / "include/graph").mkdir(parents=True)
    (tmp_path / "include/graph/custom_op.h").touch()
    assert env.collect()["ways"][callback]["works"]
    remedies = {x["remedy"] for state in ways.values() for x in state["missing"]}
    assert not any("CUSTOM_PYPTO_GE_CONVERTERS" in remedy for remedy in remedies)


def recipes_package(site: Path) -> Path:
    install(site, "custom_pypto", "1.0.0", "")
    files = ("__init__.py", "converter/npu_sparse_attention_pto.py")
    record = "".join(f"custom_pypto/{file},,\n" for file in files)
    (site / "custom_pypto-1.0.0.dist-info/RECORD").write_text(record)
    return site / "custom_pypto"


def test_the_recipes_package_of_the_same_name_is_named(tmp_path, monkeypatch):
    assert requirements.recipe() is None
    monkeypatch.syspath_prepend(tmp_path)
    folder = recipes_package(tmp_path)
    assert requirements.recipe() == str(folder)
    report = env.collect()
    assert report["versions"]["recipe"] == f"its custom_pypto, of the same name, in {folder}"
    assert f"  recipe        its custom_pypto, of the same name, in {folder}\n" in env.render(
        report
    )


def test_a_build_beside_the_recipes_package_stops(tmp_path):
    folder = recipes_package(tmp_path)
    done = python("setup.py", "--version", path=[tmp_path])
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"setup.py: the recipe's package of the same name is in {folder}, and this one would "
        "replace it; use another environment, or pip uninstall custom_pypto first"
    )
