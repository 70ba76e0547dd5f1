"""Caches in int8: as near to float32 as rounding allows, with whatever vLLM does to a cache; and
with a format that a test adds."""

import signal

import pytest
import torch
from checkpoints import add_draft_layer, save_tiny
from test_engines import COMPILED, GLM, INT8, MTP, V32, errors, generate
from test_server import Serving, cache_tokens
from traffic import metric, questions, send

BYTES = {"auto": 1408, INT8: 786}  # of a token and layer at the sizes of DeepSeek-V3.2
CASES = {
    "chunks": (V32, {}, dict(max_num_batched_tokens=64, rounds=2, enable_prefix_caching=True)),
    "preempted": (V32, {}, dict(block_size=64, num_gpu_blocks_override=11, tokens=64)),
    "tensor_parallel": (GLM, {}, dict(tensor_parallel_size=2)),
    "compiled": (GLM, COMPILED, dict(enforce_eager=False)),
    "mtp": (V32, {}, dict(speculative_config=MTP)),
    "float8": (V32, {}, dict(kv_cache_dtype="fp8", worker_extension_cls="float8.Worker")),
}


@pytest.mark.matrix
@pytest.mark.parametrize("kind, environment, options", CASES.values(), ids=CASES)
def test_is_near_to_float32(kind, environment, options, tmp_path):
    """All keys are within index_topk, and no layer has experts, so rounding chooses nothing: a
    wrong row is far off.
    """
    sizes = dict(index_topk=512, first_k_dense_replace=9)
    checkpoint = save_tiny(tmp_path / kind, kind, torch.bfloat16, **sizes)
    if "speculative_config" in options:
        add_draft_layer(checkpoint)
    options = dict(dtype="bfloat16", kv_cache_dtype=INT8) | options
    result = generate(checkpoint, tmp_path, environment, **options)
    ours, _ = errors(checkpoint, result)
    # fp8 rounds to 1/16 of a value, int8 to 1/254 of the largest of 128
    bound = 0.15 if options["kv_cache_dtype"] == INT8 else 0.6
    assert torch.cat(ours).abs().max() < bound
    if "rounds" in options:
        assert max(result["cached"]) >= 128
    if "num_gpu_blocks_override" in options:
        assert result["metrics"]["vllm:num_preemptions"] > 0


def test_a_gib_holds_more_tokens(tmp_path):
    checkpoint = save_tiny(tmp_path / V32, V32, torch.bfloat16)
    space = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    for cache, size in BYTES.items():
        result = generate(checkpoint, tmp_path, space, dtype="bfloat16", kv_cache_dtype=cache)
        tokens = result["blocks"] * result["block_size"]
        assert tokens == pytest.approx(2**30 / 3 / size, rel=1e-3)  # three layers


@pytest.mark.matrix
def test_the_lookup_checkpoint_answers_right():
    serving = Serving(f"--kv-cache-dtype={INT8}")
    try:
        replies = send(serving.url, questions(), tokens=1)
        assert metric(serving.url, "vllm:prefix_cache_hits_total") > 0
        said, has = cache_tokens(serving)
        assert has == pytest.approx(said, rel=1e-3)
    finally:
        serving.stop(signal.SIGTERM)
    assert sum(reply.right for reply in replies) >= 0.97 * len(replies)  # in bfloat16: 0.99
