"""Checkpoints load whole or not at all, and the error names the file; those in fp8 to the bit."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
import transformers
from published import (
    FLOAT32,
    V4,
    kind_of,
    published,
    save_sparse,
    shards_of,
    stored_v4,
    true_weights,
    weights_on_disk,
    write_published,
)
from safetensors.torch import load_file, save_file
from tiny import KINDS, YARN, tiny_config, tiny_model, tiny_v4, token_ids
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    DeepseekV32Config,
    LlamaConfig,
)
from transformers.integrations import finegrained_fp8

from custom_pypto import models
from custom_pypto.models.architectures import ARCHITECTURES, Architecture

INDEX = "model.safetensors.index.json"
EXPERT_UP = r"experts\.(3\.(up_proj|w3)|gate_up_proj)"


def tiny(kind):
    return tiny_v4() if kind == V4 else tiny_model(kind)


@pytest.fixture(scope="module", params=[*KINDS, V4])
def checkpoint(request, tmp_path_factory):
    """A sharded checkpoint and the logits of the model it was saved from."""
    path, model = tmp_path_factory.mktemp(request.param), tiny(request.param)
    model.save_pretrained(path, max_shard_size="300KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path, logits(model)


@torch.no_grad()
def logits(model):
    return model(token_ids(1, 7), use_cache=False).logits  # 7 tokens: nothing to select


def test_a_sharded_checkpoint_loads_patched(checkpoint):
    path, want = checkpoint
    model = models.load(path)
    assert model.dtype == torch.float32 and not model.training
    assert "Paged" in type(model.model.layers[0].self_attn).__name__
    torch.testing.assert_close(logits(model), want, rtol=0, atol=5e-5)


def test_from_pretrained_before_the_patch_gives_the_same(checkpoint):
    path, want = checkpoint
    model = models.use_custom_pypto(AutoModelForCausalLM.from_pretrained(path))
    torch.testing.assert_close(logits(model), want, rtol=0, atol=5e-5)


def test_weights_can_be_loaded_into_a_patched_model(checkpoint):
    path, want = checkpoint
    config = AutoModelForCausalLM.from_pretrained(path).config
    model = models.use_custom_pypto(AutoModelForCausalLM.from_config(config).eval())
    model.load_state_dict(AutoModelForCausalLM.from_pretrained(path).state_dict())
    torch.testing.assert_close(logits(model), want, rtol=0, atol=5e-5)


def test_a_patched_model_saved_in_shards_loads_again(checkpoint, tmp_path):
    path, want = checkpoint
    models.load(path).save_pretrained(tmp_path, max_shard_size="300KB")
    for file in path.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name
    torch.testing.assert_close(logits(models.load(tmp_path)), want, rtol=0, atol=5e-5)


def test_an_unsharded_checkpoint_loads_in_the_dtype_asked_for(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    assert models.load(tmp_path, dtype=torch.bfloat16, device="cpu").dtype == torch.bfloat16


@pytest.mark.parametrize("kind", [*KINDS, V4])
def test_a_checkpoint_with_the_names_of_the_model_loads(kind, tmp_path):
    # as transformers writes one whose state dict it was given
    model = tiny(kind)
    model.config.save_pretrained(tmp_path)
    save_file(model.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = models.load(tmp_path, dtype=torch.float32).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded[name], tensor), name


# ---- damage ---------------------------------------------------------------------------------
# each takes the directory and the name of one of its shards, and returns what the error must say


def whole(shard, size, why):
    damaged = rf"{shard} \({size} bytes\) is not a complete safetensors file"
    return f"{damaged}: .*{why}.*; download it again"


def truncated(path, shard):
    size = os.path.getsize(path / shard)
    os.truncate(path / shard, size - 1000)
    return ValueError, whole(shard, size - 1000, "incomplete metadata, file not fully covered")


def truncated_in_its_header(path, shard):
    os.truncate(path / shard, 60)
    return ValueError, whole(shard, 60, "invalid header length")


def truncated_in_its_first_bytes(path, shard):
    os.truncate(path / shard, 5)
    return ValueError, whole(shard, 5, "header too small")


def garbled_in_its_header(path, shard):
    with (path / shard).open("r+b") as file:
        file.seek(8)
        file.write(b"garbage")
    return ValueError, whole(shard, os.path.getsize(path / shard), "invalid JSON in header")


def empty(path, shard):
    os.truncate(path / shard, 0)
    return ValueError, whole(shard, 0, "header too small")


def too_long(path, shard):
    with (path / shard).open("ab") as file:
        file.write(b"more")
    return ValueError, whole(shard, os.path.getsize(path / shard), "incomplete metadata")


def git_lfs_pointer(path, shard):
    (path / shard).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    return ValueError, whole(shard, os.path.getsize(path / shard), "header too large")


def missing(path, shard):
    (path / shard).unlink()
    return FileNotFoundError, f"{shard} is missing"


def of_another_checkpoint(path, shard):
    other = sorted(path.glob("*.safetensors"))[0]
    shutil.copy(other, path / shard)
    return ValueError, f"{shard} lacks .*, listed in {INDEX}; is the file from another checkpoint"


def change(path, shard, edit, name=None):
    tensors = load_file(path / shard)
    name = name or sorted(tensors)[0]
    edit(tensors, name)
    save_file(tensors, path / shard, metadata={"format": "pt"})
    return name


def without_a_tensor(path, shard):
    name = change(path, shard, lambda tensors, name: tensors.pop(name))
    return ValueError, f"{shard} lacks {name}, listed in {INDEX}"


def shorten(tensors, name):
    tensors[name] = tensors[name][:-1].clone()


def with_a_tensor_of_another_shape(path, shard):
    name = change(path, shard, shorten)
    return ValueError, rf"{shard}: {name} must be of shape \[\d+.*\] \(config.json\), got \["


def with_an_expert_of_another_shape(path, shard):
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    name, shard = next(item for item in weight_map.items() if re.search(EXPERT_UP, item[0]))
    rows, *columns = load_file(path / shard)[name].shape
    change(path, shard, shorten, name)
    want, got = (re.escape(str([size, *columns])) for size in (rows, rows - 1))
    return ValueError, rf"{shard}: {name} must be of shape {want} \(config.json\), got {got}"


def unlisted(path, pattern):
    """Removes the tensor from its file and from the index."""
    index = json.loads((path / INDEX).read_text())
    name, shard = next(it for it in index["weight_map"].items() if re.search(pattern, it[0]))
    change(path, shard, lambda tensors, name: tensors.pop(name), name)
    del index["weight_map"][name]
    (path / INDEX).write_text(json.dumps(index))
    return ValueError, f"{INDEX} lacks {name}; use the checkpoint's own config.json"


def unlisted_tensor(path, shard):
    return unlisted(path, "^model.norm.weight")


def unlisted_expert(path, shard):
    return unlisted(path, EXPERT_UP)


def broken_index(path, shard):
    (path / INDEX).write_text('{"weight_map": {')
    return ValueError, f"{INDEX} is not a safetensors index: .*; download it again"


def no_index(path, shard):
    (path / INDEX).unlink()
    return FileNotFoundError, r"model\.safetensors is missing"


def no_config(path, shard):
    (path / "config.json").unlink()
    return FileNotFoundError, f"path must be a checkpoint directory with a config.json, got {path}"


def config_of_another_size(path, shard):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    return ValueError, r"must be of shape \[300, \d+\] \(config.json\), got \[199, \d+\]"


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
        unlisted_expert,
        broken_index,
        no_index,
        no_config,
        config_of_another_size,
        config_of_another_model,
    ],
)
def test_a_damaged_checkpoint_is_rejected_and_the_file_named(damage, checkpoint, tmp_path):
    path = tmp_path / "checkpoint"
    shutil.copytree(checkpoint[0], path)
    error, message = damage(path, sorted(path.glob("*.safetensors"))[1].name)
    with pytest.raises(error, match=message):
        models.load(path)


def test_a_checkpoint_of_a_newer_transformers_names_the_version_that_has_it(tmp_path, monkeypatch):
    newer = Architecture("newer", "PagedNewerAttention", "9.99")
    monkeypatch.setitem(ARCHITECTURES, "NewerForCausalLM", newer)
    config = {"architectures": ["NewerForCausalLM"], "model_type": "newer"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = (
        f"load: NewerForCausalLM needs transformers 9.99, found {transformers.__version__}; "
        "pip install 'transformers==9.99.*'"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(expected)}$"):
        models.load(tmp_path)


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


# ---- published checkpoints, in fp8 and fp4 -----------------------------------------------------


@pytest.fixture(scope="module", params=[*KINDS, V4])
def fp8_checkpoint(request, tmp_path_factory):
    return published(tmp_path_factory.mktemp(request.param), request.param)


# what upstream keeps in float32; of a model in float16, some weights more
KEPT = FLOAT32 | {V4: f"{FLOAT32[V4]}|norm"}
FROM_FLOAT16 = r"compressor\.(wkv|wgate)|weights_proj"


def assert_equal_to_the_bit(model, path, dtype=torch.bfloat16):
    true, found = true_weights(path, torch.float32), weights_on_disk(model)
    pattern = KEPT[kind_of(model.config)]
    if dtype == torch.float16:
        pattern += f"|{FROM_FLOAT16}"
    kept = {name for name in found if re.search(pattern, name)}
    assert kept and all(found[name].dtype == torch.float32 for name in kept)
    for name, tensor in found.items():
        want = true[name]
        if want.is_floating_point() and name not in kept:
            want = want.to(dtype)
        assert tensor.dtype == want.dtype and torch.equal(tensor, want), name


@pytest.fixture(scope="module")
def fp4_checkpoint(tmp_path_factory):
    return published(tmp_path_factory.mktemp(V4), V4)


@pytest.mark.parametrize("kv_lora_rank", [128, 192, 512])
@pytest.mark.parametrize("kind", KINDS)
def test_fp8_is_dequantised_to_the_bit(kind, kv_lora_rank, tmp_path):
    # with rope 192 rows in 2 blocks, which 5.23 would take for 96 high; 256; and 576 in 5
    path = published(tmp_path / "checkpoint", kind, kv_lora_rank)
    model = models.load(path)
    assert_equal_to_the_bit(model, path)
    for layer in model.model.layers:
        assert "Paged" in type(layer.self_attn).__name__
        assert type(layer.self_attn.kv_b_proj) is nn.Linear


@pytest.mark.parametrize("experts", ["fp4", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_deepseek_v4_is_dequantised_to_the_bit(dtype, experts, tmp_path):
    # 160 and 48 columns: 5 scales of fp4, and 2 of which the last is of 16 values
    path = published(tmp_path / "checkpoint", V4, experts=experts)
    assert_equal_to_the_bit(models.load(path, dtype=dtype), path, dtype)


@torch.no_grad()
def test_deepseek_v4_computes_what_upstream_does_with_its_weights(fp4_checkpoint):
    model = models.load(fp4_checkpoint, dtype=torch.float32)
    upstream = DeepseekV4ForCausalLM(model.config).eval()
    want = true_weights(fp4_checkpoint, torch.float32)
    for name, weight in weights_on_disk(upstream).items():
        weight.copy_(want[name])
    ids = token_ids(1, 140)  # a row of 128 tokens, and more rows of 4 than are selected
    got, logits = (it(ids, use_cache=False).logits for it in (model, upstream))
    torch.testing.assert_close(got, logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("experts", ["fp4", "fp8"])
def test_deepseek_v4_has_the_weights_that_upstream_loads(experts, tmp_path):
    # whole blocks, which upstream needs; it keeps unquantised tensors in their dtype on disk
    sizes = dict(hidden_size=256, moe_intermediate_size=128, q_lora_rank=128, o_lora_rank=64)
    sizes |= dict(head_dim=128, partial_rotary_factor=0.125, index_head_dim=128)
    path = published(tmp_path / "checkpoint", V4, experts=experts, **sizes)
    upstream = AutoModelForCausalLM.from_pretrained(path).state_dict()
    for name, tensor in models.load(path).state_dict().items():
        assert torch.equal(tensor, upstream[name].to(tensor.dtype)), name


def test_a_dequantised_model_is_as_if_it_had_never_been_in_fp8(fp8_checkpoint, tmp_path):
    model = models.load(fp8_checkpoint)
    assert model.dtype == model.config.dtype == torch.bfloat16 and not model.training
    assert {it.dtype for it in model.model.rotary_emb.buffers()} == {torch.float32}
    model.save_pretrained(tmp_path, max_shard_size="500KB")
    config = json.loads((tmp_path / "config.json").read_text())
    assert not config.keys() & {"quantization_config", "expert_dtype"}
    assert_equal_to_the_bit(models.load(tmp_path), fp8_checkpoint)
    upstream = AutoModelForCausalLM.from_pretrained(tmp_path)  # with this one's experts, too
    assert torch.equal(logits(upstream), logits(models.use_transformers(model)))


def test_fp8_in_float32_is_not_rounded_and_computes_as_upstream_does(fp8_checkpoint):
    model = models.load(fp8_checkpoint, dtype=torch.float32)
    assert_equal_to_the_bit(model, fp8_checkpoint, torch.float32)
    patched = logits(model)
    torch.testing.assert_close(patched, logits(models.use_transformers(model)), rtol=0, atol=5e-5)
    if model.config.model_type == "deepseek_v32":
        frequencies = {"rope_theta": YARN["rope_theta"], "factor": YARN["factor"]}
        assert model.config.rope_parameters.items() >= frequencies.items()


def test_auto_is_the_dtype_of_what_is_not_quantised(fp8_checkpoint, tmp_path):
    path = shutil.copytree(fp8_checkpoint, tmp_path / "checkpoint")
    config = json.loads((path / "config.json").read_text())
    del config["torch_dtype"]
    (path / "config.json").write_text(json.dumps(config))
    assert models.load(path).dtype == torch.bfloat16


def test_loading_leaves_transformers_as_it_was(fp8_checkpoint):
    def classes():
        return {
            name: dict(vars(it))
            for name, it in vars(finegrained_fp8).items()
            if isinstance(it, type)
        }

    before = classes()
    models.load(fp8_checkpoint)
    assert "Fp8Dequantize" in before and classes() == before


@pytest.fixture
def warnings_of_transformers(caplog):
    logger = logging.getLogger("transformers")  # does not propagate
    logger.addHandler(caplog.handler)
    yield caplog.records
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_first_layers_need_their_shards_only(
    layers, fp8_checkpoint, tmp_path, warnings_of_transformers
):
    path = shutil.copytree(fp8_checkpoint, tmp_path / "checkpoint")
    # embedding, layers 0 to 2, head, multi-token prediction
    for shard in [*range(2 + layers, 5), 6]:
        (path / f"model-{shard:05d}-of-00006.safetensors").unlink()
    model = models.load(path, num_hidden_layers=layers)
    config = model.config
    assert len(model.model.layers) == config.num_hidden_layers == layers
    assert len(config.layer_types) == len(config.mlp_layer_types) == layers
    if hasattr(config, "indexer_types"):
        assert config.indexer_types == ["full", "shared", "full"][:layers]
    if layers > 1:  # the first one is dense
        assert_equal_to_the_bit(model, path)
    assert warnings_of_transformers == []
    assert model.generate(token_ids(1, 20), max_new_tokens=2).shape == (1, 22)


def test_the_first_layers_of_a_checkpoint_in_one_dtype(checkpoint):
    whole = weights_on_disk(models.load(checkpoint[0]))
    first = weights_on_disk(models.load(checkpoint[0], num_hidden_layers=2))
    assert first.keys() == {name for name in whole if not re.search(r"layers\.[23]\.", name)}
    assert all(torch.equal(tensor, whole[name]) for name, tensor in first.items())


@pytest.mark.parametrize("layers", [0, -1, 5])
def test_as_many_layers_as_there_are_not(layers, checkpoint):
    with pytest.raises(
        ValueError, match=f"num_hidden_layers must be 1 to [34] .config.json., got {layers}"
    ):
        models.load(checkpoint[0], num_hidden_layers=layers)


def test_the_settings_for_generation_are_the_checkpoints(fp8_checkpoint, tmp_path):
    path = shutil.copytree(fp8_checkpoint, tmp_path / "checkpoint")
    assert models.load(path).generation_config.bos_token_id == 1  # from config.json
    (path / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6}')
    assert models.load(path).generation_config.temperature == 0.6


def test_progress_is_shown(fp8_checkpoint, capsys):
    models.load(fp8_checkpoint)
    assert "Loading weights: 100%" in capsys.readouterr().err


# ---- damage to what is particular to fp8; as above

SHARD = "model-00004-of-00006.safetensors"
# a weight in it, its scales and their shape
WEIGHTS = dict.fromkeys(KINDS, ("model.layers.2.self_attn.kv_a_proj_with_mqa.weight", [5, 2]))
WEIGHTS[V4] = "layers.2.attn.wq_b.weight", [6, 2]


def quantised(path):
    """A weight in ``SHARD``, its scales, and their shape."""
    kind = json.loads((path / "config.json").read_text())["model_type"]
    name, grid = WEIGHTS[kind]
    return name, name.replace("weight", "scale") if kind == V4 else f"{name}_scale_inv", grid


def without_a_scale(path):
    _, scale, _ = quantised(path)
    change(path, SHARD, lambda tensors, name: tensors.pop(name), scale)
    return f"{SHARD} lacks {scale}, listed in {INDEX}"


def without_a_scale_in_the_index_either(path):
    without_a_scale(path)
    name, scale, _ = quantised(path)
    index = json.loads((path / INDEX).read_text())
    del index["weight_map"][scale]
    (path / INDEX).write_text(json.dumps(index))
    return rf"{SHARD}: {name} is F8_E4M3 and lacks its .*{scale}"


def with_scales_of_whole_blocks_only(path):
    _, scale, (rows, columns) = quantised(path)
    change(path, SHARD, shorten, scale)
    shape = rf"must be of shape \[{rows}, {columns}\] \(one scale per 128x128 block of "
    return rf"{SHARD}: {scale} {shape}.* got \[{rows - 1}, {columns}\]"


def with_scales_of_integers(path):
    _, scale, _ = quantised(path)
    change(path, SHARD, lambda tensors, name: tensors.update({name: tensors[name].long()}), scale)
    return rf"{SHARD}: {scale} must be .* and dtype F32, F16, BF16, F8_E8M0, got .* and I64"


def with_a_norm_in_fp8(path):
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    name = next(it for it in weight_map if re.fullmatch(r"(model\.)?norm\.weight", it))
    in_fp8 = partial(edited, edit=lambda norm: norm.to(torch.float8_e4m3fn))
    change(path, weight_map[name], in_fp8, name)
    return rf"{name} must be a matrix to be F8_E4M3, got shape \[160\]; use .* in bfloat16"


def without_quantization_config(path):
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    return r"is F8_E4M3, but config\.json lacks the quantization_config"


def quantised_otherwise(path):
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (path / "config.json").write_text(json.dumps(config))
    return r"quantization_config of config\.json must be fp8 .* got gptq"


def in_bytes(path):
    name, _, _ = quantised(path)
    change(path, SHARD, lambda tensors, name: tensors.update({name: tensors[name].byte()}), name)
    return f"{SHARD}: {name} must be of dtype F32, .* or F8_E4M3.*, got U8"


@pytest.mark.parametrize(
    "damage",
    [
        without_a_scale,
        without_a_scale_in_the_index_either,
        with_scales_of_whole_blocks_only,
        with_scales_of_integers,
        with_a_norm_in_fp8,
        without_quantization_config,
        quantised_otherwise,
        in_bytes,
    ],
)
def test_a_damaged_fp8_checkpoint_is_rejected(damage, fp8_checkpoint, tmp_path):
    path = shutil.copytree(fp8_checkpoint, tmp_path / "checkpoint")
    message = damage(path)
    with pytest.raises(ValueError, match=message):
        models.load(path)


def edited(tensors, name, edit):
    tensors[name] = edit(tensors[name]).clone()


W1, TABLE = "layers.1.ffn.experts.2.w1", "layers.0.ffn.gate.tid2eid"
OF_W1 = r"\[48, 5\] \(one scale per 1x32 block of \[48, 160\]\)"


@pytest.mark.parametrize(
    "name, edit, message",
    [
        pytest.param(
            f"{W1}.weight",
            lambda weight: weight[:, :-1],
            rf"{W1}.weight must be of shape \[48, 160\] .config.json., got \[48, 158\]",
            id="fp4-of-another-shape",
        ),
        pytest.param(
            f"{W1}.weight",
            lambda weight: weight.view(torch.uint8),
            f"{W1}.weight must be of dtype .* or F8_E4M3 or I8, got U8",
            id="fp4-in-another-dtype",
        ),
        pytest.param(
            f"{W1}.scale",
            lambda scales: scales[:, :-1],
            rf"{W1}.scale must be of shape {OF_W1} and dtype .*, got \[48, 4\]",
            id="fp4-without-the-last-scales",
        ),
        pytest.param(
            TABLE,
            lambda table: table.float(),
            f"{TABLE} must be of integers, as in the model, got F32",
            id="table-of-floats",
        ),
        pytest.param(
            TABLE,
            lambda table: table[:, :1],
            rf"{TABLE} must be of shape \[199, 2\] .config.json., got \[199, 1\]",
            id="table-of-another-shape",
        ),
        pytest.param(
            "layers.1.attn.attn_sink",
            lambda sinks: sinks.long(),
            "layers.1.attn.attn_sink must be of floating-point values, as in the model, got I64",
            id="sinks-of-integers",
        ),
    ],
)
def test_a_damaged_checkpoint_of_deepseek_v4_is_rejected(
    name, edit, message, fp4_checkpoint, tmp_path
):
    path = shutil.copytree(fp4_checkpoint, tmp_path / "checkpoint")
    shard = json.loads((path / INDEX).read_text())["weight_map"][name]
    change(path, shard, lambda tensors, name: edited(tensors, name, edit), name)
    with pytest.raises(ValueError, match=f"load: .*{shard}: {message}"):
        models.load(path)


def test_fp4_that_the_config_does_not_announce_is_rejected(fp4_checkpoint, tmp_path):
    path = shutil.copytree(fp4_checkpoint, tmp_path / "checkpoint")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"expert_dtype": "fp8"}))
    with pytest.raises(ValueError, match="experts.0.w1.weight must be of dtype .*F8_E4M3, got I8"):
        models.load(path)


def test_deepseek_v4_is_not_sharded(fp4_checkpoint):
    with pytest.raises(ValueError, match="tensor_parallel must be False for deepseek_v4: "):
        models.load(fp4_checkpoint, tensor_parallel=True)


# ---- memory -----------------------------------------------------------------------------------


def deepseek_v32(**changes):
    yarn = YARN | {"factor": 40.0, "original_max_position_embeddings": 4096}
    return DeepseekV32Config(rope_parameters=yarn, **changes)


def deepseek_v4_flash(**changes):
    yarn = {"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1}
    return DeepseekV4Config(
        compress_ratios=[0, 0, *[4, 128] * 20, 4, 0],
        num_hash_layers=3,
        rope_scaling=yarn | {"original_max_position_embeddings": 65536},
        **changes,
    )


@pytest.fixture(
    scope="module",
    params=[
        # what all layers need, and the first ones
        pytest.param(
            (
                deepseek_v32(n_routed_experts=16, moe_intermediate_size=32768),
                {None: "1.42TB", 31: "689GB"},
            ),
            id="deepseek_v32-of-large-experts",
        ),
        pytest.param(
            (
                deepseek_v4_flash(n_routed_experts=8, moe_intermediate_size=65536),
                {None: "636GB", 21: "312GB"},
            ),
            id="deepseek_v4-of-large-experts",
        ),
        # 93,000 and 69,000 tensors
        pytest.param(
            (deepseek_v32(), {None: "1.34TB", 31: "652GB"}),
            id="deepseek_v32-as-published",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (deepseek_v4_flash(), {None: "569GB", 21: "279GB"}),
            id="deepseek_v4-as-published",
            marks=pytest.mark.slow,
        ),
    ],
)
def real_size(request, tmp_path_factory):
    """The 671 billion weights of DeepSeek-V3.2 and the 284 billion of V4-Flash as published, as far
    as their headers go."""
    path = tmp_path_factory.mktemp("real")
    config, needs = request.param
    with torch.device("meta"):
        write_published(path, config, save=save_sparse)
    on_disk = sum(file.stat().st_blocks * 512 for file in path.iterdir())
    assert on_disk < 100e6 < 159e9 < sum(file.stat().st_size for file in path.iterdir())
    return path, needs


def test_a_model_that_does_not_fit_is_rejected_before_anything_is_read(real_size):
    path, needs = real_size
    if psutil.virtual_memory().available > 270e9:
        pytest.skip("this machine has the memory")
    for layers, needed in needs.items():
        with pytest.raises(MemoryError) as error:
            models.load(path, num_hidden_layers=layers)
        error.match(
            rf"load: out of memory: the model needs {needed} in bfloat16, this machine has "
            r"[\d.]+[GM]B free; load fewer layers with num_hidden_layers, or use more devices"
        )


@pytest.mark.slow
def test_a_synthetic_deepseek_v4_flash_has_as_many_tensors_as_the_published_one():
    config = deepseek_v4_flash()
    with torch.device("meta"):
        shards = shards_of(DeepseekV4ForCausalLM(config))
        names = [
            len(stored_v4(name, shape, config, "fp4"))
            for shard in shards
            for name, shape in shard.items()
        ]
    assert sum(names) == 69187


@pytest.mark.ascend_host
def test_a_model_that_does_not_fit_on_the_device_is_rejected(tmp_path):
    with torch.device("meta"):
        write_published(tmp_path, tiny_config(vocab_size=10**10), save=save_sparse)
    with pytest.raises(MemoryError, match=r"needs 3\.84TB in bfloat16, npu has 17\.2GB free"):
        models.load(tmp_path, device="npu")


PEAK = """
import sys
from pathlib import Path
from custom_pypto import models

def memory(field):
    return int(Path("/proc/self/status").read_text().split(field)[1].split()[0]) * 1024

small, large = sys.argv[1:]
models.load(small)  # has imported all there is to import
Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
before = memory("VmRSS:")
model = models.load(large)
print(memory("VmHWM:") - before, sum(tensor.nbytes for tensor in model.state_dict().values()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "kind, quantised",
    [
        pytest.param(KINDS[0], True, id="fp8"),
        pytest.param(V4, True, id="fp4"),
        pytest.param(KINDS[0], False, id="bf16", marks=pytest.mark.slow),
    ],
)
def test_loading_takes_no_more_than_the_model_and_one_shard(kind, quantised, tmp_path):
    small = published(tmp_path / "small", kind)
    sizes = dict(hidden_size=1024, moe_intermediate_size=512, n_routed_experts=32)
    path = published(tmp_path / "quantised", kind, **sizes)
    if not quantised:
        models.load(path).save_pretrained(path := tmp_path / "bf16", max_shard_size="60MB")
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", PEAK, small, path],
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    peak, size = map(int, done.stdout.split())
    shard = max(file.stat().st_size for file in path.glob("*.safetensors"))
    assert size > 200e6 and shard < 61e6
    # a few MB less than the model may do: those that the small one has left
    assert 0.95 * size < peak <= size + shard, f"{peak / 1e6} MB for {size / 1e6} + {shard / 1e6}"
