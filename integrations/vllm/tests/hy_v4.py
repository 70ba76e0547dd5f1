"""Tiny random checkpoints of Hy4, for vLLM and for transformers."""

import shutil
from pathlib import Path

import torch
from checkpoints import disturb
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import HYV4Config, HYV4ForCausalLM

HEADS, INDEX_HEADS, ROPE = 4, 16, 64
# rows of a projection that are rotated: the last ones of each of so many heads
ROTATED = {"self_attn.q_b_proj": HEADS, "kv_a_proj_with_mqa": 1}
ROTATED |= {"indexer.wq_b": INDEX_HEADS, "indexer.wk": 1, "indexer.k_norm": 1}


def save_tiny(folder: Path, **changes) -> tuple[Path, Path]:
    """A checkpoint for vLLM, which rotates pairs of neighbours, and for transformers: halves."""
    torch.manual_seed(0)
    config = dict(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_nope_head_dim=32,
        qk_rope_head_dim=ROPE,
        v_head_dim=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        index_topk=64,
        index_n_heads=INDEX_HEADS,
        index_head_dim=128,
        indexer_types=["full", "full", "shared"],
        swiglu_limit=0.5,  # low enough to count
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.1,
    )
    model = HYV4ForCausalLM(HYV4Config(**config | changes)).eval()
    disturb(model, "norm", "bias", "sinks", "base", "scale")
    # zeros score every key alike: no choice that two implementations must agree on
    model.get_input_embeddings().weight.data[0].normal_(std=0.1)
    model.save_pretrained(folder)
    pairs = shutil.copytree(folder, folder.with_name("pairs"))
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        for part, heads in ROTATED.items():
            if part in name:
                weights[name] = paired(tensor, heads)
    save_file(weights, pairs / "model.safetensors", {"format": "pt"})
    return pairs, folder


def paired(rows: Tensor, heads: int) -> Tensor:
    """``rows`` with row i of each half of the rotated ones beside row i of the other half."""
    rest, rotated = rows.unflatten(0, (heads, -1)).tensor_split([-ROPE], dim=1)
    rotated = rotated.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return torch.cat([rest, rotated], dim=1).flatten(0, 1).contiguous()
