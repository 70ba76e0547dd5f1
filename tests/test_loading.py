"""Checkpoints load whole or not at all, and the error names the file."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import KINDS, tiny_model, token_ids
from transformers import AutoModelForCausalLM, LlamaConfig

import models

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request, tmp_path_factory):
    """A sharded checkpoint and the logits of the model it was saved from."""
    path, model = tmp_path_factory.mktemp(request.param), tiny_model(request.param)
    model.save_pretrained(path, max_shard_size="300KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path, logits(model)


@torch.no_grad()
def logits(model):
    return model(token_ids(1, 7), use_cache=False).logits  # 7 tokens: nothing to select


def test_a_sharded_checkpoint_loads_swapped(checkpoint):
    path, want = checkpoint
    model = models.load(path)
    assert model.dtype == torch.float32 and not model.training
    assert "Paged" in type(model.model.layers[0].self_attn).__name__
    torch.testing.assert_close(logits(model), want, rtol=0, atol=5e-5)


def test_from_pretrained_before_the_swap_gives_the_same(checkpoint):
    path, want = checkpoint
    model = models.use_custom_pypto(AutoModelForCausalLM.from_pretrained(path))
    torch.testing.assert_close(logits(model), want, rtol=0, atol=5e-5)


def test_weights_can_be_loaded_into_a_swapped_model(checkpoint):
    path, want = checkpoint
    config = AutoModelForCausalLM.from_pretrained(path).config
    model = models.use_custom_pypto(AutoModelForCausalLM.from_config(config).eval())
    model.load_state_dict(AutoModelForCausalLM.from_pretrained(path).state_dict())
    torch.testing.assert_close(logits(model), want, rtol=0, atol=5e-5)


def test_a_swapped_model_saved_in_shards_loads_again(checkpoint, tmp_path):
    path, want = checkpoint
    models.load(path).save_pretrained(tmp_path, max_shard_size="300KB")
    for file in path.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name
    torch.testing.assert_close(logits(models.load(tmp_path)), want, rtol=0, atol=5e-5)


def test_an_unsharded_checkpoint_loads_in_the_dtype_asked_for(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    assert models.load(tmp_path, dtype=torch.bfloat16, device="cpu").dtype == torch.bfloat16


# ---- damage ---------------------------------------------------------------------------------
# each takes the directory and the name of one of its shards, and returns what the error must say


def truncated(path, shard):
    size = os.path.getsize(path / shard)
    os.truncate(path / shard, size - 1000)
    return ValueError, f"{shard} must have {size} bytes according to its header, got {size - 1000}"


def truncated_in_its_header(path, shard):
    os.truncate(path / shard, 60)
    return ValueError, rf"{shard} must have at least \d+ bytes according to its header, got 60"


def truncated_in_its_first_bytes(path, shard):
    os.truncate(path / shard, 5)
    return ValueError, rf"{shard} must have at least \d+ bytes according to its header, got 5"


def garbled_in_its_header(path, shard):
    with (path / shard).open("r+b") as file:
        file.seek(8)
        file.write(b"garbage")
    return ValueError, f"{shard} has no readable safetensors header"


def empty(path, shard):
    os.truncate(path / shard, 0)
    return ValueError, rf"{shard} \(0 bytes\) is not a safetensors file"


def too_long(path, shard):
    with (path / shard).open("ab") as file:
        file.write(b"more")
    return ValueError, f"{shard} must have .* bytes according to its header, got"


def git_lfs_pointer(path, shard):
    (path / shard).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    return ValueError, f"{shard} .* is not a safetensors file"


def missing(path, shard):
    (path / shard).unlink()
    return FileNotFoundError, f"{shard} is missing"


def of_another_checkpoint(path, shard):
    other = sorted(path.glob("*.safetensors"))[0]
    shutil.copy(other, path / shard)
    return ValueError, f"{shard} must hold .* according to {INDEX}, but does not"


def change(path, shard, edit, name=None):
    tensors = load_file(path / shard)
    name = name or sorted(tensors)[0]
    edit(tensors, name)
    save_file(tensors, path / shard, metadata={"format": "pt"})
    return name


def without_a_tensor(path, shard):
    name = change(path, shard, lambda tensors, name: tensors.pop(name))
    return ValueError, f"{shard} must hold {name} according to {INDEX}"


def shorten(tensors, name):
    tensors[name] = tensors[name][:-1].clone()


def with_a_tensor_of_another_shape(path, shard):
    name = change(path, shard, shorten)
    return ValueError, rf"{shard}: {name} must be \[\d+.*\] according to config.json, got \["


def with_an_expert_of_another_shape(path, shard):
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    name, shard = next(item for item in weight_map.items() if "experts.3.up_proj" in item[0])
    change(path, shard, shorten, name)
    return (
        ValueError,
        rf"{shard}: {name} must be \[32, 96\] according to config.json, got \[31, 96\]",
    )


def unlisted_tensor(path, shard):
    index = json.loads((path / INDEX).read_text())
    name = change(path, shard, lambda tensors, name: tensors.pop(name))
    del index["weight_map"][name]
    (path / INDEX).write_text(json.dumps(index))
    return ValueError, f"{INDEX} must list {name}, but does not"


def broken_index(path, shard):
    (path / INDEX).write_text('{"weight_map": {')
    return ValueError, f"{INDEX} is not a safetensors index"


def no_index(path, shard):
    (path / INDEX).unlink()
    return FileNotFoundError, r"model\.safetensors is missing"


def no_config(path, shard):
    (path / "config.json").unlink()
    return FileNotFoundError, "must be a checkpoint directory with a config.json"


def config_of_another_size(path, shard):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"kv_lora_rank": 80}))
    return ValueError, r"kv_a_layernorm.weight must be \[80\] according to config.json, got \[64\]"


def config_of_another_model(path, shard):
    LlamaConfig(hidden_size=16, num_attention_heads=2, vocab_size=8).save_pretrained(path)
    return TypeError, "model must be a DeepseekV32ForCausalLM .*got .*LlamaForCausalLM"


@pytest.mark.parametrize(
    "damage",
    [
        truncated,
        truncated_in_its_header,
        truncated_in_its_first_bytes,
        garbled_in_its_header,
        empty,
        too_long,
        git_lfs_pointer,
        missing,
        of_another_checkpoint,
        without_a_tensor,
        with_a_tensor_of_another_shape,
        with_an_expert_of_another_shape,
        unlisted_tensor,
        broken_index,
        no_index,
        no_config,
        config_of_another_size,
        config_of_another_model,
    ],
)
def test_a_damaged_checkpoint_is_refused_and_the_file_named(damage, checkpoint, tmp_path):
    path = tmp_path / "checkpoint"
    shutil.copytree(checkpoint[0], path)
    error, message = damage(path, sorted(path.glob("*.safetensors"))[1].name)
    with pytest.raises(error, match=message):
        models.load(path)


def test_extra_tensors_are_none_of_our_business(checkpoint, tmp_path):
    # published checkpoints carry the draft layers for multi-token prediction
    path = tmp_path / "checkpoint"
    shutil.copytree(checkpoint[0], path)
    index = json.loads((path / INDEX).read_text())
    index["weight_map"]["model.layers.61.eh_proj.weight"] = "extra.safetensors"
    save_file(
        {"model.layers.61.eh_proj.weight": torch.zeros(2)},
        path / "extra.safetensors",
        metadata={"format": "pt"},
    )
    (path / INDEX).write_text(json.dumps(index))
    torch.testing.assert_close(logits(models.load(path)), checkpoint[1], rtol=0, atol=5e-5)
