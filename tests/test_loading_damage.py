"""Damaged checkpoints are rejected by the name of the file; those of another model, by its."""

import json
import os
import re
import shutil

import pytest
import torch
import transformers
from loading_harness import (
    INDEX,
    edit_json,
    edit_tensor,
    published_in_fp4,  # noqa: F401
    published_in_fp8,  # noqa: F401
    saved_checkpoint,  # noqa: F401
)
from safetensors.torch import save_file
from transformers import LlamaConfig

from custom_pypto import models
from custom_pypto.hub import Directory
from custom_pypto.models.architectures import ARCHITECTURES, Architecture
from custom_pypto.models.loading.checkpoint import stored_tensors
from custom_pypto.models.loading.reader import Reader


@pytest.fixture
def copied(tmp_path):
    return lambda checkpoint: shutil.copytree(checkpoint, tmp_path / "checkpoint")


def assert_rejected(path, message, error=ValueError):
    with pytest.raises(error, match=message):
        models.load(path)


# ---- files ------------------------------------------------------------------------------------


def overwritten(data, start, by):
    return data[:start] + by + data[start + len(by) :]


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
INCOMPLETE = {
    "truncated": (
        lambda file: os.truncate(file, file.stat().st_size - 1000),
        "incomplete metadata, file not fully covered",
    ),
    "truncated-in-its-header": (lambda file: os.truncate(file, 60), "invalid header length"),
    "truncated-in-its-first-bytes": (lambda file: os.truncate(file, 5), "header too small"),
    "garbled-in-its-header": (
        lambda file: file.write_bytes(overwritten(file.read_bytes(), 8, b"garbage")),
        "invalid JSON in header",
    ),
    "empty": (lambda file: os.truncate(file, 0), "header too small"),
    "too-long": (lambda file: file.write_bytes(file.read_bytes() + b"more"), "incomplete metadata"),
}


@pytest.mark.parametrize(
    "damage, why",
    [
        pytest.param(*case, id=id, marks=[pytest.mark.slow] if "truncated-in" in id else [])
        for id, case in INCOMPLETE.items()
    ],
)
def test_an_incomplete_file_is_rejected_by_name(damage, why, checkpoint, copied):
    path = copied(checkpoint[0])
    file = sorted(path.glob("*.safetensors"))[1]
    damage(file)
    damaged = rf"{file.name} \({file.stat().st_size} bytes\) is not a complete safetensors file"
    assert_rejected(path, f"{damaged}: .*{why}.*; download it again")


def test_a_git_lfs_pointer_is_named(checkpoint, copied):
    path = copied(checkpoint[0])
    file = sorted(path.glob("*.safetensors"))[1]
    file.write_text(POINTER)
    assert_rejected(
        path, f"{file.name} is a Git LFS pointer, not the file; run git lfs pull in {path}"
    )


CHANGES = {
    "cut": lambda file: os.truncate(file, file.stat().st_size - 1),
    "written-anew": lambda file: save_file({"a": torch.zeros(4), "last": torch.zeros(19)}, file),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_file_that_changes_while_it_is_read_is_rejected(change, tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(4), "last": torch.zeros(20)}, file)
    reader = Reader(stored_tensors(Directory(tmp_path), lambda name: True, {}), {})
    change(file)
    with pytest.raises(ValueError, match=f"{file} changed while it was read; load it again"):
        reader.stored("last")


def first_over(path, shard):
    shutil.copy(min(path.glob("*.safetensors")), path / shard)


FILES = {
    "missing": (
        lambda path, shard: (path / shard).unlink(),
        FileNotFoundError,
        "{shard} is missing",
    ),
    "of-another-checkpoint": (
        first_over,
        ValueError,
        f"{{shard}} lacks .*, listed in {INDEX}; is the file from another checkpoint",
    ),
    "broken-index": (
        lambda path, shard: (path / INDEX).write_text('{"weight_map": {'),
        ValueError,
        f"{INDEX} is not a safetensors index: .*; download it again",
    ),
    "no-index": (
        lambda path, shard: (path / INDEX).unlink(),
        FileNotFoundError,
        r"model\.safetensors is missing",
    ),
    "no-config": (
        lambda path, shard: (path / "config.json").unlink(),
        FileNotFoundError,
        "path must be a checkpoint directory with a config.json, got {path}",
    ),
    "config-of-another-size": (
        lambda path, shard: edit_json(path / "config.json", vocab_size=300),
        ValueError,
        r"must be of shape \[300, \d+\] \(config.json\), got \[199, \d+\]",
    ),
    "config-of-another-model": (
        lambda path, shard: LlamaConfig(
            hidden_size=16, num_attention_heads=2, vocab_size=8
        ).save_pretrained(path),
        TypeError,
        "config.json is of a model of type llama, without index_topk, .*; supported are Deepseek",
    ),
}


@pytest.mark.parametrize("damage, error, message", FILES.values(), ids=FILES)
def test_a_checkpoint_with_other_files_is_rejected(damage, error, message, checkpoint, copied):
    path = copied(checkpoint[0])
    shard = sorted(path.glob("*.safetensors"))[1].name
    damage(path, shard)
    assert_rejected(path, message.format(shard=shard, path=path), error)


# ---- tensors ----------------------------------------------------------------------------------


def removed(tensor):
    return None


def shortened(tensor):
    return tensor[:-1]


EXPERT_UP = r"experts\.(3\.(up_proj|w3)|gate_up_proj)"
UNLISTED = f"{INDEX} lacks {{name}}; use the checkpoint's own config.json"
OTHER_SHAPE = r"{shard}: {name} must be of shape {before} \(config.json\), got {after}"
TENSORS = {
    "without-a-tensor": (
        r"layers\.1\.",
        removed,
        True,
        f"{{shard}} lacks {{name}}, listed in {INDEX}",
    ),
    "with-a-tensor-of-another-shape": (r"layers\.1\.", shortened, True, OTHER_SHAPE),
    "with-an-expert-of-another-shape": (EXPERT_UP, shortened, True, OTHER_SHAPE),
    "unlisted-tensor": ("^model.norm.weight", removed, False, UNLISTED),
    "unlisted-expert": (EXPERT_UP, removed, False, UNLISTED),
}


@pytest.mark.parametrize("name, edit, listed, message", TENSORS.values(), ids=TENSORS)
def test_a_checkpoint_with_other_tensors_is_rejected(
    name, edit, listed, message, checkpoint, copied
):
    path = copied(checkpoint[0])
    found = edit_tensor(path, name, edit, listed=listed)
    assert_rejected(path, message.format(**found))


# in fp8: a weight of layer 2 and its scales, which have 5 or 6 rows of blocks, and 2 columns
PROJECTION = r"layers\.2\.(self_attn\.kv_a_proj_with_mqa|attn\.wq_b)\."
WEIGHT, SCALES = rf"{PROJECTION}weight$", rf"{PROJECTION}(scale|weight_scale_inv)$"
NORM = r"^(model\.)?norm\.weight$"
QUANTIZED = {
    "without-a-scale": (SCALES, removed, True, f"{{shard}} lacks {{name}}, listed in {INDEX}"),
    "without-a-scale-in-the-index-either": (
        SCALES,
        removed,
        False,
        rf"{{shard}}: .*{PROJECTION}weight is F8_E4M3 and lacks its .*{{name}}",
    ),
    "with-scales-of-whole-blocks-only": (
        SCALES,
        shortened,
        True,
        r"{shard}: {name} must be of shape {before} \(one scale per 128x128 block of .* "
        "got {after}",
    ),
    "with-scales-of-integers": (
        SCALES,
        lambda scales: scales.long(),
        True,
        "{shard}: {name} must be .* and dtype F32, F16, BF16, F8_E8M0, got .* and I64",
    ),
    "with-a-norm-in-fp8": (
        NORM,
        lambda norm: norm.to(torch.float8_e4m3fn),
        True,
        r"{name} must be a matrix to be F8_E4M3, got shape \[160\]; use .* in bfloat16",
    ),
    "in-bytes": (
        WEIGHT,
        lambda weight: weight.byte(),
        True,
        "{shard}: {name} must be of dtype F32, .* or F8_E4M3.*, got U8",
    ),
}


@pytest.mark.parametrize("name, edit, listed, message", QUANTIZED.values(), ids=QUANTIZED)
def test_a_damaged_fp8_checkpoint_is_rejected(name, edit, listed, message, fp8_checkpoint, copied):
    path = copied(fp8_checkpoint)
    found = edit_tensor(path, name, edit, listed=listed)
    assert_rejected(path, message.format(**found))


@pytest.mark.parametrize(
    "quantization, message",
    [
        (None, r"is F8_E4M3, but config\.json lacks the quantization_config"),
        (
            {"quant_method": "gptq", "bits": 4},
            r"quantization_config of config\.json must be fp8 .* got gptq",
        ),
    ],
    ids=["none", "gptq"],
)
def test_fp8_with_another_quantization_config_is_rejected(
    quantization, message, fp8_checkpoint, copied
):
    path = copied(fp8_checkpoint)
    edit_json(path / "config.json", quantization_config=quantization)
    assert_rejected(path, message)


W1, TABLE = "layers.1.ffn.experts.2.w1", "layers.0.ffn.gate.tid2eid"
SINKS = "layers.1.attn.attn_sink"
OF_W1 = r"\[48, 5\] \(one scale per 1x32 block of \[48, 160\]\)"
OF_V4 = {
    "fp4-of-another-shape": (
        f"{W1}.weight",
        lambda weight: weight[:, :-1],
        r"must be of shape \[48, 160\] .config.json., got \[48, 158\]",
    ),
    "fp4-in-another-dtype": (
        f"{W1}.weight",
        lambda weight: weight.view(torch.uint8),
        "must be of dtype .* or F8_E4M3 or I8, got U8",
    ),
    "fp4-without-the-last-scales": (
        f"{W1}.scale",
        lambda scales: scales[:, :-1],
        rf"must be of shape {OF_W1} and dtype .*, got \[48, 4\]",
    ),
    "table-of-floats": (
        TABLE,
        lambda table: table.float(),
        "must be of integers, as in the model, got F32",
    ),
    "table-of-another-shape": (
        TABLE,
        lambda table: table[:, :1],
        r"must be of shape \[199, 2\] .config.json., got \[199, 1\]",
    ),
    "sinks-of-integers": (
        SINKS,
        lambda sinks: sinks.long(),
        "must be of floating-point values, as in the model, got I64",
    ),
}


@pytest.mark.parametrize("name, edit, message", OF_V4.values(), ids=OF_V4)
def test_a_damaged_checkpoint_of_deepseek_v4_is_rejected(
    name, edit, message, fp4_checkpoint, copied
):
    path = copied(fp4_checkpoint)
    found = edit_tensor(path, f"^{name}$", edit)
    assert_rejected(path, f"load: .*{found['shard']}: {name} {message}")


def test_fp4_that_the_config_does_not_announce_is_rejected(fp4_checkpoint, copied):
    path = copied(fp4_checkpoint)
    edit_json(path / "config.json", expert_dtype="fp8")
    assert_rejected(path, "experts.0.w1.weight must be of dtype .*F8_E4M3, got I8")


# ---- another request --------------------------------------------------------------------------


def test_a_checkpoint_of_a_newer_transformers_names_the_version_that_has_it(tmp_path, monkeypatch):
    newer = Architecture("Newer", "newer", "PagedNewerAttention", "9.99")
    monkeypatch.setitem(ARCHITECTURES, "NewerForCausalLM", newer)
    config = {"architectures": ["NewerForCausalLM"], "model_type": "newer"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = (
        f"load: NewerForCausalLM needs transformers 9.99, found {transformers.__version__}; "
        "pip install 'transformers==9.99.*'"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(expected)}$"):
        models.load(tmp_path)


@pytest.mark.parametrize("layers", [0, -1, 5])
def test_as_many_layers_as_there_are_not(layers, checkpoint):
    with pytest.raises(
        ValueError, match=f"num_hidden_layers must be 1 to [34] .config.json., got {layers}"
    ):
        models.load(checkpoint[0], num_hidden_layers=layers)
