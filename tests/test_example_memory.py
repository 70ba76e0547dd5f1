"""examples/model_memory.py computes what models.load allocates; the pages show what it prints."""

import io
import os
import runpy
import subprocess
import sys

import pytest
from repository import REPOSITORY

pytest.importorskip("transformers")
sys.path.append(str(REPOSITORY / "examples"))
import model_memory as program  # noqa: E402
from transformers import AutoConfig  # noqa: E402

from custom_pypto import models, requirements  # noqa: E402
from custom_pypto.models import sharing  # noqa: E402

NEWEST = requirements.minor(program.VERSION) == requirements.TRANSFORMERS[-1]


def printed(*arguments: str, status: int = 0, **variables) -> subprocess.CompletedProcess:
    command = [sys.executable, "examples/model_memory.py", *arguments]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)} | variables
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    return done


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
@pytest.mark.parametrize("checkpoint", ["lookup", "lookup_v4"])
def test_the_size_is_that_of_the_loaded_model(checkpoint, weights):
    path = f"{REPOSITORY}/examples/checkpoints/{checkpoint}"
    size = program.of_checkpoint(path, None).sizes[weights or "bfloat16"]
    model = models.load(path, weights=weights)
    state = model.state_dict()
    assert size.weights == sum(tensor.nbytes for tensor in state.values())
    # every weight but the embedding, and the experts that a token is not sent to
    read = sum(tensor.nbytes for name, tensor in state.items() if "embed_tokens" not in name)
    config = model.config
    if checkpoint == "lookup_v4":
        experts = sum(tensor.nbytes for name, tensor in state.items() if ".experts." in name)
        read -= experts * (1 - config.num_experts_per_tok / config.n_routed_experts)
    assert size.read == pytest.approx(read)


@pytest.mark.parametrize("weights", [None, "int8"])
def test_the_size_of_a_rank_is_its_part_of_the_loaded_model(weights):
    path, ranks = f"{REPOSITORY}/examples/checkpoints/lookup_v4", 2
    model = program.build(AutoConfig.from_pretrained(path), None, heads=False)
    shared = sharing.shared_parameters(model, sharing.plan_of(model, ranks, experts=True))
    assert any(".experts." in name for name in shared) and "lm_head.weight" in shared
    formats = weights and dict.fromkeys(("experts", "rest"), weights)
    state = models.load(path, weights=weights).state_dict().items()
    parts = {name: ranks if name.removesuffix("_scale") in shared else 1 for name, _ in state}
    found = program.size(model, formats, shared, ranks).weights
    assert found == sum(tensor.nbytes / parts[name] for name, tensor in state)


def test_fewer_layers_are_those_of_load():
    path = f"{REPOSITORY}/examples/checkpoints/lookup"
    one, all_layers = program.of_checkpoint(path, 1), program.of_checkpoint(path, None)
    model = models.load(path, num_hidden_layers=1)
    assert one.parameters == sum(x.numel() for x in model.parameters()) < all_layers.parameters


@pytest.mark.slow
@pytest.mark.skipif(not NEWEST, reason="the pages have the figures of the newest transformers")
def test_the_pages_have_what_it_prints():
    lines = printed().stdout.splitlines()
    of_models, of_machines = (
        [line for line in lines if line.startswith("|") and line.count("|") == bars]
        for bars in (7, 3)
    )
    assert len(of_models) == 10 and len(of_machines) > 8
    text = (REPOSITORY / "docs/checkpoints.md").read_text()
    assert all(line in text for line in of_models + of_machines)
    text = (REPOSITORY / "docs/zh/checkpoints.md").read_text()  # headings and "text" are translated
    assert all(line in text for line in of_models[1:] if "text" not in line)
    assert all(line in text for line in of_machines[1:])


@pytest.mark.slow
@pytest.mark.skipif(not NEWEST, reason="the pages have the figures of the newest transformers")
@pytest.mark.parametrize("ranks", ["4", "8"])
def test_the_pages_have_what_it_prints_of_ranks(ranks):
    head, _, *rows = (line for line in printed("--ranks", ranks).stdout.splitlines() if "|" in line)
    text = (REPOSITORY / "docs/many_machines.md").read_text()
    assert len(rows) == 8 and all(f"{row}\n" in text for row in [head, *rows])
    stored = next(row for row in rows if "V4-Flash" in row).split(" | ")[4]
    if ranks == "4":
        assert float(stored) < 0.3 * 156  # of docs/checkpoints.md


@pytest.mark.slow
@pytest.mark.skipif(not NEWEST, reason="the pages have the figures of the newest transformers")
def test_the_page_has_the_speed_that_it_estimates():
    rows = [line for line in printed("--speed").stdout.splitlines() if "|" in line][2:]
    text = (REPOSITORY / "docs/comparison.md").read_text()
    shown = [row for row in rows if row[2:].startswith(("DeepSeek", "GLM-5,"))]
    assert len(shown) == 6 and all(f"{row}\n" in text for row in shown)


@pytest.mark.slow
def test_bad_input_is_named():
    assert "--layers needs a checkpoint" in printed("--layers", "2", status=2).stderr
    done = printed("tests", status=1)
    assert done.stderr.startswith("model_memory.py: ") and " tests" in done.stderr
    assert "Traceback" not in done.stderr
    done = printed("examples/checkpoints/lookup", "--layers", "9", status=1)
    assert "--layers must be 1 to 2, got 9" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", pytest.param("gb2312", marks=pytest.mark.slow)])
def test_an_output_without_dashes_gets_others(encoding, monkeypatch, capsys):
    output = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "argv", ["model_memory.py", "examples/checkpoints/lookup"])
    monkeypatch.chdir(REPOSITORY)
    runpy.run_path("examples/model_memory.py", run_name="__main__")
    output.flush()
    row = "| examples/checkpoints/lookup | 0.0019 | 0.0038; 0.0037 | - |"
    assert row in output.buffer.getvalue().decode(encoding)
    assert capsys.readouterr().err == "1 of 1: examples/checkpoints/lookup\n"
