"""Kernel packages, as CANN installs them: lists of operators, and a library; and one with all
operators, through which a process on the host simulator calls."""

import json
import subprocess
from pathlib import Path

import pytest

from custom_pypto import npu
from custom_pypto.descriptions import OPS
from custom_pypto.graph.prototypes import prototypes
from custom_pypto.kernel_packages import listing

PROTOTYPES = {prototype.type: prototype for prototype in prototypes()}
ALL = listing(PROTOTYPES.values())
VARIABLES = ("ASCEND_CUSTOM_OPP_PATH", "ASCEND_OPP_PATH")

# Written by hand with the keys that CANN's op_cfg_generator.cpp writes: the AddCustom of CANN's
# tutorial, which is ours, too.
TUTORIAL = {
    "AddCustom": {
        "opFile": {"value": "add_custom"},
        "input0": {"name": "x", "dtype": "float16", "format": "ND", "paramType": "required"},
        "input1": {"name": "y", "dtype": "float16", "format": "ND", "paramType": "required"},
        "output0": {"name": "z", "dtype": "float16", "format": "ND", "paramType": "required"},
    }
}
# the published recipe's operator of one of our names
FOREIGN = {
    "LightningIndexerPto": {
        **{f"input{i}": {"name": f"x{i}", "paramType": "required"} for i in range(5)},
        "output0": {"name": "y0", "paramType": "required"},
    }
}
IS_ANOTHER = (
    "is another operator: its inputs must be query, key, weights, actual_seq_lengths_query "
    "(optional), actual_seq_lengths_key (optional), block_table (optional), got x0, x1, x2, x3, x4"
)


def package(vendor: Path, operators: dict | str, soc: str = "ascend910b") -> Path:
    """What a kernel package of ``vendor`` (a folder) has for one SoC. Returns the list's path."""
    folder = vendor / "op_impl/ai_core/tbe/config" / soc
    folder.mkdir(parents=True)
    path = folder / f"aic-{soc}-ops-info.json"
    path.write_text(operators if isinstance(operators, str) else json.dumps(operators))
    if (vendors := vendor.parent).name == "vendors":  # as CANN's installer: the newest one first
        before = (vendors / "config.ini").read_text() if (vendors / "config.ini").exists() else ""
        others = before.partition("=")[2].strip()
        names = f"{vendor.name},{others}" if others else vendor.name
        (vendors / "config.ini").write_text(f"load_priority={names}\n")
    return path


def library(folder: Path, source: str) -> Path:
    path = folder / "op_api/lib/libcust_opapi.so"
    path.parent.mkdir(parents=True)
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)
    return path


@pytest.fixture(scope="module", name="built")
def built_package(tmp_path_factory):
    """A package with all operators, written once."""
    from custom_pypto.simulation.ascend_host import kernel_package

    return kernel_package.build(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(name="simulator")
def calls_through_aclnn(built, monkeypatch):
    """The module of the package's computation, in a process that calls through aclnn."""
    from custom_pypto.simulation.ascend_host import kernel_package

    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", str(built))
    monkeypatch.setenv("CUSTOM_PYPTO_EAGER", "aclnn")
    nothing = dict(tensors=0, executors=0, plans=0)
    assert kernel_package.live() == nothing
    yield kernel_package
    assert kernel_package.live() == nothing  # after every test, whatever failed in it


@pytest.fixture(name="pypto")
def no_calls_through_pypto(monkeypatch):
    """Calls through PyPTO fail the test."""

    def launch(*_):
        raise AssertionError("PyPTO was called")

    for op in OPS:
        monkeypatch.setattr(npu._module(op), "kernel_call", launch)
