"""Where importing the package registers the converters of graph mode; no torch_npu is needed."""

import json

import pytest
from kernel_package import ALL, FOREIGN, IS_ANOTHER, TUTORIAL, VARIABLES, library, package
from processes import install

from custom_pypto import converter
from custom_pypto.descriptions import OPS, ge_type


@pytest.fixture(autouse=True)
def no_cann(monkeypatch):
    for variable in (converter.VARIABLE, *VARIABLES):
        monkeypatch.delenv(variable, raising=False)


def test_the_operators_are_those_of_the_prototypes():
    assert [*map(ge_type, OPS)] == list(ALL)
    assert {"AddCustom", "LightningIndexerPto", "SparseFlashAttentionPto"} <= set(ALL)


@pytest.mark.parametrize(
    "asked, installed, wanted",
    [
        (None, False, False),
        (None, True, True),
        ("1", False, True),
        ("1", True, True),
        ("0", False, False),
        ("0", True, False),
    ],
)
def test_when_converters_are_wanted(tmp_path, monkeypatch, asked, installed, wanted):
    if asked:
        monkeypatch.setenv(converter.VARIABLE, asked)
    package(tmp_path, ALL if installed else {"AddCustom": ALL["AddCustom"]})
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", str(tmp_path))
    assert converter.wanted() is wanted


@pytest.mark.parametrize("asked", ["", "yes", "2", "True"])
def test_another_value_is_rejected(monkeypatch, asked):
    monkeypatch.setenv(converter.VARIABLE, asked)
    with pytest.raises(ValueError) as rejected:
        converter.wanted()
    assert str(rejected.value) == (
        "custom_pypto: CUSTOM_PYPTO_GE_CONVERTERS must be 1 (register the GE converters) or 0 (do "
        f"not), got {asked!r}; unset it to register them only if a GE kernel package is "
        "installed"
    )


# ---- importing the package -----------------------------------------------------------------------

IMPORT = (
    "import sys, torch, custom_pypto; print(custom_pypto.add_custom(torch.ones(2), torch.ones(2)));"
    "print([name for name in ('torch_npu', 'torchair') if name in sys.modules])"
)
WARNING = (
    "RuntimeWarning: custom_pypto: torchair cannot be imported (ImportError: libhccl.so: none); "
    "install torch_npu, source CANN's set_env.sh, or set CUSTOM_PYPTO_GE_CONVERTERS=0"
)


@pytest.fixture
def torch_npu_without_cann(tmp_path):
    init = "raise ImportError('libhccl.so: none')"
    return install(tmp_path / "site", "torch_npu", "2.13.0", init)


@pytest.fixture
def imported(torch_npu_without_cann, with_torch):
    """Says what an import of the package says; the ops work after it."""

    def run(**variables) -> str:
        done = with_torch(IMPORT, path=[torch_npu_without_cann], **variables)
        assert done.stdout == "tensor([2., 2.])\n[]\n", done.stderr
        return done.stderr

    return run


def test_the_tutorials_package_imports_no_torchair(tmp_path, imported):
    package(tmp_path / "vendors/customize", TUTORIAL)
    assert imported(ASCEND_OPP_PATH=str(tmp_path)) == ""


def test_converters_that_are_asked_for_in_vain_are_a_warning(imported):
    # Python 3.13 shows the line, too
    assert WARNING in imported(CUSTOM_PYPTO_GE_CONVERTERS="1").partition("\n")[0]


def test_a_package_without_torchair_is_a_warning(tmp_path, imported):
    package(tmp_path / "vendors/us", ALL)
    assert WARNING in imported(ASCEND_OPP_PATH=str(tmp_path))
    assert imported(ASCEND_OPP_PATH=str(tmp_path), CUSTOM_PYPTO_GE_CONVERTERS="0") == ""


def test_an_import_with_another_value_ends_with_the_reason(with_torch):
    done = with_torch("import custom_pypto", CUSTOM_PYPTO_GE_CONVERTERS="on")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "ValueError: custom_pypto: CUSTOM_PYPTO_GE_CONVERTERS must be 1"
    )


REPORT = "import sys; from custom_pypto.__main__ import main; sys.exit(main(['env', '--json']))"


@pytest.mark.parametrize(
    "asked, what, remedy",
    [
        (
            None,
            "a kernel package with the operators of the ops in ",
            "this package ships no",
        ),
        ("0", "GE converters are disabled by CUSTOM_PYPTO_GE_CONVERTERS=0", "unset"),
        ("1", "torchair cannot be imported (ImportError: libhccl.so: none)", "install torch_npu"),
    ],
)
def test_the_report_names_what_is_missing(
    tmp_path, torch_npu_without_cann, with_torch, asked, what, remedy
):
    variables = {"ASCEND_HOME_PATH": str(tmp_path)}  # else only the NPU is missing
    variables |= {converter.VARIABLE: asked} if asked else {}
    done = with_torch(REPORT, path=[torch_npu_without_cann], **variables)
    assert done.returncode == 0, done.stderr
    ways = json.loads(done.stdout)["ways"]
    missing, *_ = ways["graph mode max-autotune, by a kernel package"]["missing"]
    assert missing["what"].startswith(what)
    assert missing["remedy"].startswith(remedy)


def test_another_operator_of_the_same_name_registers_nothing(tmp_path, imported, with_torch):
    path = package(tmp_path / "vendors/us", ALL | FOREIGN)
    library(tmp_path / "vendors/us", "int aclnnAddCustom, aclnnAddCustomGetWorkspaceSize;")
    assert imported(ASCEND_OPP_PATH=str(tmp_path)) == ""
    here = {"ASCEND_OPP_PATH": str(tmp_path), "ASCEND_HOME_PATH": str(tmp_path)}
    done = with_torch(REPORT, **here)
    ways = json.loads(done.stdout)["ways"]
    what = f"LightningIndexerPto in {path} {IS_ANOTHER}"
    for way in ("graph mode max-autotune, by a kernel package", "ops on the NPU through aclnn"):
        (remedy,) = (x["remedy"] for x in ways[way]["missing"] if x["what"] == what)
        assert remedy.startswith("put a package built from") and converter.VARIABLE not in remedy
    asked = {converter.VARIABLE: "1", "ASCEND_OPP_PATH": str(tmp_path)}
    said = imported(**asked)
    assert f"CUSTOM_PYPTO_GE_CONVERTERS=1 registers the GE converters, but {what}; put a" in said
