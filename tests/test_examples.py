"""The examples run as the README says, and print what they promise."""

import importlib.util
import io
import json
import os
import re
import runpy
import subprocess
import sys
import xml.etree.ElementTree
from functools import partial
from pathlib import Path

import ge_graphs
import pytest
import torch
import transformers

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
sys.path.append(str(EXAMPLES))

import estimates  # noqa: E402
import model_memory  # noqa: E402
import train_lookup  # noqa: E402
import train_lookup_v4  # noqa: E402
from modes import MODES  # noqa: E402
from train_lookup import FIRST_PAIR, FIRST_QUESTION, lookup_accuracy, lookup_batch  # noqa: E402

from custom_pypto import models  # noqa: E402

plots = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)


def process(*command: str) -> subprocess.CompletedProcess:
    path = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs an example in this process, which has imported what each would import anew."""

    def run(name: str, *arguments: str, stdin: str = "") -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        except SystemExit as end:
            return str(end)
        said = capsys.readouterr()
        run.errors = said.err
        return said.out

    yield run
    transformers.utils.logging.enable_progress_bar()


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


def generate(run, *arguments: str, **kwargs) -> dict:
    return json.loads(run("generate.py", "--json", *arguments, **kwargs))


def test_demo_answers_right_and_like_upstream(run):
    report = generate(run, "--prompt-tokens", "1024", "--questions", "8")
    ours, upstream = report["results"]
    assert (ours["backend"], upstream["backend"]) == ("custom_pypto", "transformers")
    assert ours["right"] >= 7 and ours["asked"] == 8
    assert ours["answers"] == upstream["answers"]
    assert report["index_topk"] * 10 < ours["prompt_tokens"]


@pytest.mark.slow
def test_compiled_batch_answers_like_eager(run):
    arguments = ["--backend", "custom_pypto", "--prompt-tokens", "300", "--questions", "2"]
    arguments += ["--batch", "2", "--dtype", "float32"]
    eager, compiled = (generate(run, *arguments, *more) for more in ([], ["--compile"]))
    assert (
        compiled["compile"] and compiled["results"][0]["answers"] == eager["results"][0]["answers"]
    )


def test_a_prompt_from_standard_input_is_continued(run):
    text = "the old sailor otter=red slowly crossed a wide harbour otter?"
    (result,) = generate(run, "--prompt-file", "-", "--max-new-tokens", "3", stdin=text)["results"]
    assert result["backend"] == "custom_pypto" and result["prompt_tokens"] == 10
    assert result["answers"][0][0].split()[0] == "red"


FACTS = (
    "the old sailor otter=red slowly crossed a wide harbour , the young farmer whale=blue rarely "
    "left the quiet garden near winter , heron=green"
)


def test_a_prompt_is_continued_on_the_ops_and_standard_output_has_the_text_alone(run):
    assert run("generate.py", "--prompt", f"{FACTS} otter?", "--max-new-tokens", "3") == "red\n"
    speed = r"24 tokens read, first token after \S+ s; 2 tokens written, \S+ tokens/s\n"
    assert re.fullmatch(speed, run.errors)
    said = run("generate.py", "--prompt", f"{FACTS} otter?", "--backend", "both")
    assert said.startswith("custom_pypto:\nred\ntransformers:\nred\n\n")


@pytest.mark.parametrize("weights", ["stored", "int8", "int4"])
def test_a_prompt_is_continued_with_quantized_weights(weights, run):
    report = generate(run, "--prompt", f"{FACTS} otter?", "--weights", weights)
    assert report["results"][0]["answers"] == [["red"]]
    assert report["weights"] == ("bfloat16" if weights == "stored" else weights)


def test_drafts_leave_the_text_and_are_counted(run):
    options = ["--model", "examples/checkpoints/lookup_mtp", "--dtype", "float32"]
    options += ["--prompt", "the old sailor otter=red slowly crossed a wide harbour , heron=green"]
    options += ["--temperature", "5", "--seed", "1", "--max-new-tokens", "40"]
    (plain,), (drafted,) = (
        generate(run, *options, *more)["results"] for more in ([], ["--drafts", "2"])
    )
    assert drafted["answers"] == plain["answers"] and plain["drafted"] == plain["accepted"] == []
    made, accepted = drafted["drafted"], drafted["accepted"]
    assert len(made) == len(accepted) == 2 and made[0] > 0
    assert all(right <= all_ for right, all_ in zip(accepted, made, strict=True))
    run("generate.py", *options, "--drafts", "2")
    assert re.search(r"drafts accepted: \d+ of \d+, \d+ of \d+\n$", run.errors)


def sampled(run, *arguments: str) -> str:
    hot = ["--temperature", "5", "--max-new-tokens", "20"]
    return run("generate.py", "--prompt", FACTS, *hot, *arguments)


def test_samples_follow_seed_and_cuts(run):
    one, again, other = (sampled(run, "--seed", seed) for seed in "112")
    assert one == again != other
    likeliest = run("generate.py", "--prompt", FACTS, "--max-new-tokens", "20")
    assert likeliest != one
    for cut in (["--top-k", "1"], ["--top-p", "0"]):
        assert sampled(run, *cut) == likeliest


def test_text_ends_before_a_stop(run):
    words = sampled(run).split()
    stop = words[3]
    assert sampled(run, "--stop", "nowhere", "--stop", stop[1:]).rstrip() == " ".join(
        [*words[: words.index(stop)], stop[0]]
    )
    (result,) = json.loads(sampled(run, "--stop", stop, "--json"))["results"]
    assert result["answers"][0][0].split() == words[: words.index(stop)]
    assert result["new_tokens"] == words.index(stop) + 1


#: of the lookup checkpoints, in whose texts a full stop follows an answer
TEMPLATE = (
    "{%- for m in messages -%}{{ m.content }}{% if m.role == 'assistant' %} .{% endif %} "
    "{% endfor -%}"
)
FORGETFUL = (
    "{%- for m in messages if m.role == 'user' -%}{{ m.content }} {% endfor -%}"  # no answers
)


def chat(run, tmp_path, template: str, lines: list[str], *arguments: str) -> list[str]:
    (tmp_path / "template").write_text(template)
    arguments = ["--chat", "--chat-template", str(tmp_path / "template"), *arguments]
    return run("generate.py", *arguments, stdin="\n".join(lines)).splitlines()


def test_a_chat_answers_each_line_and_reads_what_is_new_alone(run, tmp_path):
    lines = [f"{FACTS} otter?", "", "whale?", "heron?"]
    assert chat(run, tmp_path, TEMPLATE, lines) == ["red", "blue", "green"]
    # all but the last of 24, then the full stops; the questions go with the answers' first step
    assert run.errors.startswith("3 answers, 25 tokens read, ")


@pytest.mark.parametrize("checkpoint", ["lookup", "lookup_v4"])
def test_a_template_that_rewrites_what_was_said_is_followed(checkpoint, run, tmp_path):
    model = ["--model", str(EXAMPLES / "checkpoints" / checkpoint), "--max-new-tokens", "8"]
    task = {"lookup": train_lookup, "lookup_v4": train_lookup_v4}[checkpoint]
    prompt, [(first, _), (second, _)] = task.lookup_prompt(200, questions=2)
    _, answer = chat(run, tmp_path, FORGETFUL, [f"{prompt} {first}", second], *model)
    assert run("generate.py", "--prompt", f"{prompt} {first} {second}", *model) == f"{answer}\n"


def test_a_bench_measures_next_to_what_memory_allows(run):
    few = ["--bench", "--prompt-tokens", "64", "--max-new-tokens", "4", "--weights", "int8"]
    report = json.loads(run("generate.py", *few, "--json"))
    (speed,) = report["results"]
    assert speed["prompt_tokens_per_second"] > speed["tokens_per_second"] > 0
    size = model_memory.of_checkpoint(str(EXAMPLES / "checkpoints/lookup"), None).sizes["int8"]
    assert report["bytes_of_token"] == size.read
    seconds = estimates.seconds_of_token(size.read, 2, report["bytes_per_second"])
    assert report["estimated_tokens_per_second"] == 1 / seconds
    said = run("generate.py", *few, "--backend", "both")
    assert re.search(r"^tokens per second +custom_pypto +transformers\nprompt of 64 +\d", said)
    assert "\nthen 4, one by one " in said and "Memory allows about " in said


def test_piped_output_has_no_progress_bar_and_no_escapes():
    done = process("examples/generate.py", "--prompt-tokens", "200", "--questions", "1")
    for text in (done.stdout, done.stderr):
        assert "\x1b" not in text and "\r" not in text and "%|" not in text


def test_a_missing_checkpoint_is_named(run, tmp_path):
    assert "nowhere" in run("generate.py", "--model", str(tmp_path / "nowhere"))


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


def train_sparse(run, folder: Path, *arguments: str) -> dict[str, list[float]]:
    """Accuracies with dense and sparse attention and the recall, by indexer."""
    said = run("train_sparse.py", "--output", str(folder), *arguments)
    assert (folder / "train_sparse.png").read_bytes().startswith(b"\x89PNG")
    rows = re.findall(r"^((?:un)?trained) indexer +(\S+) +(\S+) +(\S+)$", said, re.M)
    return {title: list(map(float, numbers)) for title, *numbers in rows}


@plots
def test_few_steps_teach_the_indexers_where_attention_looks(run, tmp_path):
    rows = train_sparse(run, tmp_path, "--steps", "51", "51", "51", "--batch", "1")
    assert rows["trained"][2] > rows["untrained"][2] + 0.2
    assert rows["trained"][0] == rows["untrained"][0]  # dense attention asks no indexer


@pytest.mark.slow
@plots
def test_sparse_training_answers_right_only_with_trained_indexers(run, tmp_path):
    rows = train_sparse(run, tmp_path, "--save")
    dense, sparse, recall = rows["trained"]
    assert dense > 0.95 and sparse > 0.95 and recall > 0.8
    assert rows["untrained"][0] == dense and rows["untrained"][1] < 0.5
    model = models.load(tmp_path)
    new_cache = partial(models.PagedCache, model, 1, 160)
    assert lookup_accuracy(model, 160, new_cache=new_cache) > 0.95


@pytest.mark.parametrize("samples", [2, 8], ids=["few sequences", "many"])
def test_replay_keeps_the_probabilities_of_the_rollout(run, samples):
    said = run("replay_rollout.py", "--samples", str(samples), "--prompts", "1", "--threads", "1")
    ratios = re.findall(r"^(.+?) +largest \|log-ratio\| ([^\s,]+)", said, re.M)
    ratios = {title: float(number) for title, number in ratios}
    assert ratios["replay"] == ratios["other indexer, replay"] < 1e-4
    assert ratios["other indexer"] > 0.1


@pytest.mark.slow
def test_replayed_experts_leave_the_difference_of_the_policies(run):
    model = ["--model", str(ROOT / "examples/checkpoints/lookup_v4"), "--prompt-tokens", "256"]
    said = run("replay_rollout.py", *model, "--noise", "0.1", "--threads", "1")
    found = re.findall(r"^(.+?) +largest \|log-ratio\| [^\s,]+, (?:mean (\S+))?", said, re.M)
    means = {title: float(mean or 0) for title, mean in found}
    assert means["replay"] == means["other indexer, replay"] < 1e-5
    assert 1e-4 < means["other router, replay"] < means["other router, keys"] / 2


def test_a_step_with_replayed_selections_makes_right_answers_more_likely(run):
    said = run("replay_rollout.py", "--threads", "1")
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
def test_an_op_computes_the_same_in_every_way(name, run):
    assert run(name).split() == all_equal(HOST_WAYS[name])


@pytest.mark.ascend_host
@pytest.mark.parametrize("name", ["add_custom.py", "own_op.py"])
def test_an_op_computes_the_same_in_every_mode_of_torchair(name, run, monkeypatch):
    # as for_compiled_models, but with gradients
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    said = run(name, "--npu").split()
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


def test_ranks_train_with_the_losses_and_norms_of_one_process(run, monkeypatch):
    arguments = ["train_on_ranks.py", "--steps", "3", "--clip", "5"]
    variables = dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    for name, value in variables.items():  # as torchrun does
        monkeypatch.setenv(name, value)
    alone = run(*arguments)
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
