"""Where importing the package registers the converters of graph mode; no torch_npu is needed."""

import json

import pytest
from test_env import install, python

from custom_pypto import converter
from custom_pypto.graph import prototypes

ALL = list(converter.OPERATORS)


@pytest.fixture(autouse=True)
def no_cann(monkeypatch):
    for variable in (converter.VARIABLE, "ASCEND_CUSTOM_OPP_PATH", "ASCEND_OPP_PATH"):
        monkeypatch.delenv(variable, raising=False)


def package(vendor, text: str, soc: str = "ascend910b"):
    """What a kernel package of ``vendor`` (a folder) has for one SoC. Returns the list's path."""
    folder = vendor / "op_impl/ai_core/tbe/config" / soc
    folder.mkdir(parents=True)
    path = folder / f"aic-{soc}-ops-info.json"
    path.write_text(text)
    return path


def listing(operators: list[str]) -> str:
    return json.dumps({operator: {"opFile": {"value": "kernel"}} for operator in operators})


def test_the_operators_are_those_of_the_prototypes():
    assert [prototype.type for prototype in prototypes.prototypes()] == ALL
    assert {"AddCustom", "LightningIndexerPto", "SparseFlashAttentionPto"} <= set(ALL)


def test_a_package_is_found_by_the_path_to_its_vendor(tmp_path, monkeypatch):
    path = package(tmp_path / "vendors/us", listing([*ALL, "Another"]))
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", f"{tmp_path}/vendors/us/")
    assert converter.kernel_package() == str(path)


def test_a_package_is_found_among_other_entries_and_socs(tmp_path, monkeypatch):
    package(tmp_path / "a", listing(["AddCustom"]))
    package(tmp_path / "b [1]", listing(ALL[:3]), "ascend310p")
    path = package(tmp_path / "b [1]", listing(ALL), "ascend910_93")
    entries = [
        "",
        f"{tmp_path}/none",
        f"{tmp_path}/a",
        f"{tmp_path}/b [1]",
        f"{tmp_path}/op_api/lib",
    ]
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", ":".join(entries))
    assert converter.kernel_package() == str(path)


def test_a_package_is_found_where_cann_installs_packages(tmp_path, monkeypatch):
    package(tmp_path / "vendors/customize", listing(["AddCustom"]))
    path = package(tmp_path / "vendors/us", listing(ALL))
    monkeypatch.setenv("ASCEND_OPP_PATH", str(tmp_path))
    assert converter.kernel_package() == str(path)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(listing(["AddCustom"]), id="the-tutorial"),
        pytest.param(listing(ALL[:3]), id="not-all"),
        pytest.param(listing(["AddCustomV2", "lightningindexerpto"]), id="similar-names"),
        pytest.param(listing(ALL)[:-3], id="cut"),
        pytest.param("", id="empty"),
        pytest.param(json.dumps(ALL), id="a-list"),
        pytest.param(json.dumps({"operators": ALL}), id="below"),
        pytest.param("7", id="a-number"),
    ],
)
@pytest.mark.parametrize("variable", ["ASCEND_CUSTOM_OPP_PATH", "ASCEND_OPP_PATH"])
def test_anything_else_is_no_package(tmp_path, monkeypatch, variable, text):
    package(tmp_path / "vendors/us", text)
    folder = tmp_path / "vendors/us" if variable == "ASCEND_CUSTOM_OPP_PATH" else tmp_path
    monkeypatch.setenv(variable, str(folder))
    assert converter.kernel_package() is None
    assert not converter.wanted()


def test_a_list_that_cannot_be_read_is_no_package(tmp_path, monkeypatch):
    package(tmp_path, "").write_bytes(b"\xff\xfe{")
    (tmp_path / "op_impl/ai_core/tbe/config/ascend310p/aic-x-ops-info.json").mkdir(parents=True)
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", str(tmp_path))
    assert converter.kernel_package() is None


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
    package(tmp_path, listing(ALL if installed else ALL[:1]))
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


def imported(site, **variables) -> str:
    """What an import of the package says; the ops work after it."""
    done = python("-c", IMPORT, path=[site], **variables)
    assert done.stdout == "tensor([2., 2.])\n[]\n", done.stderr
    return done.stderr


def test_the_tutorials_package_imports_no_torchair(tmp_path, torch_npu_without_cann):
    package(tmp_path / "vendors/customize", listing(["AddCustom"]))
    assert imported(torch_npu_without_cann, ASCEND_OPP_PATH=str(tmp_path)) == ""


def test_converters_that_are_asked_for_in_vain_are_a_warning(torch_npu_without_cann):
    said = imported(torch_npu_without_cann, CUSTOM_PYPTO_GE_CONVERTERS="1")
    assert said == f"<string>:1: {WARNING}\n"


def test_a_package_without_torchair_is_a_warning(tmp_path, torch_npu_without_cann):
    package(tmp_path / "vendors/us", listing(ALL))
    assert WARNING in imported(torch_npu_without_cann, ASCEND_OPP_PATH=str(tmp_path))
    variables = dict(ASCEND_OPP_PATH=str(tmp_path), CUSTOM_PYPTO_GE_CONVERTERS="0")
    assert imported(torch_npu_without_cann, **variables) == ""


def test_an_import_with_another_value_ends_with_the_reason():
    done = python("-c", "import custom_pypto", CUSTOM_PYPTO_GE_CONVERTERS="on")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "ValueError: custom_pypto: CUSTOM_PYPTO_GE_CONVERTERS must be 1"
    )


@pytest.mark.parametrize(
    "asked, what, remedy",
    [
        (None, f"a GE kernel package with {', '.join(ALL)} in ", "install one, or set"),
        ("0", "GE converters are disabled by CUSTOM_PYPTO_GE_CONVERTERS=0", "unset"),
        ("1", "torchair cannot be imported (ImportError: libhccl.so: none)", "install torch_npu"),
    ],
)
def test_the_report_names_what_is_missing(torch_npu_without_cann, asked, what, remedy):
    variables = {converter.VARIABLE: asked} if asked else {}
    done = python("-m", "custom_pypto", "env", "--json", path=[torch_npu_without_cann], **variables)
    assert done.returncode == 0, done.stderr
    *_, missing = json.loads(done.stdout)["ways"]["graph mode with torchair"]["missing"]
    assert missing["what"].startswith(what)
    assert missing["remedy"].startswith(remedy)
