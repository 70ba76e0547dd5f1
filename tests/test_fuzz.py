"""A short run of the fuzzer; `bash run.sh fuzz` is the long one."""

import functools
import itertools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch
from cases import without_nan
from cases.npu_lightning_indexer_pto import inputs as indexer_inputs
from cases.npu_sparse_attention_pto import fused_inputs
from cases.npu_sparse_flash_attention_pto import inputs as attention_inputs
from cases.weight_only_linear import inputs as linear_inputs
from fuzz.generate import DRAWN, Case, generate
from fuzz.judge import judge, lacks_kernels
from hypothesis import given, settings
from hypothesis import strategies as st

import custom_pypto
from custom_pypto import layer_ops

FUZZ = str(Path(__file__).parent / "fuzz")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@settings(max_examples=150)
@given(st.randoms(use_true_random=False))
def test_hostile_calls_are_rejected_by_name_or_equal_the_reference(rng):
    judge(generate(rng))


@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 2, 3))])
def test_the_first_cases_of_a_seed_are_rejected_by_name_or_equal_the_reference(seed):
    outcomes = set()
    for number in range(2000):
        case = generate(Random(f"{seed}:{number}"))
        outcomes.add((case.op, judge(case)))
    ops = [op for op in DRAWN if not lacks_kernels(op)]
    assert outcomes >= set(itertools.product(ops, ["rejected", "equal", "empty"]))


INDEX = Case("npu_lightning_indexer_pto", indexer_inputs([3], [40], integers=True), "integers")
ATTEND = Case("npu_sparse_flash_attention_pto", attention_inputs([3], [40]), "random")
STATISTICS = attention_inputs([3], [40], sinks=True) | dict(return_softmax_lse=True)
STATISTICS = Case(ATTEND.op, STATISTICS, "random")
FUSED = Case("npu_sparse_attention_pto", without_nan(fused_inputs([40], 1)), "random")
LINEAR = Case("weight_only_linear", linear_inputs([3], [40]), "random")


def reject(words):
    def op(**arguments):
        raise RuntimeError(words)

    return op


def scribble(op, name):
    """``op``, but it writes into one of its arguments."""

    def writing(**arguments):
        if arguments[name].device.type == "cpu":
            arguments[name].view(-1)[-1] = 7
        return op(**arguments)

    return writing


fused = custom_pypto.npu_sparse_attention_pto
index, attend = custom_pypto.npu_lightning_indexer_pto, custom_pypto.npu_sparse_flash_attention_pto
linear = custom_pypto.weight_only_linear


def scaled(at, factor):
    """The op, but one of its outputs is wrong."""
    return lambda **x: tuple(out * factor if i == at else out for i, out in enumerate(attend(**x)))


def on_cpu_in_double(**arguments):
    out = attend(**arguments)
    return out.double() if out.device.type == "cpu" else out


@pytest.mark.parametrize(
    "case, wrong, why",
    [
        pytest.param(INDEX, lambda **x: index(**x).flip(-1), "selects other keys", id="order"),
        pytest.param(ATTEND, lambda **x: attend(**x) * 1.001, "differ by more", id="values"),
        pytest.param(ATTEND, on_cpu_in_double, "Meta", id="dtype"),
        pytest.param(STATISTICS, scaled(0, 1.001), "differ by more", id="values-with-sinks"),
        pytest.param(STATISTICS, scaled(1, 1.001), "not close", id="maximum"),
        pytest.param(STATISTICS, scaled(2, 1.001), "not close", id="sum"),
        pytest.param(
            STATISTICS,
            lambda **x: attend(**x | dict(sinks=None)),
            "differ by more",
            id="no-sinks",
        ),
        pytest.param(
            FUSED, lambda **x: fused(**x | dict(eps=1e-5)), "differs from the reference", id="eps"
        ),
        pytest.param(
            LINEAR,
            lambda **x: linear(**x | dict(scales=x["scales"].roll(1, -1))),
            "from the reference",
            id="scales-of-the-neighbour",
        ),
        pytest.param(
            LINEAR,
            lambda **x: linear(**x | dict(experts=x["experts"].clamp(0, 6))),
            "from the reference",
            id="no-expert",
        ),
        pytest.param(INDEX, scribble(index, "weights"), "wrote outside the caches", id="writes"),
        pytest.param(INDEX, reject("npu_lightning_indexer_pto: no"), "keeps its", id="rejects"),
    ],
)
def test_judge_tells_what_is_wrong(monkeypatch, case, wrong, why):
    judge(case)
    monkeypatch.setattr(custom_pypto, case.op, wrong)
    with pytest.raises(AssertionError, match=why):
        judge(case)


def call_of(op: str, seed: int) -> Case:
    """One that keeps the contract, without an infinity, and has a result."""
    for number in itertools.count():
        case = generate(Random(f"{seed}:{number}"))
        if case.op == op and not case.broken and case.values == "random":
            if judge(case) == "equal":
                return case


WRONG = {
    "rms_norm": lambda x: x * 1.1,
    "rotate": lambda x: x.roll(1, -1),
    "rotate_pairs": lambda x: x.roll(1, -1),
    "route": lambda weights, experts: (weights * 1.1, experts),
    "route_roots": lambda weights, experts: (weights, experts + 1),
    "weighted_sum": lambda x: x * 1.1,
    "hyper_connection": lambda post, comb, x: (post, comb * 1.01, x),
    "collapse_streams": lambda x: x * 1.1,
    "mix_streams": lambda x: x * 1.1,
    "pool_groups": lambda sums, complete: (sums, ~complete),
    "cache_slots": lambda slots: slots + 1,
    "window_rows": lambda rows: rows + 1,
}


@pytest.mark.parametrize("op", WRONG)
def test_judge_tells_a_wrong_result_of_a_layer_op(monkeypatch, op):
    case, right = call_of(op, 0), getattr(layer_ops, op)

    def wrong(**arguments):
        got = right(**arguments)
        return WRONG[op](*got) if isinstance(got, tuple) else WRONG[op](got)

    monkeypatch.setattr(layer_ops, op, wrong)
    with pytest.raises((AssertionError, RuntimeError)):
        judge(case)


def test_judge_tells_an_error_that_does_not_name_the_op(monkeypatch):
    case = Case(INDEX.op, INDEX.arguments | dict(sparse_count=0), "integers", ["sparse_count 0"])
    assert judge(case) == "rejected"
    monkeypatch.setattr(custom_pypto, case.op, reject("bad rank"))
    with pytest.raises(AssertionError, match="does not name the op: bad rank"):
        judge(case)


@pytest.fixture
def run(with_torch):
    program = f"import runpy; runpy.run_path({FUZZ!r}, run_name='__main__')"
    return functools.partial(with_torch, program)


@pytest.mark.parametrize("case", ["3:11", "3:819"])  # the latter has an int32 tensor on Meta
def test_command_shows_and_reruns_one_case(case, run):
    ran = run("--case", case)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert generate(Random(case)).op in ran.stdout
    assert ran.stdout.splitlines()[-1] in ("equal", "empty", "rejected")


def test_command_says_how_to_repeat_a_failure(run):
    ran = run("--seed", "3", CUSTOM_PYPTO_CPU_ISA="abacus")  # every op raises this then
    assert ran.returncode == 1
    assert "CUSTOM_PYPTO_CPU_ISA must be" in ran.stdout
    assert re.search(r"^again: bash run\.sh fuzz --case 3:\d+$", ran.stdout, re.MULTILINE)


@pytest.mark.slow
def test_command_says_which_case_ended_the_process():
    command = [sys.executable, FUZZ, "--seed", "3"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    first = running.stdout.readline()
    child = re.fullmatch(r"seed 3, in process (\d+)\n", first)
    assert child, first + running.stdout.read()
    os.kill(int(child[1]), signal.SIGSEGV)
    said, _ = running.communicate()
    assert running.returncode == 1
    assert re.match(r"ended by SIGSEGV; again: bash run\.sh fuzz --case 3:\d+\n", said), said
