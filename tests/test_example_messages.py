"""Programs print defaults, name the option that was typed, and end without a traceback."""

import ast
import re
import runpy
import sys

import pytest
import transformers
from repository import REPOSITORY

EXAMPLES = sorted(
    file.name
    for file in (REPOSITORY / "examples").glob("*.py")
    if "ArgumentParser" in file.read_text() and file.name != "options.py"
)


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs an example in this process: its exit and what it printed. A traceback is a failure."""

    def run(script: str, *arguments: str) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        monkeypatch.syspath_prepend(str(REPOSITORY / "examples"))
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(REPOSITORY / "examples" / script), run_name="__main__")
        printed = capsys.readouterr()
        return end.value.code, printed.out + printed.err

    yield run
    transformers.utils.logging.enable_progress_bar()  # programs whose output is piped have none


@pytest.mark.parametrize("script", EXAMPLES)
def test_the_help_of_every_example_shows_defaults(script):
    tree = ast.parse((REPOSITORY / "examples" / script).read_text())
    parsers = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "argparse.ArgumentParser"
    ]
    assert len(parsers) == 1
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in parsers[0].keywords}
    assert keywords["formatter_class"] == "Help"


def test_the_help_has_every_default(run):
    said = re.sub(r"\s+", " ", run("generate.py", "--help")[1])
    for option, default in {
        "--model MODEL": "examples/checkpoints/lookup",
        "--dtype": "auto",
        "--batch BATCH": "1",
        "--block-size BLOCK_SIZE": "128",
        "--prefill-chunk PREFILL_CHUNK": "512",
        "--prompt-tokens PROMPT_TOKENS": "4096",
        "--questions N": "16",
        "--seed SEED": "0",
    }.items():
        assert re.search(rf"{option}\b.{{0,140}}\(default: {default}\)", said), option
    assert "default: None" not in said and "default: False" not in said


WRONG = {
    "block-size": (
        "generate.py",
        ["--block-size", "8"],
        "argument --block-size: must be a multiple of 16 up to 1024, got 8",
    ),
    "batch": ("generate.py", ["--batch", "0"], "argument --batch: must be at least 1, got 0"),
    "questions": ("generate.py", ["--questions", "99"], "argument --questions: invalid choice"),
    "prompt-tokens": (
        "generate.py",
        ["--prompt-tokens", "10"],
        "generate.py: --prompt-tokens 10 is too short for --questions 16",
    ),
    "model": ("generate.py", ["--model", "/none"], "generate.py: --model must be a directory, or"),
    "tokens": ("needle.py", ["--tokens", "4"], "argument --tokens: must be at least 32, got 4"),
    "samples": (
        "replay_rollout.py",
        ["--samples", "1"],
        "argument --samples: must be at least 2, got 1",
    ),
    "url": (
        "replay_served.py",
        ["--url", "http://127.0.0.1:9"],
        "--url http://127.0.0.1:9: [Errno 111] Connection refused; start bash run.sh serve",
    ),
    "source": (
        "convert_checkpoint.py",
        ["/none", "/tmp/none"],
        "convert_checkpoint.py: SOURCE must be a directory, or",
    ),
}


@pytest.mark.parametrize("script, arguments, message", WRONG.values(), ids=WRONG)
def test_bad_input_ends_with_the_option_that_was_typed(script, arguments, message, run):
    code, printed = run(script, *arguments)
    # a text as code goes to standard error, with status 1
    assert code == 2 and message in printed.splitlines()[-1] or message in str(code)
