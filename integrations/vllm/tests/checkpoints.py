"""Tiny random checkpoints on disk, with the keys of config.json that the published ones have and
transformers drops when it saves."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny import CLASSES, randomise, tiny_config

TARGETS = ("o_proj", "q_b_proj")  # of adapters
INDEX_TOPK = 64  # below most of the contexts
# the ops' published dimensions, widths that ranks and formats can share
SIZES = dict(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    moe_intermediate_size=64,
    q_lora_rank=64,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    v_head_dim=32,
    index_topk=INDEX_TOPK,
    index_head_dim=128,
    max_position_embeddings=4096,
    eos_token_id=2,
    rope_parameters=None,
    initializer_range=0.1,  # larger than usual: logits that differ, and margins in the top-k
)
PUBLISHED = {
    "deepseek_v32": dict(scoring_func="sigmoid", topk_method="noaux_tc"),
    "glm_moe_dsa": dict(
        scoring_func="sigmoid", topk_method="noaux_tc", indexer_rope_interleave=True
    ),
}


def write_config(folder: Path, **keys) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys, indent=1))


def save(model, folder: Path, dtype=torch.float32, **spreads: float) -> None:
    """Saves a random ``model``, with noise of these spreads where transformers initialises to 1 and
    0, and an embedding of padding: zeros score every key alike, which leaves the choice open."""
    randomise(model, **spreads)
    model.get_input_embeddings().weight.data[0].normal_(std=0.1)
    model.to(dtype).save_pretrained(folder)


def save_tiny(folder: Path, kind: str, dtype=torch.float32, **changes) -> Path:
    """A model of three layers, the last two with experts, at the ops' published dimensions."""
    torch.manual_seed(0)
    every = dict(indexer_types=["full"] * 3) if kind == "glm_moe_dsa" else {}
    model = CLASSES[kind][1](tiny_config(kind, **SIZES | every | changes))
    save(model, folder, dtype, norm=0.1, correction_bias=0.1)
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
