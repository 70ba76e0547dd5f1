"""How alike layers select, and the patterns that follow."""

import os
import re
import subprocess
import sys

import pytest
import torch
from model_harness import no_grad_and_one_thread  # noqa: F401
from repository import REPOSITORY
from tiny import ALL_KINDS, marks_of, tiny_model, token_ids

from custom_pypto import models
from custom_pypto.models import index_overlap
from custom_pypto.models.index_overlap import overlaps, propose_pattern
from custom_pypto.models.patched import patched_attentions, text_model


def recorded(model, tokens=60):
    with models.record_indices(model) as record:
        model(token_ids(2, tokens))
    return record


def of_selections(*layers):
    """A record of one sequence with these positions of each token."""
    indices = {i: torch.tensor([tokens], dtype=torch.int32) for i, tokens in enumerate(layers)}
    return models.Record(indices)


@pytest.mark.parametrize("at_once", [1, 256])
def test_an_overlap_is_the_share_of_what_the_later_layer_selects(at_once, monkeypatch):
    monkeypatch.setattr(index_overlap, "TOKENS", at_once)
    everything = [0, 1, -1]  # a token that sees two positions, and selects both
    record = of_selections(
        [everything, [4, 0, 1], [5, 3, -1]],
        [everything, [1, 4, 3], [5, -1, -1]],
        [everything, [2, 3, 0], [0, 1, 2]],  # in another order than the scores of others
    )
    want = [[1, (2 / 3 + 1) / 2, (1 / 3 + 0) / 2], [(2 / 3 + 1 / 2) / 2, 1, (1 / 3 + 0) / 2]]
    got = overlaps(record)
    torch.testing.assert_close(got[:2], torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-7)
    assert torch.equal(got.diagonal(), torch.ones(3, dtype=torch.float64))


def test_a_run_in_which_no_layer_leaves_anything_out_is_rejected():
    model = models.use_custom_pypto(tiny_model())
    with pytest.raises(ValueError, match="overlaps: record must have tokens that see more"):
        overlaps(recorded(model, tokens=8))  # index_topk


def test_layers_that_select_alike_share_first():
    """Layers 0 and 1 select alike, 2 and 3, too, and 4 as 0: with three indexers 1 and 3 share."""
    one, two = [[9, 8, 7, 6]], [[5, 4, 3, 9]]
    model = models.use_custom_pypto(tiny_model(num_hidden_layers=5))
    record = of_selections(one, one, two, two, one)
    assert propose_pattern(model, record, 1) == "FFFFF"
    assert propose_pattern(model, record, 0.6) == "FSFSF"
    # without layer 2 it and layer 3 would lose three quarters of their positions, so layer 4 goes
    assert propose_pattern(model, record, 0.4) == "FSFSS"
    assert propose_pattern(model, record, 0.01) == "FSSSS"


@pytest.mark.parametrize("share", [0, -1, 1.5, float("nan")])
def test_shares_out_of_range_are_rejected(share):
    model = models.use_custom_pypto(tiny_model())
    with pytest.raises(ValueError, match="propose_pattern: share must be more than 0 and at most"):
        propose_pattern(model, recorded(model), share)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=marks_of(kind)) for kind in ALL_KINDS])
def test_a_model_takes_the_pattern_that_is_proposed_for_it(kind):
    model = models.use_custom_pypto(tiny_model(kind))
    record = recorded(model, tokens=90)
    for share in (1, 0.5, 0.1):
        pattern = propose_pattern(model, record, share)
        models.use_custom_pypto(model, index_topk_pattern=pattern)
        selecting = [i for i, x in patched_attentions(text_model(model)).items() if x.selects]
        assert pattern.count("F") == len(selecting) == max(1, -(-len(record.indices) * share // 1))
        assert set(selecting) <= set(record.indices)
        models.use_custom_pypto(model)


def test_a_record_of_another_pattern_is_rejected():
    model = models.use_custom_pypto(tiny_model())
    record = recorded(model)
    models.use_custom_pypto(model, index_topk_pattern="FSF")
    with pytest.raises(ValueError, match="record must be of the model as it is patched"):
        propose_pattern(model, record, 0.5)


def printed(*arguments):
    command = [sys.executable, "examples/share_selections.py", *map(str, arguments)]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


LINE = r"^([FS]+)  (\d+)  (\S+)  (\S+)  \((.*)\)$"


def test_the_example_says_where_sharing_breaks():
    found = re.findall(LINE, printed("--dtype", "float32", "--texts", "4"), re.M)
    right = {line[0]: float(line[3]) for line in found}  # of answers and the stops behind them
    assert list(right) == ["FFFF", "FSFS", "FFSF", "FSSS", "FFSS"]
    assert [origin for *_, origin in found[1:3]] == ["greedy, 0.5", "index_topk_freq=2"]
    assert right["FFFF"] >= 0.98 and right["FSFS"] >= 0.98
    assert max(right[pattern] for pattern in ("FFSF", "FSSS", "FFSS")) < 0.75


def test_the_example_proposes_patterns_and_says_what_they_cost():
    checkpoint = REPOSITORY / "examples/checkpoints/lookup"
    said = printed(checkpoint, "--dtype", "float32", "--tokens", "512")
    overlap = float(re.search(r"layer +1  (\S+) of layer 0", said)[1])
    assert 0 < overlap < 0.2
    found = re.findall(LINE, said, re.M)
    assert [line[:2] for line in found] == [("FF", "2"), ("FS", "1")]
    assert all(float(line[3]) >= 0.98 for line in found)  # of answers and the stops behind them


@pytest.mark.slow
def test_the_example_takes_a_text_of_its_own(tmp_path):
    text = tmp_path / "text"
    text.write_text("the quiet sailor slowly crossed a wide harbour near dawn , " * 60)
    arguments = ("--text", text, "--tokens", "400", "--shares", "0.5")
    said = printed(REPOSITORY / "examples/checkpoints/lookup", *arguments)
    assert said.startswith("400 tokens; ")
    (_, _, loss, *_), (_, _, shared, *_) = re.findall(LINE, said, re.M)
    assert float(loss) > 0 and float(shared) > 0


def refused(*arguments):
    command = [sys.executable, "examples/share_selections.py", *map(str, arguments)]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_the_example_names_a_run_that_is_too_short(tmp_path):
    text = tmp_path / "text"
    text.write_text("the quiet")
    assert "record a longer run" in refused("--text", text)


@pytest.mark.slow
def test_the_example_asks_for_a_text_of_other_checkpoints():
    other = REPOSITORY / "examples/checkpoints/lookup_v4"
    assert refused(other).startswith("share_selections.py: --text must be a file, as the texts")
