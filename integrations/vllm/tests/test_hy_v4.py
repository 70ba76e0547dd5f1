"""Hy4 in vLLM: what stock transformers computes with the same weights."""

import pytest
from checkpoints import save_adapter
from hy_v4 import save_tiny
from test_engines import NGRAM, assert_equal, generate, run


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


@pytest.mark.matrix
def test_each_request_equals_transformers_with_its_adapter_merged(tmp_path):
    checkpoint, reference = save_tiny(tmp_path / "halves", mlp_layer_types=["dense"] * 3)
    merged = tmp_path / "merged"
    # neither of them is rotated, so that both checkpoints take the same adapter
    adapter = save_adapter(tmp_path / "adapter", reference, merged, ("o_proj", "q_a_proj"))
    adapters = [str(adapter), None]
    result = generate(checkpoint, tmp_path, enable_lora=True, adapters=adapters)
    for number, wanted in enumerate((merged, reference)):
        own = {key: result[key][number::2] for key in ("tokens", "logprobs")}
        assert_equal(wanted, own)


@pytest.mark.matrix
def test_the_adapter_of_a_smaller_model_is_rejected(tmp_path):
    checkpoint, _ = save_tiny(tmp_path / "halves", mlp_layer_types=["dense"] * 3)
    _, other = save_tiny(tmp_path / "other" / "halves", hidden_size=64)
    adapter = save_adapter(tmp_path / "adapter", other, tmp_path / "merged")
    engine = run(checkpoint, tmp_path, enable_lora=True, adapters=[str(adapter)])
    assert engine.returncode != 0
    error = "lora_B (128, 8) for model.layers.0.self_attn.o_proj, got (8, 128) and (64, 8)"
    assert error in engine.stderr + engine.stdout


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
