"""The calls that `run.sh atlas` times, the estimates beside them, torch_npu's ops beside ours."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from atlas.estimates import RESULTS, estimates  # noqa: E402
from atlas.parts import TIMED  # noqa: E402

TWO = """# Results

## NPU programs, PyPTO 0.2.0 cost-model estimates

| op | B, S1, keys | estimate µs | floor µs |
| --- | --- | --- | --- |
| sparse attention | 1,1,4096 | 29.2 | 24.0 |

text

## NPU programs, PyPTO 0.2.1 cost-model estimates

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
        calls.Call(case).on("meta")()  # a public op takes the arguments


@pytest.mark.sim
@pytest.mark.parametrize("op", TIMED[:5])
def test_the_result_of_a_timed_call_is_checked(op, calls):
    (call,) = calls.calls(op, quick=True)
    run = call.on("cpu")
    out = run()
    call.check(out)
    first = out if isinstance(out, torch.Tensor) else out[0]
    rest = () if isinstance(out, torch.Tensor) else tuple(out[1:])
    if "sparse_indices" in call.case.arguments:
        with pytest.raises(ValueError, match="must be finite"):
            call.check((first * torch.nan, *rest) if rest else first * torch.nan)
    with pytest.raises(ValueError, match="must be "):
        call.check((first[..., :1], *rest) if rest else first[..., :1])


@pytest.mark.ascend_host
@pytest.mark.parametrize("wrong", [False, True], ids=["the same", "another"])
@pytest.mark.parametrize("op", TIMED[:2])
def test_both_ops_are_compared_with_the_reference(op, wrong, monkeypatch, calls):
    """In the place of CANN's operator, which is missing here, stands the reference."""
    import torch_npu
    from atlas import standard

    from custom_pypto import reference

    def operator(**given):
        kept = {k: v for k, v in given.items() if k not in ("attention_mode",)}
        on_host = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in kept.items()}
        out = getattr(reference, op)(**on_host)
        if wrong:
            out = out.flip(-1)
        return out.npu(), torch.empty(0).npu()

    call = standard.inputs(op, (1, 1, 4096))
    monkeypatch.setattr(torch_npu, op.removesuffix("_pto"), operator)
    row, right = standard.compared(call, quick=True)
    assert right and row[:2] == [op, "1,1,4096"] and len(row) == len(standard.HEADER)
    limit, mine, other = map(float, row[2:5])
    assert mine <= limit and (other > limit) == wrong
    assert row[5] == ("0" if op == TIMED[0] else "-")
