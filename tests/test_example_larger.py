"""examples/generate.py with a model whose experts stay in its files."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from published import published
from repository import REPOSITORY

pytest.importorskip("transformers")
sys.path.append(str(REPOSITORY / "examples"))
import model_memory  # noqa: E402
import throughput  # noqa: E402

from custom_pypto import models  # noqa: E402

TEXT = "the old sailor"


def generate(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "examples/generate.py", *arguments]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def streamed(tmp_path_factory):
    """Options for a checkpoint in the published format, of whose experts about half fit."""
    path = tmp_path_factory.mktemp("published")
    sizes = dict(moe_intermediate_size=128, hidden_size=256, vocab_size=362)
    published(path, **sizes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(REPOSITORY / "examples" / "checkpoints/lookup" / name, path)
    size = model_memory.of_checkpoint(str(path), None).sizes["stored"]
    memory = f"{(size.weights - size.experts / 2) / 1000:.0f}KB"
    return ["--model", str(path), "--weights", "stored", "--memory", memory]


OF_FILES = r"of \d+ experts \d+% in memory, \d+ on their way, \d+ not; read \S+ GB at .* in vain"


def test_a_model_with_experts_in_files_writes_the_same_and_says_what_it_read(streamed):
    prompt = ["--prompt", TEXT, "--max-new-tokens", "8"]
    whole = generate(*prompt, *streamed[:-2], "--memory", "1GB")
    assert whole.stderr.splitlines()[1:] == ["generate: all weights are in memory"]
    done = generate(*prompt, *streamed)
    assert done.stdout == whole.stdout and len(done.stdout.split()) == 8
    loaded, speed, generated = done.stderr.splitlines()
    assert re.match(
        r"load: \d of 16 experts, .* in fp8, fit in memory; threads that read the others: \d; ",
        loaded,
    )
    assert speed.startswith("3 tokens read, first token ")
    assert re.fullmatch(f"generate: {OF_FILES}", generated)
    # two experts in each of two layers, of each of the tokens
    assert generated.startswith("generate: of 32 experts ")


@pytest.mark.slow
def test_a_bench_of_a_model_with_experts_in_files_has_their_counts(streamed):
    few = ["--bench", "--prompt-tokens", "64", "--max-new-tokens", "4", *streamed]
    said = generate(*few).stdout
    counts = re.search(f"\ncustom_pypto: ({OF_FILES}).\nA token read \\S+ GB from files: ", said)
    assert counts[1].startswith(f"of {throughput.REPEATS * 4 * 2 * 2} experts ")


def test_the_bytes_of_a_token_are_those_of_the_model_in_memory(streamed):
    path, memory = streamed[1], streamed[-1]
    size = model_memory.of_checkpoint(path, None).sizes["stored"]
    model = models.load(path, weights="stored", memory=memory)
    assert throughput.bytes_of_token(model) == size.read
