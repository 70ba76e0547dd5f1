"""Hy4 in vLLM: what stock transformers computes with the same weights."""

import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import disturb
from safetensors.torch import load_file, save_file
from test_engines import NGRAM, assert_equal, generate, run
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


def test_chunked_prefill_and_prefix_cache_equal_transformers(tmp_path):
    checkpoint, reference = save_tiny(tmp_path / "halves")
    result = generate(checkpoint, tmp_path, max_num_batched_tokens=64, rounds=2)
    assert result["chunked_prefill"] and result["prefix_caching"] and max(result["cached"]) >= 128
    assert_equal(reference, result)


CASES = {
    "eager": {},
    "tensor_parallel": dict(tensor_parallel_size=2, max_num_batched_tokens=64),
    "n_gram": dict(speculative_config=NGRAM),
    "preempted": dict(block_size=64, num_gpu_blocks_override=11, tokens=64),
}


@pytest.mark.matrix
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_equals_transformers(options, tmp_path):
    checkpoint, reference = save_tiny(tmp_path / "halves")
    result = generate(checkpoint, tmp_path, **options)
    assert ("block_size" in options) == (result["metrics"]["vllm:num_preemptions"] > 0)
    assert_equal(reference, result)


REJECTED = {
    "int8 cache": (
        {},
        dict(kv_cache_dtype="int8_per_token_head", dtype="bfloat16"),
        "--kv-cache-dtype must be auto with Hy4",
    ),
    "a layer over all keys": (
        dict(layer_types=["full_attention", *["indexed_attention"] * 2]),
        {},
        "every layer of Hy4 must select its keys",
    ),
}


@pytest.mark.matrix
@pytest.mark.parametrize("keys, options, error", REJECTED.values(), ids=REJECTED)
def test_rejects_by_name(keys, options, error, tmp_path):
    checkpoint, _ = save_tiny(tmp_path / "halves")
    engine = run(checkpoint, tmp_path, hf_overrides=keys, **options)
    assert engine.returncode != 0
    assert f"custom_pypto_vllm: {error}" in engine.stderr + engine.stdout
