"""The examples run as the README says, and print what they promise."""

import importlib.util
import json
import re
import xml.etree.ElementTree
from functools import partial
from pathlib import Path

import ge_graphs
import pytest
import torch
from example_programs import ROOT, process
from modes import MODES  # noqa: E402
from train_lookup import FIRST_PAIR, FIRST_QUESTION, lookup_accuracy, lookup_batch  # noqa: E402

from custom_pypto import models  # noqa: E402

plots = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)


def python_blocks(readme: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / readme).read_text(), re.S)


@pytest.mark.parametrize(
    "page, says", [("README.md", "red"), ("docs/dsa.md", ""), ("docs/training.md", "")]
)
def test_the_first_block_of_the_page_runs(page, says, capsys):
    block, *_ = python_blocks(page)
    exec(block, {})
    assert capsys.readouterr().out.strip() == says


def test_call_ops_prints_positions_and_shape():
    _, positions, _, shape = process("examples/call_ops.py").stdout.splitlines()
    first, second = json.loads(positions)
    assert all(0 <= p < 40 for p in first[0][0])
    assert sorted(second[0][0]) == [-1, 0, 1, 2]
    assert shape == "(2, 1, 16, 512) torch.float32"


@pytest.mark.slow
@plots
def test_needles_are_counted_by_depth_and_found(tmp_path):
    picture = tmp_path / "needle.png"
    arguments = ["--tokens", "200", "--texts", "1", "--depths", "4", "--prefill-chunk", "64"]
    arguments += ["--weights", "int8", "int4"]
    # its pool of processes imports the program that runs it
    said = process("examples/needle.py", *arguments, "--seed", "5", "--output", str(picture)).stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    report = json.loads(picture.with_suffix(".json").read_text())

    text = lookup_batch(1, 200 + 96, seed=5)[0][0, :200]
    facts = ((text >= FIRST_PAIR) & (text < FIRST_QUESTION)).view(4, 50).sum(1).tolist()
    assert sum(facts) == 32
    names = ["sparse", "dense", "int8 weights", "int4 weights"]
    for result, attention in zip(report["results"], names, strict=True):
        assert (result["attention"], result["asked"]) == (attention, facts)
        assert sum(result["right"]) >= 30  # chance: 4
        assert result["seconds_to_read"] > 0 and result["seconds_per_question_token"] > 0
        assert re.search(rf"{attention} +200 +{sum(result['right'])} of 32 ", said)


def train_sparse(run_example, folder: Path, *arguments: str) -> dict[str, list[float]]:
    """Accuracies with dense and sparse attention and the recall, by indexer."""
    said = run_example("train_sparse.py", "--output", str(folder), *arguments)
    assert (folder / "train_sparse.png").read_bytes().startswith(b"\x89PNG")
    rows = re.findall(r"^((?:un)?trained) indexer +(\S+) +(\S+) +(\S+)$", said, re.M)
    return {title: list(map(float, numbers)) for title, *numbers in rows}


@plots
def test_few_steps_teach_the_indexers_where_attention_looks(run_example, tmp_path):
    rows = train_sparse(run_example, tmp_path, "--steps", "51", "51", "51", "--batch", "1")
    assert rows["trained"][2] > rows["untrained"][2] + 0.2
    assert rows["trained"][0] == rows["untrained"][0]  # dense attention asks no indexer


@pytest.mark.slow
@plots
def test_sparse_training_answers_right_only_with_trained_indexers(run_example, tmp_path):
    rows = train_sparse(run_example, tmp_path, "--save")
    dense, sparse, recall = rows["trained"]
    assert dense > 0.95 and sparse > 0.95 and recall > 0.8
    assert rows["untrained"][0] == dense and rows["untrained"][1] < 0.5
    model = models.load(tmp_path)
    new_cache = partial(models.PagedCache, model, 1, 160)
    assert lookup_accuracy(model, 160, new_cache=new_cache) > 0.95


@pytest.mark.parametrize("samples", [2, 8], ids=["few sequences", "many"])
def test_replay_keeps_the_probabilities_of_the_rollout(run_example, samples):
    said = run_example(
        "replay_rollout.py", "--samples", str(samples), "--prompts", "1", "--threads", "1"
    )
    ratios = re.findall(r"^(.+?) +largest \|log-ratio\| ([^\s,]+)", said, re.M)
    ratios = {title: float(number) for title, number in ratios}
    assert ratios["replay"] == ratios["other indexer, replay"] < 1e-4
    assert ratios["other indexer"] > 0.1


@pytest.mark.slow
def test_replayed_experts_leave_the_difference_of_the_policies(run_example):
    model = ["--model", str(ROOT / "examples/checkpoints/lookup_v4"), "--prompt-tokens", "256"]
    said = run_example("replay_rollout.py", *model, "--noise", "0.1", "--threads", "1")
    found = re.findall(r"^(.+?) +largest \|log-ratio\| [^\s,]+, (?:mean (\S+))?", said, re.M)
    means = {title: float(mean or 0) for title, mean in found}
    assert means["replay"] == means["other indexer, replay"] < 1e-5
    assert 1e-4 < means["other router, replay"] < means["other router, keys"] / 2


def test_a_step_with_replayed_selections_makes_right_answers_more_likely(run_example):
    said = run_example("replay_rollout.py", "--threads", "1")
    before, after = re.search(r"probability (\S+), after the step (\S+)", said).groups()
    assert float(after) > float(before) + 0.005


def on_simulator(*command: str) -> str:
    """What an example prints on the host simulator of CANN."""
    done = process(*command)
    assert "npu is a host simulator of CANN" in done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.ascend_host
@pytest.mark.parametrize("mode", MODES)
def test_a_model_compiled_by_torchair_answers_as_eager_does(mode):
    said = on_simulator("examples/compile_torchair.py", "--mode", mode).splitlines()
    assert len(said) == 4 and not any("wrong" in line for line in said)
    assert said[-1].startswith(f"mode {mode}: 1 graph") and said[-1].endswith("equal eager's")


@pytest.mark.slow
@pytest.mark.ascend_host
def test_the_second_process_loads_what_the_first_compiled(tmp_path):
    command = "examples/compile_torchair.py", "--cache", str(tmp_path), "--questions", "1"
    first, second = (on_simulator(*command).splitlines() for _ in range(2))
    assert first[0] == second[0]
    for said, graphs in (
        (first, "1 graph traced, compiled in"),
        (second, "0 graphs traced, loaded in"),
    ):
        assert graphs in said[1] and said[1].endswith("equal eager's")
    assert re.search(r"s, which took \S+ s when it was compiled", second[1])


HOST_WAYS = {"add_custom.py": ["eager", "torch.compile"]}
HOST_WAYS["own_op.py"] = [*HOST_WAYS["add_custom.py"], "interpreter"]


def all_equal(ways):
    return [word for way in ways for word in (way, "equal")]


@pytest.mark.parametrize(
    "name", ["add_custom.py", pytest.param("own_op.py", marks=pytest.mark.sim)]
)
def test_an_op_computes_the_same_in_every_way(name, run_example):
    assert run_example(name).split() == all_equal(HOST_WAYS[name])


@pytest.mark.ascend_host
@pytest.mark.parametrize("name", ["add_custom.py", "own_op.py"])
def test_an_op_computes_the_same_in_every_mode_of_torchair(name, run_example, monkeypatch):
    # as for_compiled_models, but with gradients
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    said = run_example(name, "--npu").split()
    assert said == all_equal(["eager", "torch.compile", *MODES])


@pytest.mark.ascend_host
@pytest.mark.usefixtures("for_compiled_models")
@pytest.mark.parametrize("mode", MODES)
def test_an_op_in_place_writes_the_input_in_every_mode_of_torchair(mode):
    import own_op

    own_op.register_converters()
    x = torch.arange(15000.0).view(3, 5000).npu()
    torch.compiler.reset()
    with ge_graphs.watched() as seen:
        ge_graphs.compiled(own_op.double_, mode=mode)(x)
    assert torch.equal(x.cpu(), 2 * torch.arange(15000.0).view(3, 5000))
    assert seen.counts() == ge_graphs.ONE_GRAPH[mode]
    converted = [node.type for graph in seen.ge for node in graph.op]
    assert ("AssignAdd" in converted) == (mode == "max-autotune")


@pytest.mark.slow
@pytest.mark.ascend_host
def test_an_exported_decode_step_is_loaded_and_run(tmp_path):
    said = on_simulator("examples/export_graph.py", "--folder", str(tmp_path), "--model")
    for name in ("decode.pt2", "decode.air"):
        assert f"written: {tmp_path / name}, loaded and run: equal to eager's" in said
        assert (tmp_path / name).stat().st_size > 1 << 20  # with the weights


@pytest.mark.slow
@pytest.mark.ascend_host
def test_the_graph_of_a_decode_step_is_written_as_text_and_picture(tmp_path):
    said = on_simulator("examples/export_graph.py", "--folder", str(tmp_path))
    assert "6 ScatterNdUpdate" in said and "0 TensorMove" in said
    text, picture = (tmp_path / "decode.txt").read_text(), (tmp_path / "decode.svg").read_text()
    nodes = xml.etree.ElementTree.fromstring(picture).findall("{http://www.w3.org/2000/svg}g")
    kinds = [node.get("class") for node in nodes]
    assert kinds.count("ours") == text.count('type: "LightningIndexerPto"') * 2 == 4
    assert kinds.count("writes") == 6 and len(kinds) > 100


def test_ranks_train_with_the_losses_and_norms_of_one_process(run_example, monkeypatch):
    arguments = ["train_on_ranks.py", "--steps", "3", "--clip", "5"]
    variables = dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    for name, value in variables.items():  # as torchrun does
        monkeypatch.setenv(name, value)
    alone = run_example(*arguments)
    for name in variables:
        monkeypatch.delenv(name)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    together = process(*torchrun, f"examples/{arguments[0]}", *arguments[1:]).stdout
    one, two = (
        [
            float(x)
            for line in re.findall(r"loss (.+), norm of the gradients (.+)", said)
            for x in line
        ]
        for said in (alone, together)
    )
    # four digits are printed; float32's rounding moves them less than the digits
    assert len(one) == 6 and one == pytest.approx(two, abs=2e-3)
    assert max(one[1::2]) > 5  # the norm was clipped
