"""Programs print defaults, name the option that was typed, and end without a traceback."""

import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import transformers
from repository import REPOSITORY

sys.path.append(str(REPOSITORY / "examples"))
from options import in_options  # noqa: E402

#: the programs of the index
EXAMPLES = re.findall(r"\]\((\w+\.py)\)", (REPOSITORY / "examples/README.md").read_text())
ON_PYPTO = ("add_custom.py", "own_op.py", "compile_torchair.py", "export_graph.py")


def with_marks(programs):
    return [
        pytest.param(name, marks=pytest.mark.sim if name in ON_PYPTO else []) for name in programs
    ]


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


@pytest.mark.parametrize("script", with_marks(EXAMPLES))
def test_every_example_has_help_and_does_nothing_else_for_it(script, run):
    code, printed = run(script, "--help")
    assert not code and printed.startswith(f"usage: {script} ")
    source = (REPOSITORY / "examples" / script).read_text()
    assert "formatter_class=Help" in source or "parser_of(" in source  # shows defaults


def test_the_help_has_every_default(run):
    said = re.sub(r"\s+", " ", run("generate.py", "--help")[1])
    for option, default in {
        "--model MODEL": "examples/checkpoints/lookup",
        "--dtype": "auto",
        "--block-size BLOCK_SIZE": "128",
        "--prefill-chunk N": "512",
        "--seed SEED": "0",
    }.items():
        assert re.search(rf"{option}\b.{{0,140}}\(default: {default}\)", said), option
    assert "default: None" not in said and "default: False" not in said
    for option, default in {
        "--max-new-tokens N": "64; 512 an answer of --chat, 4 of the demo",
        "--batch N": "1 ",
        "--prompt-tokens N": "4096; of --bench 512",
        "--questions N": "16 ",
        "--temperature T": "0,",
    }.items():
        assert re.search(rf"{option} .{{0,40}}default: {default}", said), option


WRONG = {
    "block-size": (
        "generate.py",
        ["--block-size", "8"],
        "argument --block-size: must be a multiple of 16 up to 1024, got 8",
    ),
    "batch": ("generate.py", ["--batch", "0"], "argument --batch: must be at least 1, got 0"),
    "questions": (
        "generate.py",
        ["--questions", "40"],
        "argument --questions: must be 1 to 32, got 40",
    ),
    "prompt-tokens": (
        "generate.py",
        ["--prompt-tokens", "10"],
        "generate.py: --prompt-tokens 10 is too short for --questions 16",
    ),
    "memory": (
        "generate.py",
        ["--memory", "64", "--prompt", "x"],
        "generate.py: --memory must be bytes, or a string such as '64GB' or '60GiB', got '64'",
    ),
    "model": ("generate.py", ["--model", "/none"], "generate.py: --model must be a directory, or"),
    "layers": ("generate.py", ["--layers", "3"], "generate.py: --layers must be 1 to 2 (config"),
    "chat": (
        "generate.py",
        ["--chat"],
        "checkpoints/lookup has none; pass a file of Jinja with --chat-template, or --prompt",
    ),
    "two at once": ("generate.py", ["--prompt", "x", "--bench"], "argument --bench: not allowed"),
    "only of the demo": (
        "generate.py",
        ["--prompt", "x", "--questions", "3"],
        "generate.py: error: --questions is for the demo, got it with --prompt",
    ),
    "not in a chat": (
        "generate.py",
        ["--chat", "--json"],
        "generate.py: error: --json is for the demo and --prompt and --bench, got it with --chat",
    ),
    "not of ranks": ("generate.py", ["--bench", "--ep"], "--ep is for the demo and --prompt, got"),
    "greedy": (
        "generate.py",
        ["--prompt", "x", "--top-p", "0.5"],
        "--top-p needs --temperature, else nothing is sampled",
    ),
    "temperature": (
        "generate.py",
        ["--prompt", "x", "--temperature", "-1"],
        "argument --temperature: must be 0 to 100, got -1.0",
    ),
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


def test_a_template_that_is_none_is_named_before_the_model_is_loaded(run, tmp_path):
    (tmp_path / "template").write_text("{% for %}")
    code, _ = run("generate.py", "--chat", "--chat-template", str(tmp_path / "template"))
    assert code.startswith("generate.py: --chat-template is not one of Jinja: ")


#: what else each program needs to come as far
WRITERS = {
    "train_sparse.py": ("--output", "x"),
    "needle.py": ("--output", "x/x.png"),
    "train_lookup.py": ("--output", "x"),
    "train_lookup_v4.py": ("--output", "x"),
    "train_lookup_hops.py": ("--output", "x"),
    "train_lookup_mtp.py": ("--output", "x"),
    "train_on_ranks.py": ("--save", "x"),
    "compile_torchair.py": ("--cache", "x"),
    "export_graph.py": ("--folder", "x"),
}


@pytest.mark.parametrize("script", with_marks(WRITERS))
def test_a_place_that_cannot_be_written_is_named_before_the_work(
    script, run, tmp_path, monkeypatch
):
    monkeypatch.setenv("RANK", "0")
    (tmp_path / "file").touch()
    option, name = WRITERS[script]
    place = tmp_path / "file" / name
    code, printed = run(script, option, str(place))
    folder = place.parent if place.suffix else place
    assert code == 2 and printed.splitlines()[-1] == (
        f"{script}: error: {option} needs a folder that can be written, got {folder}: "
        "Not a directory"
    )


def test_a_plot_that_cannot_be_drawn_is_named_before_the_work(run, tmp_path):
    code, printed = run("needle.py", "--output", str(tmp_path / "x.txt"))
    assert code == 2 and "--output must be a file ending in .png, .svg, .pdf" in printed
    (tmp_path / "x.png").mkdir()
    assert run("needle.py", "--output", str(tmp_path / "x.png"))[0] == 2


@pytest.mark.parametrize(
    "script",
    [name for name in WRITERS if name.startswith("train_lookup")],
)
def test_a_training_leaves_the_files_of_the_repository(script, run):
    said = re.sub(r"\s+", " ", run(script, "--help")[1])
    assert f"folder of the checkpoint (default: {script.removeprefix('train_')[:-3]})" in said


def test_the_layer_that_drafts_of_each_checkpoint_has_a_folder_of_its_own(run):
    said = re.sub(r"\s+", " ", run("train_lookup_mtp.py", "--checkpoint", "lookup_v4", "--help")[1])
    assert "folder of the checkpoint (default: lookup_v4_mtp)" in said


MESSAGES = {
    "load: num_hidden_layers must be 1 to 2 (config.json), got 9": "--layers must be 1 to 2 "
    "(config.json), got 9",
    "load: out of memory: this machine has 1 GB free; load fewer layers with num_hidden_layers, or "
    "use more devices, or pass weights='int8' or 'int4'": "load: out of memory: this machine has "
    "1 GB free; load fewer layers with --layers, or use more devices, or pass --weights 'int8' or "
    "'int4'",
    "load: weights must be None for a checkpoint that was saved with weights in int8, got 1": "--"
    "weights must be omitted for a checkpoint that was saved with weights in int8, got 1",
    "load: device must be 'cpu' with stored weights; load with weights=None": "load: device must "
    "be 'cpu' with stored weights; load with no --weights",
    "load: tensor_parallel must be False for x: y; pass expert_parallel=True": "load: "
    "tensor_parallel must be False for x: y; pass expert_parallel=True",
    "load: weights must be None or 'stored' for experts that stay in their files, got 'int4'": "--"
    "weights must be omitted or 'stored' for experts that stay in their files, got 'int4'",
    "load: memory must be at least 9B, got 1B; pass more, or weights={'experts': 'stored', 'rest': "
    "'stored'}": "--memory must be at least 9B, got 1B; pass more, or --weights 'stored'",
    "load: out of memory: it needs 9B": "load: out of memory: it needs 9B",
    "--model must be a name with revision='v1', got x": "--model must be a name with --revision "
    "'v1', got x",
}


@pytest.mark.parametrize("message, wanted", MESSAGES.items())
def test_arguments_of_load_are_named_by_the_options_of_the_program(message, wanted):
    options = ("--layers", "--weights", "--memory", "--revision")
    assert in_options(message, options) == wanted


# ---- signals -----------------------------------------------------------------------------------


def started(*command: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": ""},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def interrupted(process: subprocess.Popen) -> str:
    """What the program says on Ctrl-C, which its own processes get, too."""
    said = None
    while said is None:
        os.killpg(process.pid, signal.SIGINT)
        try:
            said = process.communicate(timeout=30)[1]
        except subprocess.TimeoutExpired:  # a callback of Python's own has swallowed it
            continue
    assert process.returncode == -signal.SIGINT  # 130 in a shell
    return said


def test_ctrl_c_in_the_imports_prints_one_line():
    process = started("examples/generate.py")
    while "libtorch_cpu" not in Path(f"/proc/{process.pid}/maps").read_text():
        time.sleep(0.01)
    assert interrupted(process).splitlines()[-1] == "generate.py: interrupted"


def test_ctrl_c_in_a_check_prints_one_line():
    process = started("-m", "custom_pypto_command", "verify")
    assert process.stdout.readline().startswith("custom_pypto ")
    assert interrupted(process) == "custom_pypto_command.py: interrupted\n"


@pytest.mark.slow
def test_ctrl_c_in_a_training_prints_one_line(tmp_path):
    process = started("examples/train_sparse.py", "--output", str(tmp_path / "x"))
    while not (tmp_path / "x").exists():
        time.sleep(0.05)
    time.sleep(2)
    assert interrupted(process) == "train_sparse.py: interrupted\n"


def test_ctrl_c_ends_the_processes_of_a_program_with_one_line(tmp_path):
    process = started("examples/needle.py", "--output", str(tmp_path / "x.png"))
    assert process.stderr.readline() == "1 of 8: sparse, 1024 tokens\n"  # not on a terminal
    assert interrupted(process) == "needle.py: interrupted\n"


@pytest.mark.parametrize(
    "command",
    [["-m", "custom_pypto_command", "verify"], ["examples/call_ops.py", "--help"]],
    ids=["in the work", "at the end"],
)
def test_a_reader_that_has_read_enough_ends_a_program_silently(command):
    process = started(*command)
    process.stdout.close()
    process.stdout = None
    assert process.communicate()[1] == "" and process.returncode == -signal.SIGPIPE
