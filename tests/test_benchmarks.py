"""The benchmarks' own logic: floors, and sides that compute the same. No times."""

import ast
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from decimal import Decimal
from functools import partial
from pathlib import Path

import pytest
import torch
from repository import REPOSITORY

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import bench_model  # noqa: E402
import bench_ops  # noqa: E402
import bench_peers  # noqa: E402
import busy  # noqa: E402
import floors  # noqa: E402
import measure  # noqa: E402
import model_sides  # noqa: E402
import registry  # noqa: E402
import results  # noqa: E402


def measuring(*ratios):
    """A measurement that gives these one after the other, and no more."""
    return iter(ratios).__next__


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(BENCHMARKS), *arguments]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)


def names_in(module: Path) -> set[str]:
    """The keys of ``BENCHMARKS``, without importing what the benchmark needs."""
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets) == "BENCHMARKS":
            return {ast.literal_eval(key) for key in node.value.keys}
    return set()


def test_every_benchmark_is_registered_and_named_where_readers_look():
    found = {
        (module.stem, name) for module in BENCHMARKS.glob("bench_*.py") for name in names_in(module)
    }
    assert found == {(entry.module, name) for name, entry in registry.BENCHMARKS.items()}
    page = (REPOSITORY / "CONTRIBUTING.md").read_text()
    for name in registry.BENCHMARKS:
        assert f"`{name}`" in page, name
    listed = run("--list").stdout
    assert re.findall(r"^  (\w+)", listed, re.M) == list(registry.BENCHMARKS)


def test_the_page_of_results_is_what_the_results_give():
    found = results.of_folder(results.FOLDER)
    assert results.PAGE.read_text() == results.page(found)
    for (name, _), runs in found.items():
        assert name in registry.BENCHMARKS
        for run in runs:
            assert all(len(row) == len(run["case"] + run["figures"]) for row in run["rows"])
            program, of, *options = re.sub(r"=\S+", "", run["command"]).split()[2:]
            assert (program, of) == ("bench", name)
            flags = {f"--{o.replace('_', '-')}" for o in registry.BENCHMARKS[name].options}
            assert {x for x in options if x.startswith("--")} <= flags | {"--write"}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["opps"], "no benchmark is called 'opps'"),
        (["step", "--tokens", "3"], "--tokens is no option of step"),
        (["step", "--check", "--write"], "--check writes nothing"),
    ],
)
def test_the_runner_rejects(arguments, message):
    done = run(*arguments)
    assert done.returncode == 2 and message in done.stderr


def test_what_benchmarks_need():
    parse = runpy.run_path(str(REPOSITORY / "benchmarks"))["parse"]
    assert parse(["ops", "npu", "serving"]).needs == {"models", "sim", "serving"}
    assert parse(["--list"]).needs == parse(["--compare", "HEAD", "HEAD"]).needs == set()


def checked(*figures: float, limit: float, at_least: bool = True) -> list[str]:
    return measure.Floor("indexer", measuring(*figures), limit, at_least).row()[1:]


def test_a_floor_that_is_reached_is_measured_once_and_a_missed_one_again():
    assert checked(5.0, limit=5.0) == ["5", "at least 5", "ok"]
    assert checked(4.0, 4.9, 6.0, limit=5.0) == ["6", "at least 5", "ok"]
    assert checked(3.0, 4.25, 4.0, limit=5.0) == ["4.25", "at least 5", "MISSED"]
    assert checked(7.0, 4.0, limit=5.0, at_least=False) == ["4", "at most 5", "ok"]


def test_every_missed_floor_is_named_and_the_others_are_measured(capsys):
    figures = {"indexer": 0.5, "attention": 2.0, "prefill": 0.25}
    each = [measure.known(name, x, 1.0) for name, x in figures.items()]
    assert measure.check(each, "bench x --check") == 1
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "indexer  0.5  at least 1  MISSED",
        "attention  2  at least 1  ok",
        "prefill  0.25  at least 1  MISSED",
    ]
    used = torch.ops.custom_pypto.cpu_isa()
    assert err.splitlines() == [
        f"missed: {name}, kernels {used}: {figures[name]}, floor: at least 1; to repeat: bench x "
        "--check"
        for name in ("indexer", "prefill")
    ]


QUIET = busy.Counted(clock=100.0, busy=900.0, stolen=50.0, ours=80.0)


@pytest.mark.parametrize(
    "counted, said",
    [
        ((10.0, 10.5, 0.0, 9.9), ""),
        ((10.0, 22.0, 0.0, 9.9), "other processes took 1.2 of 4 CPUs (/proc/stat)"),
        ((10.0, 9.9, 3.0, 9.9), "the host took 0.3 of 4 CPUs away (steal in /proc/stat)"),
        ((0.1, 9.9, 3.0, 0.1), ""),  # too short to tell
    ],
)
def test_who_disturbs_a_measurement(counted, said):
    after = busy.Counted(*(a + b for a, b in zip(QUIET, counted, strict=True)))
    assert busy.between(QUIET, after, cpus=4) == said


def test_this_process_does_not_disturb_itself():
    before = busy.now()
    while busy.now().clock < before.clock + 0.1:
        pass
    after = busy.now()
    assert after.ours > before.ours
    assert after.busy - before.busy >= (after.ours - before.ours) / 2


@pytest.mark.parametrize(
    "disturbed, result",
    [
        (["neighbours"] * 3, "BUSY: neighbours"),
        (["neighbours", "", "neighbours"], "MISSED"),
    ],
)
def test_a_busy_machine_misses_no_floor_and_passes_none(disturbed, result, monkeypatch, capsys):
    said = iter(disturbed)
    monkeypatch.setattr(busy, "since", lambda before: next(said))
    floor = measure.Floor("indexer", measuring(1.0, 2.0, 3.0), 5.0)
    assert measure.check([floor], "bench x --check") == 1
    out, err = capsys.readouterr()
    assert out == f"indexer  3  at least 5  {result}\n"
    assert err.startswith("missed" if result == "MISSED" else "too busy to measure: indexer")


def test_kernels_without_a_floor_are_named(capsys):
    assert measure.check([measure.no_floor("indexer")], "bench x --check") == 0
    used = torch.ops.custom_pypto.cpu_isa()
    out = f"indexer  not measured  none for the kernels {used}  no floor\n"
    assert capsys.readouterr().out == out
    assert measure.check([], "bench x --check") == 0
    assert capsys.readouterr().out == "no floor: bench x --check has none\n"


def test_every_context_has_floors_for_the_same_sets_of_kernels():
    assert all(row.keys() == {"amx", "avx512_bf16"} for row in floors.LAYER_DECODE.values())


@pytest.mark.parametrize("name", bench_ops.MAKE)
def test_the_limit_of_an_op_counts_its_operations_and_its_reads(name):
    shape = dict(indexer=(4, 2048), attention=(4, 16, 4096), prompt=(64, 8))[name]
    case = bench_ops.case_of(name, *shape)
    seconds = dict(mm=[2.0], op=[8.0], read=[4.0])
    computed = case.flop / (2 * 2048**3) * 2.0
    assert bench_ops.share(case, seconds) == pytest.approx((computed + 4.0) / 8.0)
    case.read()


def test_floors_of_other_kernels_are_not_checked():
    ran = run("peers", "--check", CUSTOM_PYPTO_CPU_ISA="generic")
    assert ran.returncode == 0, ran.stderr
    rows = ran.stdout.splitlines()[-len(floors.PEERS) :]
    end = "  not measured  none for the kernels generic  no floor"
    assert all(row.endswith(end) for row in rows)


@pytest.mark.parametrize("name", bench_ops.MAKE_INT8)
def test_int8_is_timed_beside_bfloat16(name):
    shape = next(key[1:] for key in floors.INT8 if key[0] == name)
    seconds = bench_ops.int8_times((name, *shape), 1)[1]
    assert list(seconds) == ["bfloat16", "int8"]


CASES = {
    "indexer": lambda: bench_peers.indexer_case(3, 512, heads=4, count=64),
    "attention": lambda: bench_peers.attention_case(3, 8, 512, count=64),
}


@pytest.mark.parametrize("case", ["indexer", pytest.param("attention", marks=pytest.mark.slow)])
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
    small = partial(bench_peers.indexer_case, heads=4, count=64)
    monkeypatch.setitem(bench_peers.MAKE, "indexer", small)
    reached, missed, other = (("indexer", tokens, 256) for tokens in (1, 2, 3))
    used = torch.ops.custom_pypto.cpu_isa()
    table = {reached: {used: ("eager", 0.0)}, missed: {used: ("eager", 1e9)}, other: {}}
    monkeypatch.setattr(floors, "PEERS", table)
    monkeypatch.setattr(busy, "since", lambda before: "")
    assert measure.check(bench_peers.peer_floors(repeats=1), "bench peers --check") == 1
    out, err = capsys.readouterr()
    assert out.count("  ok\n") == out.count("  MISSED\n") == out.count("  no floor\n") == 1
    assert "S1=2" in err and "speedup over eager" in err and "S1=1" not in err


def small_layer(side: str):
    sizes = model_sides.LAYER | dict(hidden_size=64, num_attention_heads=2, q_lora_rank=32)
    return model_sides.make_model(side, sizes, torch.bfloat16)


@pytest.fixture
def layers():
    """Both sides of a small attention layer."""
    return {side: small_layer(side) for side in model_sides.SIDES}


@pytest.mark.parametrize("phase", ["layer decode", "layer prefill"])
def test_both_sides_of_the_attention_layer_compute_the_same(phase, layers):
    case = (bench_model.LAYERS, layers, phase, 300, 1)
    assert list(model_sides.times(*case)) == list(model_sides.SIDES)
    with torch.no_grad():  # the sides negate each other: as large, and wrong
        layers["transformers"].base_model.layers[0].self_attn.o_proj.weight.neg_()
    with pytest.raises(SystemExit, match=f"{phase}: the sides differ by .*; not reported"):
        model_sides.times(*case)


@pytest.mark.slow
def test_peak_memory_is_measured_in_another_process():
    subject = bench_model.LAYERS._replace(make=small_layer)
    assert model_sides.peak_bytes(subject, "custom_pypto", "layer prefill", 300) >= 0


def test_a_decode_call_of_the_layer_can_be_repeated(layers):
    for side in model_sides.SIDES:
        step = model_sides.layer_decode_call(side, layers[side], 100)
        first = step()
        assert torch.equal(step(), first)


def test_a_row_says_what_was_not_run_and_what_is_too_small_to_measure():
    ours, upstream = model_sides.SIDES
    both = model_sides.Result(
        "layer decode", 4096, {ours: [0.01, 0.02, 0.03], upstream: [1.0, 2.0, 3.0]},
        {ours: 5, upstream: 7 * 2**20}, 3,
    )  # fmt: skip
    assert both.row() == "layer decode|4K|20.0|2000.0|100.0|<1|7|>7.0|3".split("|")
    alone = model_sides.Result("layer prefill", 16384, {ours: [1.0]}, {ours: 3 * 2**20}, 1)
    assert alone.row() == "layer prefill|16K|1000.0|not run|-|3|not run|-|1".split("|")


def run_of(figure: str, variant: str = "", **others) -> dict:
    benchmark = measure.Benchmark(["op", "ms", "said"], lambda: [], variant=variant)
    rows = [["a", figure, "-"], ["b", "2.50", "not run"]]
    return benchmark.run(rows, "bash run.sh bench ops --write", {})[1] | others


def test_a_run_is_kept_with_its_digits_in_place_of_the_one_of_its_variant(tmp_path):
    for run in (run_of("1.00"), run_of("3.0", variant="two"), run_of("1.10")):
        results.add(tmp_path, "ops", "avx2", run)
    (runs,) = results.of_folder(tmp_path).values()
    assert [run["variant"] for run in runs] == ["", "two"]
    assert runs[0]["rows"] == [["a", Decimal("1.10"), None], ["b", Decimal("2.50"), "not run"]]
    assert '      ["a", 1.10, null],\n' in (tmp_path / "avx2/ops.json").read_text()
    assert results.text_of(runs) == (tmp_path / "avx2/ops.json").read_text()
    assert (
        json.loads((tmp_path / "avx2/ops.json").read_text())[1]["threads"]
        == torch.get_num_threads()
    )
    kept = {key: str(runs[0][key]) for key in ("command", "date", "commit", "cpu", "torch", "load")}
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", kept["date"]) and all(kept.values())
    if shutil.which("git") and (REPOSITORY / ".git").exists():
        assert re.fullmatch(r"[0-9a-f]{7,}", kept["commit"])


ENTRY = registry.Entry("bench_ops", "of two", shown=("ms", "said"))


@pytest.mark.parametrize(
    "entry, runs, table",
    [
        (ENTRY, dict(x="1.0"), "| a | 1.0 | – |\n| b | 2.50 | not run |"),
        (
            ENTRY,
            dict(x="1.0", y="3.0"),
            "| a | 1.0 | 3.0 |\n| b | 2.50 · not run | 2.50 · not run |",
        ),
        (replace(ENTRY, shown=()), dict(x="1.0", y="3.0"), "| a | x | 1.0 | – |\n| b | x |"),
        (
            replace(ENTRY, across="op"),
            dict(x="1.0", y="3.0"),
            "| x | 1.0 | 2.50 · not run |\n| y |",
        ),
    ],
    ids=["one run", "runs side by side", "runs below each other", "a part of the case across"],
)
def test_the_table_of_a_section(entry, runs, table, monkeypatch):
    monkeypatch.setattr(registry, "BENCHMARKS", {"ops": entry})
    monkeypatch.setattr(results, "BENCHMARKS", {"ops": entry})
    page = results.page({("ops", kernels): [run_of(x)] for kernels, x in runs.items()})
    assert f"\n{table}" in page and "\n## ops\n\nOf two." in page


@pytest.fixture
def folders(tmp_path):
    """Results before and after."""
    sides = {"before": ("1.00", {}), "after": ("1.25", {})}
    for side, (figure, others) in sides.items():
        results.add(tmp_path / side, "ops", "avx2", run_of(figure, **others))
    results.add(tmp_path / "before", "parts", "avx2", run_of("1.0"))
    results.add(tmp_path / "before", "weights", "avx2", run_of("1.0", cpu="one"))
    results.add(tmp_path / "after", "weights", "avx2", run_of("1.0", cpu="other"))
    return [str(tmp_path / side) for side in sides]


def test_results_are_compared_where_kernels_and_cpu_are_the_same(folders):
    done = run("--compare", *folders)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[3:] == [
        "| ops | avx2 | a | ms | 1.00 | 1.25 | 1.25 | * |",
        "| ops | avx2 | b | ms | 2.50 | 2.50 | 1.00 |  |",
        "parts, avx2: not compared: only A has it",
        "weights, avx2: not compared: cpu is one in A, other in B",
    ]
    alone = run("--compare", *folders, "weights")
    assert alone.returncode == 1 and alone.stdout.startswith("weights, avx2: not compared: cpu")


def test_results_of_a_commit_are_those_of_its_files(tmp_path):
    if not (shutil.which("git") and (REPOSITORY / ".git").exists()):
        pytest.skip("no checkout of git")
    copy = tmp_path / "repository"
    for file in BENCHMARKS.glob("*.py"):
        (copy / "benchmarks").mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy / "benchmarks")
    results.add(copy / "benchmarks/results", "ops", "avx2", run_of("1.00"))
    names = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "Add"]):
        subprocess.run(["git", *names, *words], cwd=copy, check=True)
    results.add(copy / "benchmarks/results", "ops", "avx2", run_of("0.50"))
    command = [sys.executable, "benchmarks", "--compare", "HEAD", "benchmarks/results"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert "| ops | avx2 | a | ms | 1.00 | 0.50 | 0.50 | * |" in done.stdout, done.stderr
    command[3] = "nowhere"
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert done.returncode == 1 and "nowhere" in done.stderr
