"""Of a tensor that stands in several files of a checkpoint, the index decides which is loaded."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from loading_harness import (
    INDEX,
    assert_equal_to_the_bit,
    edit_json,
    logits,
    published_in_fp8,  # noqa: F401
    saved_checkpoint,  # noqa: F401
)
from published import published
from safetensors.torch import load_file, save_file

from custom_pypto import models

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "examples"))

import convert_checkpoint  # noqa: E402

SCALE = re.compile(r"(\.scale|_scale_inv)$")


def older(tensor):
    """Other values in the format of ``tensor``."""
    if tensor.dtype.itemsize > 1:
        return 2 * tensor + 1
    return (tensor.view(torch.uint8) ^ 1).view(tensor.dtype)


def with_copies(source, path):
    """A checkpoint each of whose files has an older copy of every tensor of the others."""
    shutil.copytree(source, path)
    shards = {file: load_file(file) for file in path.glob("*.safetensors")}
    assert len(shards) > 2
    for file in shards:
        others = {
            n: older(it) for other in shards if other != file for n, it in shards[other].items()
        }
        save_file(others | shards[file], file, {"format": "pt"})
    return path


def forget(path, forgotten):
    """Removes from the index the names for which ``forgotten(name)``."""
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    kept = {name: file for name, file in weight_map.items() if not forgotten(name)}
    edit_json(path / INDEX, weight_map=kept)
    return {name: weight_map[name] for name in weight_map.keys() - kept.keys()}


def copy_to_another_file(path, name, change=torch.clone, under=None):
    """Puts ``change(tensor)`` into a file that the index does not name for it.

    Returns:
        both files, that of the index first.
    """
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    file = weight_map[name]
    other = min(set(weight_map.values()) - {file})
    copy = change(load_file(path / file)[name])
    save_file(load_file(path / other) | {under or name: copy}, path / other, {"format": "pt"})
    return path / file, path / other


def test_the_tensors_that_the_index_names_are_loaded(checkpoint, tmp_path):
    source, want = checkpoint
    path = with_copies(source, tmp_path / "copies")
    # the same weights; models of this package differ from upstream's by rounding
    assert torch.equal(logits(models.load(path)), logits(models.load(source)))
    torch.testing.assert_close(logits(models.load(path)), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "unlisted"])
def test_scales_are_of_the_index_or_else_of_the_file_of_their_weight(
    listed, fp8_checkpoint, tmp_path
):
    path = with_copies(fp8_checkpoint, tmp_path / "copies")
    if not listed:
        assert forget(path, SCALE.search)
    model = models.load(path)
    state, want = model.state_dict(), models.load(fp8_checkpoint).state_dict()
    assert all(torch.equal(state[name], want[name]) for name in want)
    assert_equal_to_the_bit(model, fp8_checkpoint)


def test_scales_of_another_file_than_their_weight_do_not_count(fp8_checkpoint, tmp_path):
    path = shutil.copytree(fp8_checkpoint, tmp_path / "copies")
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    scale = next(name for name in weight_map if SCALE.search(name))
    file, _ = copy_to_another_file(path, scale)
    forget(path, scale.__eq__)
    tensors = load_file(file)
    del tensors[scale]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=f"{file}: .* lacks its .*{re.escape(scale)}"):
        models.load(path)


def test_two_copies_that_the_index_does_not_name_are_rejected(checkpoint, tmp_path):
    path = shutil.copytree(checkpoint[0], tmp_path / "copies")
    [name] = (n for n in json.loads((path / INDEX).read_text())["weight_map"] if "embed" in n)
    both = copy_to_another_file(path, name)
    models.load(path)  # the index names it
    forget(path, name.__eq__)
    first, second = map(re.escape, sorted(map(str, both)))
    message = f"load: {name} must be in one file, or listed in .*, got it in {first} and {second}; "
    with pytest.raises(ValueError, match=message):
        models.load(path)


def test_one_tensor_under_two_names_is_rejected(checkpoint, tmp_path):
    path = shutil.copytree(checkpoint[0], tmp_path / "copies")
    name = "model.norm.weight"
    names = json.loads((path / INDEX).read_text())["weight_map"]
    on_disk, other = (name, "norm.weight") if name in names else ("norm.weight", name)
    file, second = copy_to_another_file(path, on_disk, older, under=other)
    message = f"load: {name} must be in the checkpoint once, got .*norm.weight in .*; keep the one"
    with pytest.raises(ValueError, match=message) as raised:
        models.load(path)
    assert str(file) in str(raised.value) and str(second) in str(raised.value)


def test_conversion_takes_the_same_tensors(fp8_checkpoint, tmp_path, monkeypatch):
    path = with_copies(fp8_checkpoint, tmp_path / "copies")
    forget(path, SCALE.search)
    for options in ([], ["--weights", "int8"]):
        found = []
        for source in (path, fp8_checkpoint):
            target = tmp_path / f"{source.name} {len(options)}"
            monkeypatch.setattr(sys, "argv", ["", str(source), str(target), *options])
            convert_checkpoint.main()
            files = target.glob("*.safetensors")
            found.append({n: it for file in files for n, it in load_file(file).items()})
        copies, want = found
        assert copies.keys() == want.keys()
        assert all(torch.equal(copies[name], want[name]) for name in want)


def test_conversion_rejects_two_copies(tmp_path, monkeypatch):
    path = published(tmp_path / "fp8")
    name = "model.layers.1.input_layernorm.weight"
    first, second = copy_to_another_file(path, name)
    forget(path, name.__eq__)
    monkeypatch.setattr(sys, "argv", ["", str(path), str(tmp_path / "bf16")])
    with pytest.raises(SystemExit, match=f"{name} must be in one file") as raised:
        convert_checkpoint.main()
    assert str(first) in str(raised.value) and str(second) in str(raised.value)
    assert not (tmp_path / "bf16").exists()
