"""The calls that `run.sh atlas` times, with their estimates."""

import importlib.util
import itertools
import sys
from decimal import Decimal
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from atlas.estimates import estimates  # noqa: E402
from atlas.parts import TIMED  # noqa: E402
from results import FOLDER, of_folder  # noqa: E402


def of_version(version: str, estimate: str) -> dict:
    row = ["sparse attention", "1,1,4096", 30, Decimal(estimate)]
    return dict(
        variant=version,
        case=["op", "B, S1, keys"],
        figures=["floor µs", "estimate µs"],
        rows=[row],
    )


TWO = [of_version("0.2.0", "29.2"), of_version("0.2.1", "31.50")]
KEY = ("sparse attention", "1,1,4096")


def test_estimates_are_those_of_the_installed_version():
    assert estimates(TWO, "0.2.0") == (
        {KEY: "29.2"},
        "PyPTO 0.2.0's cost model, no times of a device",
    )
    assert estimates(TWO, "0.2.1")[0] == {KEY: "31.50"}
    found, note = estimates(TWO, "0.3.0")
    assert found == {KEY: "31.50"} and "0.2.1's" in note and "installed PyPTO is 0.3.0" in note
    assert estimates([], "0.2.0")[0] == {}


@pytest.fixture
def calls():
    if importlib.util.find_spec("pypto") is None:
        pytest.skip("the sim extra is not installed")
    from atlas import calls

    return calls


@pytest.mark.sim
@pytest.mark.parametrize("most", [1, pytest.param(None, marks=pytest.mark.slow)])  # gigabytes
def test_every_timed_case_has_an_estimate_and_calls_a_public_op(most, calls):
    found = estimates(of_folder(FOLDER)["npu", "pypto"], "0.2.0")[0]
    assert calls.npu_cases.CASES.keys() == set(TIMED)
    for op in TIMED:
        for case in itertools.islice(calls.npu_cases.cases(op), most):
            assert (case.name, case.shape) in found
            case.on("meta")()  # a public op takes the arguments


@pytest.mark.sim
@pytest.mark.parametrize(
    "op", [TIMED[0], *(pytest.param(op, marks=pytest.mark.slow) for op in TIMED[1:5])]
)
def test_the_result_of_a_timed_call_is_checked(op, calls):
    (case,) = calls.cases(op, quick=True)
    out = case.on("cpu")()
    calls.check(case, out)
    first = out if isinstance(out, torch.Tensor) else out[0]
    rest = () if isinstance(out, torch.Tensor) else tuple(out[1:])
    if "sparse_indices" in case.arguments:
        with pytest.raises(ValueError, match="must be finite"):
            calls.check(case, (first * torch.nan, *rest) if rest else first * torch.nan)
    with pytest.raises(ValueError, match="must be "):
        calls.check(case, (first[..., :1], *rest) if rest else first[..., :1])
