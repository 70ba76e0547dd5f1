"""``examples/generate.py``: what it writes, by its options."""

import json
import re

import pytest
from example_programs import EXAMPLES, process  # which makes the next ones found

# isort: split
import estimates
import model_memory
import train_lookup
import train_lookup_v4


def generate(run_example, *arguments: str, **kwargs) -> dict:
    return json.loads(run_example("generate.py", "--json", *arguments, **kwargs))


def test_demo_answers_right_and_like_upstream(run_example):
    report = generate(run_example, "--prompt-tokens", "1024", "--questions", "8")
    ours, upstream = report["results"]
    assert (ours["backend"], upstream["backend"]) == ("custom_pypto", "transformers")
    assert ours["right"] >= 7 and ours["asked"] == 8
    assert ours["answers"] == upstream["answers"]
    assert report["index_topk"] * 10 < ours["prompt_tokens"]


@pytest.mark.slow
def test_compiled_batch_answers_like_eager(run_example):
    arguments = ["--backend", "custom_pypto", "--prompt-tokens", "300", "--questions", "2"]
    arguments += ["--batch", "2", "--dtype", "float32"]
    eager, compiled = (generate(run_example, *arguments, *more) for more in ([], ["--compile"]))
    assert (
        compiled["compile"] and compiled["results"][0]["answers"] == eager["results"][0]["answers"]
    )


def test_a_prompt_from_standard_input_is_continued(run_example):
    text = "the old sailor otter=red slowly crossed a wide harbour otter?"
    (result,) = generate(run_example, "--prompt-file", "-", "--max-new-tokens", "3", stdin=text)[
        "results"
    ]
    assert result["backend"] == "custom_pypto" and result["prompt_tokens"] == 10
    assert result["answers"][0][0].split()[0] == "red"


FACTS = (
    "the old sailor otter=red slowly crossed a wide harbour , the young farmer whale=blue rarely "
    "left the quiet garden near winter , heron=green"
)


def test_a_prompt_is_continued_on_the_ops_and_standard_output_has_the_text_alone(run_example):
    assert (
        run_example("generate.py", "--prompt", f"{FACTS} otter?", "--max-new-tokens", "3")
        == "red\n"
    )
    speed = r"24 tokens read, first token after \S+ s; 2 tokens written, \S+ tokens/s\n"
    assert re.fullmatch(speed, run_example.errors)
    said = run_example("generate.py", "--prompt", f"{FACTS} otter?", "--backend", "both")
    assert said.startswith("custom_pypto:\nred\ntransformers:\nred\n\n")


@pytest.mark.parametrize(
    "weights, more",
    [
        *((kind, []) for kind in ("stored", "int8", "int4")),
        *((kind, ["--activations", "int8"]) for kind in ("int8", "int4")),
    ],
)
def test_a_prompt_is_continued_with_quantized_weights(weights, more, run_example):
    report = generate(run_example, "--prompt", f"{FACTS} otter?", "--weights", weights, *more)
    assert report["results"][0]["answers"] == [["red"]]
    assert report["weights"] == ("bfloat16" if weights == "stored" else weights)


def test_drafts_leave_the_text_and_are_counted(run_example):
    options = ["--dtype", "float32", "--temperature", "5", "--seed", "1", "--max-new-tokens", "40"]
    options += ["--prompt", "the old sailor otter=red slowly crossed a wide harbour , heron=green"]
    (plain,), (drafted,) = (
        generate(run_example, *options, *more)["results"] for more in ([], ["--drafts", "2"])
    )
    assert drafted["answers"] == plain["answers"] and plain["drafted"] == plain["accepted"] == []
    made, accepted = drafted["drafted"], drafted["accepted"]
    assert len(made) == len(accepted) == 2 and made[0] > 0
    assert all(right <= all_ for right, all_ in zip(accepted, made, strict=True))
    run_example("generate.py", *options, "--drafts", "2")
    assert re.search(r"drafts accepted: \d+ of \d+, \d+ of \d+\n$", run_example.errors)


def sampled(run_example, *arguments: str) -> str:
    hot = ["--temperature", "5", "--max-new-tokens", "20"]
    return run_example("generate.py", "--prompt", FACTS, *hot, *arguments)


def test_samples_follow_seed_and_cuts(run_example):
    one, again, other = (sampled(run_example, "--seed", seed) for seed in "112")
    assert one == again != other
    likeliest = run_example("generate.py", "--prompt", FACTS, "--max-new-tokens", "20")
    assert likeliest != one
    for cut in (["--top-k", "1"], ["--top-p", "0"]):
        assert sampled(run_example, *cut) == likeliest


def test_text_ends_before_a_stop(run_example):
    words = sampled(run_example).split()
    stop = words[3]
    assert sampled(run_example, "--stop", "nowhere", "--stop", stop[1:]).rstrip() == " ".join(
        [*words[: words.index(stop)], stop[0]]
    )
    (result,) = json.loads(sampled(run_example, "--stop", stop, "--json"))["results"]
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


def chat(run_example, tmp_path, template: str, lines: list[str], *arguments: str) -> list[str]:
    (tmp_path / "template").write_text(template)
    arguments = ["--chat", "--chat-template", str(tmp_path / "template"), *arguments]
    return run_example("generate.py", *arguments, stdin="\n".join(lines)).splitlines()


def test_a_chat_answers_each_line_and_reads_what_is_new_alone(run_example, tmp_path):
    lines = [f"{FACTS} otter?", "", "whale?", "heron?"]
    assert chat(run_example, tmp_path, TEMPLATE, lines) == ["red", "blue", "green"]
    # all but the last of 24, then the full stops; the questions go with the answers' first step
    assert run_example.errors.startswith("3 answers, 25 tokens read, ")


@pytest.mark.parametrize("checkpoint", ["lookup", "lookup_v4"])
def test_a_template_that_rewrites_what_was_said_is_followed(checkpoint, run_example, tmp_path):
    model = ["--model", str(EXAMPLES / "checkpoints" / checkpoint), "--max-new-tokens", "8"]
    task = {"lookup": train_lookup, "lookup_v4": train_lookup_v4}[checkpoint]
    prompt, [(first, _), (second, _)] = task.lookup_prompt(200, questions=2)
    _, answer = chat(run_example, tmp_path, FORGETFUL, [f"{prompt} {first}", second], *model)
    assert (
        run_example("generate.py", "--prompt", f"{prompt} {first} {second}", *model)
        == f"{answer}\n"
    )


def test_a_bench_measures_next_to_what_memory_allows(run_example):
    few = ["--bench", "--prompt-tokens", "64", "--max-new-tokens", "4", "--weights", "int8"]
    report = json.loads(run_example("generate.py", *few, "--json"))
    (speed,) = report["results"]
    assert speed["prompt_tokens_per_second"] > speed["tokens_per_second"] > 0
    size = model_memory.of_checkpoint(str(EXAMPLES / "checkpoints/lookup"), None).sizes["int8"]
    assert report["bytes_of_token"] == size.read
    seconds = estimates.seconds_of_token(size.read, 2, report["bytes_per_second"])
    assert report["estimated_tokens_per_second"] == 1 / seconds
    said = run_example("generate.py", *few, "--backend", "both")
    assert re.search(r"^tokens per second +custom_pypto +transformers\nprompt of 64 +\d", said)
    assert "\nthen 4, one by one " in said and "Memory allows about " in said


def test_piped_output_has_no_progress_bar_and_no_escapes():
    done = process("examples/generate.py", "--prompt-tokens", "200", "--questions", "1")
    for text in (done.stdout, done.stderr):
        assert "\x1b" not in text and "\r" not in text and "%|" not in text


def test_a_missing_checkpoint_is_named(run_example, tmp_path):
    assert "nowhere" in run_example("generate.py", "--model", str(tmp_path / "nowhere"))
