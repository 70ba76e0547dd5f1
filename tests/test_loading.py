"""Checkpoints load whole, patched, and in the dtype asked for."""

import json
import re
import shutil

import pytest
import torch
from loading_harness import (
    INDEX,
    LOADED_KINDS,
    edit_json,
    logits,
    saved_checkpoint,  # noqa: F401
)
from model_harness import assert_close
from published import weights_on_disk
from safetensors.torch import load_file, save_file
from tiny import tiny_model
from transformers import AutoModelForCausalLM

from custom_pypto import models


def test_a_sharded_checkpoint_loads_patched(checkpoint):
    path, want = checkpoint
    model = models.load(path)
    assert model.dtype == torch.float32 and not model.training
    assert "Paged" in type(model.model.layers[0].self_attn).__name__
    assert_close(logits(model), want)


def test_from_pretrained_before_the_patch_gives_the_same(checkpoint):
    path, want = checkpoint
    model = models.use_custom_pypto(AutoModelForCausalLM.from_pretrained(path))
    assert_close(logits(model), want)


def test_weights_can_be_loaded_into_a_patched_model(checkpoint):
    path, want = checkpoint
    config = AutoModelForCausalLM.from_pretrained(path).config
    model = models.use_custom_pypto(AutoModelForCausalLM.from_config(config).eval())
    model.load_state_dict(AutoModelForCausalLM.from_pretrained(path).state_dict())
    assert_close(logits(model), want)


def test_a_patched_model_saved_in_shards_loads_again(checkpoint, tmp_path):
    path, want = checkpoint
    models.load(path).save_pretrained(tmp_path, max_shard_size="300KB")
    for file in path.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name
    assert_close(logits(models.load(tmp_path)), want)


def test_an_unsharded_checkpoint_loads_in_the_dtype_asked_for(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    assert models.load(tmp_path, dtype=torch.bfloat16, device="cpu").dtype == torch.bfloat16


@pytest.mark.parametrize("kind", LOADED_KINDS)
def test_a_checkpoint_with_the_names_of_the_model_loads(kind, tmp_path):
    # as transformers writes one whose state dict it was given
    model = tiny_model(kind)
    model.config.save_pretrained(tmp_path)
    save_file(model.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = models.load(tmp_path, dtype=torch.float32).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded[name], tensor), name


def test_extra_tensors_are_none_of_our_business(checkpoint, tmp_path):
    # published checkpoints carry the draft layers for multi-token prediction
    path = tmp_path / "checkpoint"
    shutil.copytree(checkpoint[0], path)
    name, file = "model.layers.61.eh_proj.weight", "extra.safetensors"
    save_file({name: torch.zeros(2)}, path / file, metadata={"format": "pt"})
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    edit_json(path / INDEX, weight_map=weight_map | {name: file})
    assert_close(logits(models.load(path)), checkpoint[1])


def test_other_names_that_transformers_reads_are_read(tmp_path):
    # the way back from model to checkpoint gives other names than these
    model = tiny_model("hy_v4")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    names = {".hc_pre.hc_": ".hc_", "layer.hc_": "layer.hc_pre.hc_"}
    names |= {f"{mlp}.linear_gate": f"{mlp}.gate_proj" for mlp in ("mlp", "shared_experts")}
    tensors, changed = load_file(file), {}
    for name, tensor in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        changed[name] = tensor
    assert len(changed.keys() - tensors.keys()) > 12 and len(changed) == len(tensors)
    save_file(changed, file, metadata={"format": "pt"})
    found = models.load(tmp_path).state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in model.state_dict().items())


def test_the_first_layers_of_a_checkpoint_in_one_dtype(checkpoint):
    whole = weights_on_disk(models.load(checkpoint[0]))
    first = weights_on_disk(models.load(checkpoint[0], num_hidden_layers=2))
    assert first.keys() == {name for name in whole if not re.search(r"layers\.[23]\.", name)}
    assert all(torch.equal(tensor, whole[name]) for name, tensor in first.items())
