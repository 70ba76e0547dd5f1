"""examples/convert_checkpoint.py: the same weights in bfloat16, whole or not there."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from conversion_harness import (  # noqa: F401
    alone,
    assert_checksums_hold,
    assert_gives_up,
    assert_same_tensors,
    convert_in_this_process,
    tensors_of,
)
from loading_harness import INDEX, LOADED_KINDS
from published import published, save_sparse, true_weights, write_published
from repository import REPOSITORY
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import representatives, tiny_config, token_ids
from transformers import AutoModelForCausalLM

from custom_pypto import models
from custom_pypto.files import PARTIAL

SHARDS = ["--max-shard-size", "30KB"]
SMALL = {"tokenizer.json": "{}", "generation_config.json": '{"temperature": 0.6}', "LICENSE": "MIT"}


@pytest.fixture(scope="module", params=representatives(LOADED_KINDS))
def source(request, tmp_path_factory):
    path = published(tmp_path_factory.mktemp(request.param), request.param)
    for name, text in SMALL.items():
        (path / name).write_text(text)
    return path


def assert_same_model(path, other, **asked):
    assert_same_tensors(models.load(path).state_dict(), models.load(other, **asked).state_dict())


def test_a_converted_checkpoint_loads_as_its_source_does(source, convert, tmp_path):
    assert "kept" in convert(source, tmp_path / "bf16", "--max-shard-size", "300KB")
    convert(source, tmp_path / "whole")
    assert [file.name for file in (tmp_path / "whole").glob("model*")] == ["model.safetensors"]
    for path in (tmp_path / "bf16", tmp_path / "whole"):
        assert_same_model(path, source)
        assert_checksums_hold(path)


# by the names that transformers ignores in its models, and those of a tower that reads images
DRAFTS = ["model.mtp_layers.0.enorm.weight", "mtp_dspark.0.hnorm.weight", "mtp.0.norm.weight"]
BEYOND = ["model.language_model.layers.1.norm.weight", "language_model.model.layers.9.norm.weight"]
OF_A_TOWER = ["model.vision_tower.transformer.layers.5.norm.weight", "mtp_note"]


def test_first_layers_are_without_drafts_and_with_the_tower(source, convert, tmp_path):
    path = tmp_path / "source"
    shutil.copytree(source, path)
    more = {name: torch.ones(2) for name in DRAFTS + BEYOND + OF_A_TOWER}
    save_file(more, path / "more.safetensors", metadata={"format": "pt"})
    index = json.loads((path / INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(more, "more.safetensors")
    (path / INDEX).write_text(json.dumps(index))
    convert(path, tmp_path / "part", "--layers", 1)
    assert more.keys() & tensors_of(tmp_path / "part").keys() == set(OF_A_TOWER)


def test_everything_is_converted_and_nothing_else_changes(source, convert, tmp_path):
    convert(source, tmp_path, "--max-shard-size", "300KB")
    stored, want = tensors_of(tmp_path), true_weights(source, torch.bfloat16)
    for name, tensor in tensors_of(source).items():
        if name.endswith(("_scale_inv", ".scale")):
            del want[name]
        elif tensor.dtype not in (torch.float8_e4m3fn, torch.int8):
            want[name] = tensor
    assert any(name.startswith(("model.layers.3.", "mtp.0.")) for name in want)
    assert_same_tensors(stored, want)

    old, new = (json.loads((path / "config.json").read_text()) for path in (source, tmp_path))
    quantization = {"quantization_config", "expert_dtype"}
    assert new == {name: value for name, value in old.items() if name not in quantization}
    for name, text in SMALL.items():
        assert (tmp_path / name).read_text() == text

    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored.values())
    files = {file.name for file in tmp_path.glob("*.safetensors")}
    assert len(files) > 5 and set(index["weight_map"].values()) == files
    for file in files:
        with safe_open(tmp_path / file, framework="pt") as tensors:
            assert all(index["weight_map"].pop(name) == file for name in tensors.keys())
        assert (tmp_path / file).stat().st_size < 310_000
    assert not index["weight_map"]


def test_transformers_finds_the_weights_of_a_source_that_names_their_file(convert, tmp_path):
    source = REPOSITORY / "examples/checkpoints/lookup"
    assert "transformers_weights" in json.loads((source / "config.json").read_text())
    convert(source, tmp_path, "--layers", 1)
    upstream = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_tensors(
        upstream.state_dict(), models.load(source, num_hidden_layers=1).state_dict()
    )


def test_the_first_layers_and_experts(source, convert, tmp_path):
    convert(source, tmp_path, "--layers", 2, "--experts", 4, "--max-shard-size", "200KB")
    model, whole = models.load(tmp_path), models.load(source, num_hidden_layers=2)
    assert len(model.model.layers) == model.config.num_hidden_layers == 2
    assert model.config.n_routed_experts == 4
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 0
    assert config.get("indexer_types", ["full", "shared"]) == ["full", "shared"]
    assert config.get("compress_ratios", [0, 4]) == [0, 4]
    for name, want in whole.state_dict().items():
        if "tid2eid" in name:
            want = want % 4
        elif ".experts." in name or ".mlp.gate." in name:
            assert len(want) == 8
            want = want[:4]
        assert torch.equal(model.state_dict()[name], want), name
    assert model.generate(token_ids(1, 20), max_new_tokens=2).shape == (1, 22)
    assert_checksums_hold(tmp_path)


def test_the_first_experts_of_a_router_without_groups(convert, tmp_path):
    source = published(tmp_path / "fp8", "axk2", n_group=None, topk_group=None)
    assert "must be one of 2, 3, 4, ..., 8" in convert(source, tmp_path / "one", "--experts", 1)
    convert(source, tmp_path / "bf16", "--experts", 3)
    model = models.load(tmp_path / "bf16")
    assert model.config.n_routed_experts == 3
    assert model.generate(token_ids(1, 20), max_new_tokens=2).shape == (1, 22)


def test_the_first_layers_need_their_shards_only(convert, tmp_path):
    source = published(tmp_path / "fp8")
    for shard in (4, 6):  # of layer 2 and of multi-token prediction
        (source / f"model-{shard:05d}-of-00006.safetensors").unlink()
    convert(source, tmp_path / "bf16", "--layers", 2)
    assert_same_model(tmp_path / "bf16", source, num_hidden_layers=2)


def test_a_part_of_a_checkpoint_in_bfloat16(source, convert, tmp_path):
    convert(source, tmp_path / "bf16")
    convert(tmp_path / "bf16", tmp_path / "part", "--layers", 2)
    assert_same_model(tmp_path / "part", source, num_hidden_layers=2)


@pytest.mark.parametrize(
    "arguments, message",
    [
        # two groups, of which one is used, and two experts for each token
        (["--experts", 5], "--experts must be one of 4, 6, 8 .*, got 5"),
        (["--experts", 2], "--experts must be one of 4, 6, 8 .*, got 2"),
        (["--experts", 10], "--experts must be one of 4, 6, 8 .*, got 10"),
        (["--layers", 4], "--layers must be 1 to 3 .config.json., got 4"),
        (["--layers", 0], "--layers must be 1 to 3 .config.json., got 0"),
    ],
)
def test_a_part_that_is_none_is_rejected(arguments, message, convert, tmp_path):
    source = published(tmp_path / "fp8")
    assert_gives_up(convert(source, tmp_path / "part", *arguments), f".*{message}")
    assert not (tmp_path / "part").exists()


def contents(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_another_checkpoint_is_not_written_over(source, convert, tmp_path):
    other = published(tmp_path / "other")
    for target in (other, source):
        before = contents(target)
        message = f"{target} must be empty .* for the same files, got "
        assert_gives_up(convert(source, target), message)
        assert contents(target) == before


def test_what_other_options_wrote_is_not_written_over(source, convert, tmp_path):
    convert(source, tmp_path, "--layers", 1)
    before = contents(tmp_path)
    for other in (["--layers", 2], ["--layers", 1, "--max-shard-size", "1MB"], []):
        said = convert(source, tmp_path, *other)
        assert_gives_up(said, ".* must be empty or hold the output of the same command")
    assert contents(tmp_path) == before


def test_what_does_not_fit_on_the_disk_is_not_begun(convert, tmp_path):
    with torch.device("meta"):  # 4 TB, of which the disk holds the headers
        config = tiny_config(vocab_size=10**10)
        write_published(tmp_path / "fp8", config, save=save_sparse)
    said = convert(tmp_path / "fp8", tmp_path / "bf16")
    assert_gives_up(said, r".* needs 3\.84TB of free disk space, has ")
    assert list((tmp_path / "bf16").glob("*.safetensors")) == []


def test_a_damaged_source_is_rejected_before_anything_is_written(convert, tmp_path):
    source = published(tmp_path / "fp8")
    shard = source / "model-00003-of-00006.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    said = convert(source, tmp_path / "bf16")
    assert_gives_up(said, f"load: {shard} .* is not a complete safetensors file")
    assert not (tmp_path / "bf16").exists()


@pytest.mark.parametrize("options", [[], ["--weights", "int8"]], ids=["bf16", "int8"])
def test_a_folder_is_written_by_one_run_at_a_time(options, convert, tmp_path):
    source, target = published(tmp_path / "fp8"), tmp_path / "target"
    with alone(target):
        said = convert(source, target, *options)
        assert_gives_up(said, f"TARGET must be written by one run at a time, .* {target}; wait")
        assert list(target.iterdir()) == [target / ".conversion.lock"]
    # of a run that was killed before all else
    (target / f"conversion.json{PARTIAL}0123456789abcdef").touch()
    assert "shards written" in convert(source, target, *options)
    (tmp_path / "usual").touch()
    modes = {file.name: file.stat().st_mode for file in target.iterdir()}
    assert set(modes.values()) == {(tmp_path / "usual").stat().st_mode}, modes
    assert_checksums_hold(target)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="bf16"),
        pytest.param(["--weights", "int8"], id="int8", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_goes_on_where_it_was(options, convert, tmp_path):
    source, target = published(tmp_path / "fp8", n_routed_experts=64), tmp_path / "target"
    weights, options = dict(zip(["weights"], options[1:], strict=False)), [*options, *SHARDS]
    process = subprocess.Popen(
        [sys.executable, "examples/convert_checkpoint.py", source, target, *options],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stderr=subprocess.DEVNULL,
    )
    sums = target / "SHA256SUMS"
    while not sums.is_file() or len(sums.read_text().splitlines()) < 5:
        assert process.poll() is None, "ended before it could be killed"
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (target / "config.json").exists()

    finished = [line.split("  ")[1] for line in sums.read_text().splitlines()]
    kept, (damaged, missing) = finished[:-2], finished[-2:]
    with (target / damaged).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    (target / missing).unlink()
    (target / f"{missing}{PARTIAL}0123456789abcdef").write_bytes(b"half of it")
    written = {name: (target / name).stat().st_mtime_ns for name in kept}

    said = convert(source, target, *options)
    shards = len(list(target.glob("*.safetensors")))
    assert f"{shards - len(kept)} shards written, {len(kept)} kept" in said
    assert {name: (target / name).stat().st_mtime_ns for name in kept} == written
    assert_same_model(target, source, **weights)
    assert_checksums_hold(target)

    assert f"0 shards written, {shards} kept" in convert(source, target, *options)
