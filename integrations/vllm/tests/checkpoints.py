"""Tiny random checkpoints on disk, with the keys of config.json that the published ones have and
transformers drops when it saves."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
)

VOCABULARY = 512
TARGETS = ("o_proj", "q_b_proj")  # of adapters
INDEX_TOPK = 64  # below most of the contexts
CLASSES = {
    "deepseek_v32": (DeepseekV32Config, DeepseekV32ForCausalLM),
    "glm_moe_dsa": (GlmMoeDsaConfig, GlmMoeDsaForCausalLM),
}
PUBLISHED = {
    "deepseek_v32": dict(scoring_func="sigmoid", topk_method="noaux_tc"),
    "glm_moe_dsa": dict(
        scoring_func="sigmoid", topk_method="noaux_tc", indexer_rope_interleave=True
    ),
}


def write_config(folder: Path, **keys) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys, indent=1))


def disturb(model, *parts: str) -> None:
    """Adds noise to parameters and buffers with one of ``parts`` in their name, which transformers
    initialises to 1 and 0: that would hide a missing one.
    """
    for name, tensor in model.state_dict().items():
        if any(part in name for part in parts):
            tensor.add_(torch.randn_like(tensor), alpha=0.1)


def save_tiny(folder: Path, kind: str, dtype=torch.float32, **changes) -> Path:
    """A model of three layers, the last two with experts, at the ops' published dimensions."""
    torch.manual_seed(0)
    config = dict(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        index_topk=INDEX_TOPK,
        index_head_dim=128,
        index_n_heads=16,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.1,  # larger than usual: logits that differ, and margins in the top-k
    )
    config_class, model_class = CLASSES[kind]
    model = model_class(config_class(**config | changes)).eval()
    disturb(model, "norm", "correction_bias")
    # zeros score every key alike: no choice that two implementations must agree on
    model.get_input_embeddings().weight.data[0].normal_(std=0.1)
    model.to(dtype).save_pretrained(folder)
    write_config(folder, **PUBLISHED[kind])
    return folder


def add_draft_layer(folder: Path) -> None:
    """Adds a layer of multi-token prediction (arXiv:2412.19437, section 2.2) made of the last one.

    Its projection adds embedding and hidden state, so that some of its drafts are right.
    """
    path = folder / "model.safetensors"
    weights = load_file(path)
    last = max(int(name.split(".")[2]) for name in weights if name.startswith("model.layers."))
    own, draft = f"model.layers.{last}.", f"model.layers.{last + 1}."
    weights |= {
        draft + name.removeprefix(own): tensor.clone()
        for name, tensor in weights.items()
        if name.startswith(own)
    }
    hidden = weights["model.norm.weight"].numel()
    eye = torch.eye(hidden)
    weights |= {
        draft + "enorm.weight": torch.ones(hidden),
        draft + "hnorm.weight": torch.ones(hidden),
        draft + "eh_proj.weight": torch.cat([eye, eye], dim=1),
        draft + "shared_head.norm.weight": weights["model.norm.weight"].clone(),
        draft + "shared_head.head.weight": weights["lm_head.weight"].clone(),
        draft + "embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
    }
    save_file(weights, path, {"format": "pt"})
    write_config(folder, num_nextn_predict_layers=1)


def save_adapter(folder: Path, checkpoint: Path, merged: Path, targets=TARGETS) -> Path:
    """A LoRA adapter (arXiv:2106.09685) of these projections, and the checkpoint with it merged."""
    generator = torch.Generator().manual_seed(1)
    weights = load_file(checkpoint / "model.safetensors")
    rank, alpha, adapter = 8, 16, {}
    for name, weight in weights.items():
        if name.split(".")[-2] in targets:
            a = torch.randn(rank, weight.shape[1], generator=generator) * 0.1
            b = torch.randn(weight.shape[0], rank, generator=generator) * 0.1
            prefix = "base_model.model." + name.removesuffix(".weight")
            adapter |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
            weight += alpha / rank * b @ a
    shutil.copytree(checkpoint, merged)
    save_file(weights, merged / "model.safetensors", {"format": "pt"})
    folder.mkdir()
    save_file(adapter, folder / "adapter_model.safetensors")
    config = dict(
        peft_type="LORA",
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules=list(targets),
        base_model_name_or_path=str(checkpoint),
    )
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
