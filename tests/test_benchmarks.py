"""The benchmarks' own logic: floors, and sides that compute the same. No times."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import bench_model  # noqa: E402
import bench_ops  # noqa: E402
import bench_peers  # noqa: E402
import measure  # noqa: E402


def measuring(*ratios):
    """A measurement that gives these one after the other, and no more."""
    return iter(ratios).__next__


def test_a_floor_that_is_reached_is_measured_once(capsys):
    assert measure.check([("indexer", measuring(5.0), 5.0)]) == 0
    out, err = capsys.readouterr()
    assert out == "indexer  5.00  5.00  ok\n" and err == ""


def test_a_missed_floor_is_tried_again(capsys):
    assert measure.check([("indexer", measuring(4.0, 4.9, 6.0), 5.0)]) == 0
    assert capsys.readouterr().out == "indexer  6.00  5.00  ok\n"


def test_every_floor_missed_three_times_is_named_and_the_others_are_measured(capsys):
    floors = [
        ("indexer", measuring(3.0, 4.25, 4.0), 5.0),
        ("attention", measuring(2.0), 1.6),
        ("prefill", measuring(0.5, 0.5, 0.5), 1.0),
    ]
    assert measure.check(floors) == 1
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "indexer  4.25  5.00  MISSED",
        "attention  2.00  1.60  ok",
        "prefill  0.50  1.00  MISSED",
    ]
    assert "indexer" in err and "prefill" in err and "attention" not in err


def test_an_aim_is_above_the_floor_that_is_checked_and_printed_beside_it():
    for case, aim in bench_ops.AIMS.items():
        assert aim > bench_ops.FLOORS[case]
        assert bench_ops.aim(*case) == f" (aim {aim:.2f})"
    [without_aim, *_] = bench_ops.FLOORS.keys() - bench_ops.AIMS.keys()
    assert bench_ops.aim(*without_aim) == ""


CASES = {
    "indexer": lambda: bench_peers.indexer_case(3, 512, heads=4, count=64),
    "attention": lambda: bench_peers.attention_case(3, 8, 512, count=64),
}


@pytest.mark.parametrize("case", CASES)
def test_peers_give_what_the_op_gives(case):
    case = bench_peers.checked(CASES[case]())
    assert list(case.sides)[:3] == ["op", "eager", "inductor"]


@pytest.mark.parametrize("case", CASES)
def test_a_peer_with_another_result_is_not_timed(case):
    case = CASES[case]()

    def first_and_last_token_exchanged():
        return case.sides["eager"]().flip(0)

    case.sides["inductor"] = first_and_last_token_exchanged
    with pytest.raises(SystemExit, match="the result of inductor differs from the op.s; not timed"):
        bench_peers.checked(case)


def test_selections_agree_within_rounding_only():
    scores = torch.tensor([[5.0, 4.0, 3.0, 2.9, 1.0]])
    rounding = torch.full((1, 5), 0.06)

    def agree(*selected):
        want = torch.tensor([[0, 1, 2]])
        return bench_peers.same_selections(torch.tensor([selected]), want, scores, rounding)

    assert agree(2, 1, 0)
    assert agree(0, 3, 1)  # 2.9 for 3.0
    assert not agree(0, 1, 4)  # 1.0 for 3.0
    assert not agree(0, 2, 3)  # without 4.0
    assert not agree(0, 1, 1)


def test_a_missed_floor_of_the_peers_is_named_and_exits_1(monkeypatch, capsys):
    def case(tokens):
        return bench_peers.indexer_case(tokens, 256, heads=4, count=64)

    reached, missed = (case, (1,), ("eager", 0.0)), (case, (2,), ("eager", 1e9))
    monkeypatch.setattr(bench_peers, "CASES", [reached, missed, (case, (3,), None)])
    assert bench_peers.check_floors(repeats=1) == 1
    out, err = capsys.readouterr()
    assert out.count("ok\n") == out.count("MISSED\n") == 1
    assert "S1=2" in err and "speedup over eager" in err and "S1=1" not in err


@pytest.fixture
def layers():
    """Both sides of a small attention layer."""
    sizes = bench_model.LAYER | dict(hidden_size=64, num_attention_heads=2, q_lora_rank=32)
    return {side: bench_model.make_model(side, sizes, torch.bfloat16) for side in bench_model.SIDES}


@pytest.mark.parametrize("phase", ["layer decode", "layer prefill"])
def test_both_sides_of_the_attention_layer_compute_the_same(phase, layers):
    seconds = bench_model.times(layers, phase, 300, 1)
    assert list(seconds) == list(bench_model.SIDES)
    with torch.no_grad():  # the sides negate each other: as large, and wrong
        layers["transformers"].base_model.layers[0].self_attn.o_proj.weight.neg_()
    with pytest.raises(SystemExit, match=f"{phase}: the sides differ by .*; not reported"):
        bench_model.times(layers, phase, 300, 1)


def test_a_decode_call_of_the_layer_can_be_repeated(layers):
    for side in bench_model.SIDES:
        step = bench_model.layer_decode_call(side, layers[side], 100)
        first = step()
        assert torch.equal(step(), first)


def test_a_row_says_what_was_not_run_and_what_is_too_small_to_measure():
    ours, stock = bench_model.SIDES
    both = bench_model.Result(
        "layer decode", 4096, {ours: [0.01, 0.02, 0.03], stock: [1.0, 2.0, 3.0]},
        {ours: 5, stock: 7 * 2**20}, 3,
    )  # fmt: skip
    assert both.row() == "layer decode|4K|20.0|2000.0|100.0|<1|7|>7.0|3".split("|")
    alone = bench_model.Result("layer prefill", 16384, {ours: [1.0]}, {ours: 3 * 2**20}, 1)
    assert alone.row() == "layer prefill|16K|1000.0|not run|-|3|not run|-|1".split("|")


def test_a_process_keeps_freed_memory_until_it_returns_it():
    program = """
import resource, psutil, torch, measure

size, process = 2**26, psutil.Process()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(size, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(), faults()
fresh = faults()
measure.keep_freed_memory()
faults()
kept, before = faults(), process.memory_info().rss
measure.return_freed_memory()
print(fresh, kept, (before - process.memory_info().rss) / size)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=BENCHMARKS, capture_output=True, text=True, check=True
    )
    fresh, kept, returned = map(float, done.stdout.split())
    assert fresh >= 32, "64 MiB are 32 huge pages at least: nothing was measured"
    assert kept < 16 and returned > 0.9
