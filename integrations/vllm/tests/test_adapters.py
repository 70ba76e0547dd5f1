"""LoRA adapters: right with each request's own, or rejected."""

import inspect
import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import save_adapter, save_tiny
from safetensors.torch import load_file, save_file
from test_engines import V32, assert_equal, generate, run

DENSE = dict(first_k_dense_replace=3)  # vLLM's adapters of experts need triton


def save_half(folder: Path, adapter: Path, checkpoint: Path, merged: Path) -> Path:
    """The adapter at half its strength, beside ``merged``, the checkpoint with that merged."""
    shutil.copytree(adapter, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["lora_alpha"] /= 2
    (folder / "adapter_config.json").write_text(json.dumps(config))
    plain, full = (load_file(path / "model.safetensors") for path in (checkpoint, merged))
    weights = {name: weight.lerp(full[name], 0.5) for name, weight in plain.items()}
    shutil.copytree(checkpoint, folder / "merged")
    save_file(weights, folder / "merged" / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.matrix
@pytest.mark.parametrize("workers", [1, 2])
def test_each_request_equals_transformers_with_its_adapter_merged(workers, tmp_path):
    checkpoint = save_tiny(tmp_path / V32, V32, **DENSE)
    merged = tmp_path / "merged"
    full = save_adapter(tmp_path / "full", checkpoint, merged)
    half = save_half(tmp_path / "half", full, checkpoint, merged)
    adapters = dict(enable_lora=True, max_loras=2, adapters=[str(full), str(half), None])
    result = generate(checkpoint, tmp_path, tensor_parallel_size=workers, **adapters)
    for number, wanted in enumerate((merged, half / "merged", checkpoint)):
        own = {key: result[key][number::3] for key in ("tokens", "logprobs")}
        assert_equal(wanted, own)


def test_the_op_of_vllm_still_gives_the_last_adapter_to_requests_without_one():
    """Fails when vLLM's op gives 0: then patches.adapters.own_only can go."""
    from custom_pypto_vllm.patches.adapters import own_only
    from vllm.lora.ops.torch_ops import lora_ops

    bgmv_shrink = inspect.unwrap(lora_ops.bgmv_shrink)  # this process may have the plugin
    inputs, weights = torch.ones(2, 16), torch.ones(3, 1, 8, 16)
    bgmv_shrink(inputs, weights, got := torch.zeros(2, 8), indices := torch.tensor([-1, 0]))
    assert got[0].eq(16).all()
    own_only(bgmv_shrink)(inputs, weights, got, indices)
    assert got[0].eq(0).all() and got[1].eq(16).all()


NAME = "model.layers.0.self_attn.o_proj"
SIZES = {NAME: (128, 64)}
OTHERS = {
    "another hidden size": (NAME, (8, 128), (32, 8), "lora_B (64, 8) for " + NAME),
    "another number of heads": (NAME, (8, 96), (64, 8), "got (8, 96) and (64, 8)"),
    "another rank than it says": (NAME, (4, 128), (64, 4), "must have lora_A (8, 128)"),
    "a layer beyond the last": (
        "model.layers.1.self_attn.o_proj",
        (8, 128),
        (64, 8),
        "of this model of 1 layers, got model.layers.1.self_attn.o_proj",
    ),
    "what attention absorbs": (
        "model.layers.0.self_attn.kv_b_proj",
        (8, 128),
        (64, 8),
        "must have no weights for kv_b_proj",
    ),
}


def adapter_of(name, a, b):
    from vllm.lora.lora_weights import LoRALayerWeights

    return {name: LoRALayerWeights(name, 8, 16, torch.zeros(a), torch.zeros(b))}


def check(*weights):
    from custom_pypto_vllm.patches import adapters

    adapters.check("sql", adapter_of(*weights), SIZES, 1)


@pytest.mark.parametrize("name, a, b, error", OTHERS.values(), ids=OTHERS)
def test_weights_that_do_not_fit_are_rejected(name, a, b, error):
    check(NAME, (8, 128), (64, 8))
    with pytest.raises(ValueError, match="custom_pypto_vllm: adapter sql must have") as rejected:
        check(name, a, b)
    assert error in str(rejected.value)


@pytest.mark.parametrize("targets, rejects", [(None, True), (["q_b_proj"], False)])
def test_what_lora_target_modules_leaves_out_need_not_fit(targets, rejects):
    from custom_pypto_vllm.attention.layer import SparseAttentionLayer
    from custom_pypto_vllm.patches.adapters import checked
    from vllm.lora.utils import is_in_target_modules

    layer = SparseAttentionLayer.__new__(SparseAttentionLayer)
    torch.nn.Module.__init__(layer)
    model = torch.nn.Sequential(layer)
    model.config = SimpleNamespace(num_hidden_layers=1)
    manager = SimpleNamespace(model=model, modules={})
    manager._match_target_modules = lambda name: is_in_target_modules(name, targets)
    lora = SimpleNamespace(loras=adapter_of(NAME, (8, 128), (64, 8)))
    load = checked(lambda worker, request: lora)
    with pytest.raises(ValueError, match=NAME) if rejects else nullcontext():
        load(SimpleNamespace(_adapter_manager=manager), SimpleNamespace(lora_name="sql"))


def load_by_vllm(folder, modules, max_lora_rank):
    """As vLLM's workers do."""
    from vllm.config import LoRAConfig
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    helper = PEFTHelper.from_local_dir(str(folder), None)
    helper.validate_legal(LoRAConfig(max_lora_rank=max_lora_rank))
    return LoRAModel.from_local_checkpoint(str(folder), modules, helper, device="cpu")


def test_vllm_itself_rejects_high_ranks_and_unknown_projections(tmp_path):
    checkpoint = save_tiny(tmp_path / V32, V32, **DENSE)
    folder = save_adapter(tmp_path / "adapter", checkpoint, tmp_path / "merged")
    known = {"o_proj", "q_b_proj"}
    assert len(load_by_vllm(folder, known, 8).loras) == 6  # two in each of three layers
    with pytest.raises(ValueError, match="LoRA rank 8 is greater than max_lora_rank 1"):
        load_by_vllm(folder, known, 1)
    with pytest.raises(ValueError, match="received .*'model.layers.2.self_attn.q_b_proj'"):
        load_by_vllm(folder, {"o_proj"}, 8)


@pytest.mark.matrix
def test_an_engine_rejects_the_adapter_of_a_smaller_model(tmp_path):
    checkpoint = save_tiny(tmp_path / V32, V32, **DENSE)
    other = save_tiny(tmp_path / "other", V32, hidden_size=64, **DENSE)
    adapter = save_adapter(tmp_path / "adapter", other, tmp_path / "merged")
    engine = run(checkpoint, tmp_path, enable_lora=True, adapters=[str(adapter)])
    assert engine.returncode != 0
    error = "lora_B (128, 8) for model.layers.0.self_attn.o_proj, got (8, 128) and (64, 8)"
    assert error in engine.stderr + engine.stdout
