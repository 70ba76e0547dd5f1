"""The calls that `run.sh atlas` times, with their estimates, and with torch_npu's ops."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_map_only

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from atlas.estimates import RESULTS, estimates  # noqa: E402
from atlas.parts import TIMED  # noqa: E402

TWO = """# Results

## NPU kernels, PyPTO 0.2.0 cost-model estimates

| op | B, S1, keys | estimate µs | floor µs |
| --- | --- | --- | --- |
| sparse attention | 1,1,4096 | 29.2 | 24.0 |

text

## NPU kernels, PyPTO 0.2.1 cost-model estimates

| op | B, S1, keys | estimate µs | floor µs |
| --- | --- | --- | --- |
| sparse attention | 1,1,4096 | 31.5 | - |

## Another section

| op | B, S1, keys | estimate µs |
"""
KEY = ("sparse attention", "1,1,4096")


def test_estimates_are_those_of_the_installed_version():
    assert estimates(TWO, "0.2.0") == (
        {KEY: "29.2"},
        "PyPTO 0.2.0's cost model, no times of a device",
    )
    assert estimates(TWO, "0.2.1")[0] == {KEY: "31.5"}
    found, note = estimates(TWO, "0.3.0")
    assert found == {KEY: "31.5"} and "0.2.1's" in note and "installed PyPTO is 0.3.0" in note
    assert estimates("# Results\n", "0.2.0")[0] == {}


@pytest.fixture
def calls():
    if importlib.util.find_spec("pypto") is None:
        pytest.skip("the sim extra is not installed")
    from atlas import calls

    return calls


@pytest.mark.sim
def test_every_timed_case_has_an_estimate_and_calls_a_public_op(calls):
    found = estimates(RESULTS.read_text(), None)[0]
    assert calls.npu_cases.CASES.keys() == set(TIMED)
    for case in calls.npu_cases.cases():
        assert (case.name, case.shape) in found
        case.on("meta")()  # a public op takes the arguments


@pytest.mark.sim
@pytest.mark.parametrize("op", TIMED[:5])
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


@pytest.mark.ascend_host
@pytest.mark.parametrize("wrong", [False, True], ids=["the same", "another"])
@pytest.mark.parametrize("op", TIMED[:2])
def test_both_ops_are_compared_with_the_reference(op, wrong, calls):
    """In the place of CANN's operator, which is missing here, stands the reference."""
    import torch_npu  # noqa: F401
    from atlas import standard

    from custom_pypto import reference

    name = op.removesuffix("_pto")
    count = len(getattr(torch.ops.npu, name).default._schema.returns)

    def operator(*given, attention_mode=None, **named):
        given, named = tree_map_only(torch.Tensor, torch.Tensor.cpu, (given, named))
        out = getattr(reference, op)(*given, **named)
        return ((out.flip(-1) if wrong else out).npu(), *[torch.empty(0).npu()] * (count - 1))

    library = torch.library.Library("npu", "IMPL")
    library.impl(name, operator, "PrivateUse1", allow_override=True)
    try:
        row, right = standard.compared(standard.inputs(op, (1, 1, 4096)), quick=True)
    finally:
        library._destroy()
    assert right and row[:2] == [op, "1,1,4096"] and len(row) == len(standard.HEADER)
    limit, mine, other = map(float, row[2:5])
    assert mine <= limit and (other > limit) == wrong
    assert row[5] == ("0" if op == TIMED[0] else "-")
