"""Tiny random checkpoints of Hy4, for vLLM and for transformers."""

import shutil
from pathlib import Path

import torch
from checkpoints import SIZES, save
from safetensors.torch import load_file, save_file
from tiny import CLASSES, tiny_config
from torch import Tensor

HEADS, INDEX_HEADS, ROPE = 4, 16, 64  # of tiny_config and SIZES
# rows of a projection that are rotated: the last ones of each of so many heads
ROTATED = {"self_attn.q_b_proj": HEADS, "kv_a_proj_with_mqa": 1}
ROTATED |= {"indexer.wq_b": INDEX_HEADS, "indexer.wk": 1, "indexer.k_norm": 1}


def save_tiny(folder: Path, **changes) -> tuple[Path, Path]:
    """A checkpoint for vLLM, which rotates pairs of neighbours, and for transformers: halves."""
    torch.manual_seed(0)
    own = dict(indexer_types=["full", "full", "shared"], n_group=1)
    own["swiglu_limit"] = 0.5  # low enough to count
    model = CLASSES["hy_v4"][1](tiny_config("hy_v4", **SIZES | own | changes))
    save(model, folder, norm=0.1, bias=0.1, sinks=0.1, base=0.1, scale=0.1)
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
