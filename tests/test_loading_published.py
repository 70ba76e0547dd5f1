"""Published checkpoints, in fp8 and fp4, load dequantized to the bit."""

import json
import logging
import shutil

import pytest
import torch
from loading_harness import (
    assert_equal_to_the_bit,
    edit_json,
    edit_tensor,
    logits,
    published_in_fp4,  # noqa: F401
    published_in_fp8,  # noqa: F401
)
from model_harness import assert_close
from mtp_harness import MTP_KINDS, upstream_drafting
from published import V4, published, true_weights, weights_on_disk
from safetensors import safe_open
from tiny import KINDS, YARN, tiny_model, token_ids
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV4ForCausalLM
from transformers.integrations import finegrained_fp8
from transformers.utils.logging import set_tqdm_hook

from custom_pypto import models
from custom_pypto.models.mtp.layer import mtp_layer


@pytest.mark.parametrize("kv_lora_rank", [128, 192, 512])
@pytest.mark.parametrize("kind", KINDS)
def test_fp8_is_dequantized_to_the_bit(kind, kv_lora_rank, tmp_path):
    # with rope 192 rows in 2 blocks, which 5.23 would take for 96 high; 256; and 576 in 5
    path = published(tmp_path / "checkpoint", kind, kv_lora_rank)
    model = models.load(path)
    assert_equal_to_the_bit(model, path)
    for layer in model.model.layers:
        assert "Paged" in type(layer.self_attn).__name__
        assert type(layer.self_attn.kv_b_proj) is nn.Linear


@pytest.mark.parametrize("experts", ["fp4", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_deepseek_v4_is_dequantized_to_the_bit(dtype, experts, tmp_path):
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
    assert_close(got, logits, V4)


@pytest.mark.parametrize("experts", ["fp4", "fp8"])
def test_deepseek_v4_has_the_weights_that_upstream_loads(experts, tmp_path):
    # whole blocks, which upstream needs; it keeps unquantized tensors in their dtype on disk
    sizes = dict(hidden_size=256, moe_intermediate_size=128, q_lora_rank=128, o_lora_rank=64)
    sizes |= dict(head_dim=128, partial_rotary_factor=0.125, index_head_dim=128)
    path = published(tmp_path / "checkpoint", V4, experts=experts, **sizes)
    upstream = AutoModelForCausalLM.from_pretrained(path).state_dict()
    for name, tensor in models.load(path).state_dict().items():
        assert torch.equal(tensor, upstream[name].to(tensor.dtype)), name


def test_a_dequantized_model_is_as_if_it_had_never_been_in_fp8(fp8_checkpoint, tmp_path):
    model = models.load(fp8_checkpoint)
    assert model.dtype == model.config.dtype == torch.bfloat16 and not model.training
    assert {it.dtype for it in model.model.rotary_emb.buffers()} == {torch.float32}
    model.save_pretrained(tmp_path, max_shard_size="500KB")
    config = json.loads((tmp_path / "config.json").read_text())
    assert not config.keys() & {"quantization_config", "expert_dtype"}
    assert_equal_to_the_bit(models.load(tmp_path), fp8_checkpoint)
    upstream = AutoModelForCausalLM.from_pretrained(tmp_path)  # with this one's experts, too
    assert torch.equal(logits(upstream), logits(models.use_transformers(model)))


def names_of(path):
    """Of the tensors in all files of a checkpoint."""
    names = set()
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            names.update(tensors.keys())
    return names


@pytest.mark.parametrize("weights", [None, "stored", "int8", "int4"])
@pytest.mark.parametrize("kind", [kind for kind in MTP_KINDS if kind in KINDS])
def test_the_mtp_layer_loads_in_every_format_and_is_saved(kind, weights, tmp_path):
    path = published(tmp_path / "checkpoint", kind, moe_intermediate_size=128)
    model, without = (models.load(path, mtp=it, weights=weights) for it in (True, False))
    if weights is None:
        assert_equal_to_the_bit(model, path)
    layer = mtp_layer(model.model)
    kinds = {name: module.kind for name, module in layer.named_modules() if hasattr(module, "kind")}
    assert len(without.model.layers) == 3 and (weights is None) == (not kinds)
    own = {"e_proj", "self_attn.o_b_proj"} if kind == V4 else {"eh_proj", "self_attn.o_proj"}
    own |= {"mlp.gate_proj" if kind == "dots3_note" else "mlp.experts"}
    assert weights is None or own <= kinds.keys()
    ids = token_ids(1, 40)
    got = model.generate(ids, max_new_tokens=6, use_mtp=True)
    assert torch.equal(got, without.generate(ids, max_new_tokens=6))  # nothing accepted, by chance

    model.save_pretrained(tmp_path / "saved")
    saved = models.load(tmp_path / "saved", mtp=True).state_dict()
    for name, tensor in model.state_dict().items():
        # dtypes of eight bits have no comparison
        assert torch.equal(saved[name].view(torch.uint8), tensor.view(torch.uint8)), name
    names = models.load(tmp_path / "saved").state_dict().keys()
    assert names == without.state_dict().keys()
    upstream = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")  # as of any checkpoint
    assert len(upstream.model.layers) == 3


@pytest.mark.parametrize("weights", [None, "int8"])
def test_a_saved_model_of_text_and_images_has_its_mtp_layer(weights, tmp_path):
    upstream = upstream_drafting("glm5_next")
    upstream.save_pretrained(tmp_path)
    model = models.load(tmp_path, mtp=True, weights=weights)
    if weights is None:
        for name, tensor in upstream.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor), name
    ids = token_ids(1, 40)
    got = model.generate(ids, max_new_tokens=12, use_mtp=True, return_dict_in_generate=True)
    assert got.drafts.accepted[0] > 0
    without = models.load(tmp_path, weights=weights)
    assert torch.equal(got.sequences, without.generate(ids, max_new_tokens=12))


def test_a_part_of_the_layers_has_no_mtp_layer(tmp_path):
    with pytest.raises(ValueError, match="load: mtp must be False with num_hidden_layers, got"):
        models.load(tmp_path, mtp=True, num_hidden_layers=2)


@pytest.mark.parametrize(
    "kind, why",
    [
        ("mistral_large4", "whose checkpoint has DSpark layers instead"),
        ("hy_v4_vl", "whose layer would need the positions of images"),
    ],
)
def test_models_that_do_not_draft_by_mtp_are_named_with_the_reason(kind, why, tmp_path):
    tiny_model(kind).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"load: mtp must be False for a \w+ \({why}\), got"):
        models.load(tmp_path, mtp=True)


def test_a_checkpoint_without_the_mtp_layer_is_named(tmp_path):
    path = published(tmp_path / "v3")
    with pytest.raises(TypeError, match="load: mtp must be True or False, got 1"):
        models.load(path, mtp=1)
    edit_json(path / "config.json", num_nextn_predict_layers=None)
    with pytest.raises(ValueError, match="num_nextn_predict_layers = 1, .* got None; omit mtp"):
        models.load(path, mtp=True)
    edit_json(path / "config.json", num_nextn_predict_layers=1)
    edit_tensor(path, "eh_proj.weight$", lambda _: None, listed=False)
    with pytest.raises(ValueError, match="lacks model.layers.3.eh_proj.weight"):
        models.load(path, mtp=True)
    models.load(path)
    path = published(tmp_path / "v4", V4)
    edit_tensor(path, "mtp.0.hc_head_fn$", lambda _: None, listed=False)
    with pytest.raises(ValueError, match="lacks model.mtp.0.hc_head.hc_fn"):
        models.load(path, mtp=True)


@pytest.mark.parametrize("kind, drafts", [("deepseek_v32", "model.layers.3."), (V4, "mtp.")])
def test_a_saved_model_has_no_drafts_and_its_checkpoint_has(kind, drafts, tmp_path):
    path = published(tmp_path / "checkpoint", kind)
    models.load(path).save_pretrained(tmp_path / "saved")
    assert any(name.startswith(drafts) for name in names_of(path))
    saved = names_of(tmp_path / "saved")
    assert saved and not [name for name in saved if "mtp" in name or ".layers.3." in name]


def test_fp8_in_float32_is_not_rounded_and_computes_as_upstream_does(fp8_checkpoint):
    model = models.load(fp8_checkpoint, dtype=torch.float32)
    assert_equal_to_the_bit(model, fp8_checkpoint, torch.float32)
    patched = logits(model)
    assert_close(patched, logits(models.use_transformers(model)))
    if model.config.model_type == "deepseek_v32":
        frequencies = {"rope_theta": YARN["rope_theta"], "factor": YARN["factor"]}
        assert model.config.rope_parameters.items() >= frequencies.items()


def test_auto_is_the_dtype_of_what_is_not_quantized(fp8_checkpoint, tmp_path):
    path = shutil.copytree(fp8_checkpoint, tmp_path / "checkpoint")
    edit_json(path / "config.json", torch_dtype=None)
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


def test_the_settings_for_generation_are_the_checkpoints(fp8_checkpoint, tmp_path):
    path = shutil.copytree(fp8_checkpoint, tmp_path / "checkpoint")
    assert models.load(path).generation_config.bos_token_id == 1  # from config.json
    (path / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6}')
    assert models.load(path).generation_config.temperature == 0.6


def test_progress_is_shown(fp8_checkpoint, capsys):
    models.load(fp8_checkpoint)
    shown = capsys.readouterr().err
    assert "Loading weights: 100%" in shown and "B/s]" in shown and "it/s]" not in shown


def test_loading_leaves_threads_and_progress_bars_as_they_were(fp8_checkpoint):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        models.load(fp8_checkpoint)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert set_tqdm_hook(None) is None


def test_deepseek_v4_is_not_sharded(fp4_checkpoint):
    message = "tensor_parallel must be False for deepseek_v4: .* pass expert_parallel=True"
    with pytest.raises(ValueError, match=message):
        models.load(fp4_checkpoint, tensor_parallel=True)
