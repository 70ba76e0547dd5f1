"""The tuner of the NPU kernels, on shapes that compile in about a second."""

import dataclasses
import sys
from itertools import islice
from pathlib import Path

import pytest
from with_pypto import simulation

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import bench_tune as tuner  # noqa: E402
import npu_cases  # noqa: E402

from custom_pypto.kernels import tiling  # noqa: E402

pytestmark = pytest.mark.sim

CLASS = "1-2 tokens"
ENTRIES = [
    (subject.table, name)
    for subject in tuner.SUBJECTS.values()
    for name in getattr(tiling, subject.table)
]


@pytest.fixture
def file(tmp_path):
    copy = tmp_path / "tiling.py"
    copy.write_bytes(tuner.TILING.read_bytes())
    return copy


@pytest.fixture
def small(monkeypatch):
    """Attention of one token with 16 heads, whose table entry is a bad one; four settings."""
    bad = dataclasses.replace(tiling.ATTENTION[CLASS], l1_reuse=8, vec_nbuffer=8)
    monkeypatch.setitem(tiling.ATTENTION, CLASS, bad)
    subject = dataclasses.replace(
        tuner.SUBJECTS["attention"],
        ops=("npu_sparse_flash_attention_pto",),
        cases={CLASS: lambda: [npu_cases.attention(1, 1, 256, heads=16)]},
        values=dict(l1_reuse=(2, 8), vec_nbuffer=(0, 8)),
    )
    monkeypatch.setitem(tuner.SUBJECTS, "attention", subject)
    return bad


@pytest.fixture
def estimates(monkeypatch):
    """Settings and what the cost model says of them, per shape or of all; 30 µs of the others."""
    estimates = {}

    def estimate(kernel, *tensors, timeout=None):
        heads = tensors[0].size(0)
        latency = estimates.get(tiling.ATTENTION[CLASS], 30.0)
        if latency is None:
            raise simulation.SimulationError("does not fit")
        latency = latency[heads > 16] if isinstance(latency, list) else latency
        return simulation.Estimate(latency, 1.0, 1, 1, 1, timeline=(), successors={})

    monkeypatch.setattr(simulation, "estimate", estimate)
    monkeypatch.setattr(tuner.verify, "_error", lambda *check: (0.0, 0.0))
    return estimates


def entries_of(file: Path, table: str) -> dict:
    scope = {"__name__": tiling.__name__}  # dataclasses look their module up
    exec(file.read_text(), scope)
    return {name: dataclasses.astuple(entry) for name, entry in scope[table].items()}


@pytest.mark.parametrize("table, name", ENTRIES, ids=str)
def test_the_writer_replaces_one_entry_and_no_other_byte(table, name, file):
    entry = getattr(tiling, table)[name]
    before, old = file.read_text(), entries_of(file, table)
    tuner.write_entry(file, table, name, entry)
    assert file.read_text() == before

    first = dataclasses.fields(entry)[0].name
    new = dataclasses.replace(entry, **{first: 987})
    tuner.write_entry(file, table, name, new)
    assert entries_of(file, table) == {**old, name: dataclasses.astuple(new)}
    changed = [
        pair
        for pair in zip(before.splitlines(), file.read_text().splitlines(), strict=True)
        if pair[0] != pair[1]
    ]
    assert changed == [(f"        {first}={getattr(entry, first)},", f"        {first}=987,")]


def test_the_writer_takes_any_source_and_names_fields_that_differ_from_their_default(tmp_path):
    file = tmp_path / "tiling.py"
    file.write_text('# é\nA = {"é": 1, "b": f(\n    2), # why\n}\nB = {"b": 3}\n')
    settings = tiling.IndexerTiling(part=1, keys=2, l1_reuse=3, tiles=4, m=64)
    tuner.write_entry(file, "A", "b", settings)
    entry = """IndexerTiling(
        part=1,
        keys=2,
        l1_reuse=3,
        tiles=4,
        m=64,
    )"""
    assert file.read_text() == f'# é\nA = {{"é": 1, "b": {entry}, # why\n}}\nB = {{"b": 3}}\n'
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("name", tuner.SUBJECTS)
def test_every_class_is_tuned_on_shapes_that_use_its_entry(name, monkeypatch):
    subject = tuner.SUBJECTS[name]
    table = getattr(tiling, subject.table)
    assert subject.cases.keys() == table.keys()
    for shape_class, cases in subject.cases.items():
        monkeypatch.setattr(tiling, subject.table, {shape_class: table[shape_class]})
        for case in cases():  # with another entry: KeyError
            case.launch(lambda *arguments: None)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_every_benchmark_shape_compiles_and_is_estimated(part):
    for case in islice(npu_cases.cases(), part, None, 8):
        assert case.estimate().latency_us > 0, f"{case.name} {case.shape}"


@pytest.mark.slow
def test_a_bad_entry_is_improved(small, file):
    [[name, shapes, old, new, _, settings]] = tuner.tune("attention", budget=60, file=file)
    better = tiling.ATTENTION[CLASS]
    assert better != small
    assert entries_of(file, "ATTENTION")[CLASS] == dataclasses.astuple(better)
    assert (name, shapes, settings) == (CLASS, "1,1,256", str(better))
    assert float(new) < 0.99 * float(old)


def test_a_setting_that_does_not_compile_does_not_stop_the_search(small, estimates, file):
    fails = dataclasses.replace(small, l1_reuse=2)
    estimates[fails] = None
    estimates[dataclasses.replace(small, vec_nbuffer=0)] = 10.0
    [row] = tuner.tune("attention", budget=60, file=file)
    assert row[2:5] == ["30.00", "10.00", "3"]


def test_of_settings_that_are_close_the_one_with_less_work_is_best(small, estimates, file):
    search = tuner.Search(tuner.SUBJECTS["attention"], CLASS)
    assert search.best() is search.shipping
    for latency, loads, work, is_best in [
        (29.80, 1, 1, False),  # not 1 % better than what ships
        (20.15, 2, 80, True),
        (20.00, 2, 90, False),
        (20.19, 1, 99, True),  # reads less
        (20.30, 1, 10, False),  # more than 1 % behind
    ]:
        trial = tuner.Trial(object(), [latency], latency, loads, work)
        search.tried[trial.settings] = trial
        assert (search.best() is trial) == is_best


def test_a_setting_that_slows_a_shape_is_out(small, estimates, file, monkeypatch):
    subject = tuner.SUBJECTS["attention"]
    cases = {CLASS: lambda: [npu_cases.attention(1, 1, 256, heads) for heads in (16, 32)]}
    monkeypatch.setitem(tuner.SUBJECTS, "attention", dataclasses.replace(subject, cases=cases))
    faster = dataclasses.replace(small, vec_nbuffer=0)
    estimates[faster] = [10.0, 30.4]
    [row] = tuner.tune("attention", budget=60, file=file)
    assert row[-1] == "stays"
    estimates[faster] = [10.0, 30.2]
    [row] = tuner.tune("attention", budget=60, file=file)
    assert row[2:4] == ["30.00, 30.00", "10.00, 30.20"]


def test_a_better_setting_with_wrong_numbers_is_rejected(
    small, estimates, file, monkeypatch, capsys
):
    tested = set()

    def wrong(*check):
        (everywhere,) = set(tiling.ATTENTION.values())
        tested.add(everywhere)
        return 1.0, 0.0

    monkeypatch.setattr(tuner.verify, "_error", wrong)
    better = [dataclasses.replace(small, vec_nbuffer=0), dataclasses.replace(small, l1_reuse=2)]
    estimates |= dict.fromkeys(better, 10.0)
    before = file.read_bytes()
    [row] = tuner.tune("attention", budget=60, file=file)
    out = capsys.readouterr().out
    assert tested == {*better}
    assert "FAILED  npu_sparse_flash_attention_pto" in out and "indexer" not in out
    assert row[4:] == ["3", "stays"]
    assert file.read_bytes() == before and tiling.ATTENTION[CLASS] == small
