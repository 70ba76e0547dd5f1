"""Tiny random checkpoints of DeepSeek-V4, as transformers saves them and as published."""

import json
import re
import shutil
from pathlib import Path

import torch
from checkpoints import save, write_config
from quantized import PUBLISHED_FP8, blocks
from safetensors.torch import load_file, save_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

V4 = "deepseek_v4"
RATIOS = [0, 4, 128, 4]
# what a published config.json says, and what transformers derives of it
YARN = dict(type="yarn", factor=8, original_max_position_embeddings=512, beta_fast=32, beta_slow=1)
PUBLISHED = dict(compress_ratios=RATIOS, num_hash_layers=1, rope_scaling=YARN)
DERIVED = ("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters")
NAMES = {
    "model.": "",
    "embed_tokens.": "embed.",
    "hc_head.hc_": "hc_head_",
    ".attn.norm.": ".attn.kv_norm.",
}
FP8 = re.compile(r"(attn|indexer)\.w(q_a|q_b|kv|o_a|o_b)\.weight|shared_experts\.")
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def save_tiny(folder: Path, dtype=torch.float32, **changes) -> Path:
    """Four layers of every kind, under the names and the configuration of transformers."""
    torch.manual_seed(0)
    config = dict(
        vocab_size=512,
        hidden_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=len(RATIOS),
        num_attention_heads=4,
        head_dim=128,
        qk_rope_head_dim=64,
        q_lora_rank=64,
        o_groups=2,
        o_lora_rank=32,
        sliding_window=16,
        index_n_heads=16,
        index_head_dim=128,
        index_topk=32,
        compress_ratios=RATIOS,
        num_hash_layers=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        swiglu_limit=0.5,  # low enough to count
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        num_nextn_predict_layers=0,
        initializer_range=0.1,
    )
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**config | changes))
    save(model, folder, dtype, norm=0.1, bias=0.1, sinks=0.1, base=0.1, scale=0.1)
    return folder


def publish(folder: Path) -> Path:
    """Rewrites what :func:`save_tiny` saved as DeepSeek publishes it, with YaRN."""
    path = folder / "model.safetensors"
    weights = {}
    for name, tensor in load_file(path).items():
        for own, other in NAMES.items():
            name = name.replace(own, other)
        weights[name] = tensor
    save_file(weights, path, {"format": "pt"})
    path = folder / "config.json"
    config = {k: v for k, v in json.loads(path.read_text()).items() if k not in DERIVED}
    path.write_text(json.dumps(config | PUBLISHED, indent=1))
    return folder


def fp4(weight):
    """Bytes and e8m0 scales of e2m1 values in groups of 32, and what they stand for."""
    grouped = weight.unflatten(-1, (-1, 32))
    largest = grouped.abs().amax(-1, keepdim=True).clamp(min=2.0**-60)
    scales = (largest / 6).log2().ceil().exp2()
    codes = (grouped.div(scales)[..., None] - E2M1).abs().argmin(-1)
    low, high = codes.flatten(-2).to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    stored = {
        "weight": (low | high << 4).view(torch.int8),
        "scale": scales[..., 0].to(torch.float8_e8m0fnu),
    }
    return stored, (E2M1[codes] * scales).flatten(-2)


def fp8(weight):
    stored, exact = blocks(weight)
    scales = stored["weight_scale_inv"].to(torch.float8_e8m0fnu)
    return {"weight": stored["weight"], "scale": scales}, exact


def quantize(source: Path) -> tuple[Path, Path]:
    """A published checkpoint with experts in fp4, projections in fp8, and what these stand for."""
    stored, exact = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        exact[name] = stored[name] = tensor
        if quantized := fp4 if ".experts." in name else fp8 if FP8.search(name) else None:
            del stored[name]
            of_layer, exact[name] = quantized(tensor)
            stored |= {f"{layer}.{key}": value for key, value in of_layer.items()}
    folders = []
    for ending, weights in (("-stored", stored), ("-exact", exact)):
        folder = shutil.copytree(source, source.with_name(source.name + ending))
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        folders.append(folder)
    write_config(folders[0], quantization_config=PUBLISHED_FP8, expert_dtype="fp4")
    return tuple(folders)
