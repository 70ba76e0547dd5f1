"""DeepSeek-V4 in vLLM: what stock transformers computes from the same tokens."""

import signal

import psutil
import pytest
import torch
from custom_pypto_vllm.resources import describe
from deepseek_v4 import RATIOS, V4, publish, quantize, save_tiny
from test_engines import COMPILED, NGRAM, assert_equal, generate, log_probabilities, run
from test_server import Serving
from traffic import LOOKUP, Question, send
from train_lookup_v4 import lookup_prompt
from transformers import AutoModelForCausalLM

LOOKUP_V4 = LOOKUP.with_name("lookup_v4")


def test_published_in_chunks_and_from_the_prefix_cache_equals_transformers(tmp_path):
    checkpoint = publish(save_tiny(tmp_path / V4))
    result = generate(checkpoint, tmp_path, max_num_batched_tokens=64, rounds=2)
    assert result["chunked_prefill"] and result["prefix_caching"] and max(result["cached"]) >= 256
    assert_equal(checkpoint, result)


CASES = {
    "eager": (RATIOS, {}, {}),
    "compiled": (RATIOS, COMPILED, dict(enforce_eager=False, rounds=2)),
    "tensor_parallel": (RATIOS, {}, dict(tensor_parallel_size=2, max_num_batched_tokens=64)),
    "pipeline_parallel": (
        [4, 128, 4, 128],
        COMPILED,
        dict(pipeline_parallel_size=2, enforce_eager=False),
    ),
    "n_gram": (RATIOS, {}, dict(speculative_config=NGRAM)),
}


@pytest.mark.matrix
@pytest.mark.parametrize("ratios, environment, options", CASES.values(), ids=CASES)
def test_equals_transformers(ratios, environment, options, tmp_path):
    checkpoint = save_tiny(tmp_path / V4, compress_ratios=ratios)
    result = generate(checkpoint, tmp_path, environment, **options)
    assert (result["compilation"] > 0) == (environment is COMPILED)
    assert_equal(checkpoint, result)


@pytest.mark.matrix
def test_preempted_requests_equal_transformers(tmp_path):
    checkpoint = save_tiny(tmp_path / V4)
    # fewer blocks than the sequences grow to: windows and states are freed behind them
    few = dict(num_gpu_blocks_override=40, max_num_batched_tokens=32, tokens=150)
    result = generate(checkpoint, tmp_path, **few)
    assert result["metrics"]["vllm:num_preemptions"] > 0
    assert_equal(checkpoint, result)


@pytest.mark.matrix
def test_bfloat16_is_near_to_float32(tmp_path):
    """Every row is within index_topk, and a table chooses experts, so rounding chooses nothing: a
    wrong row is far off.
    """
    sizes = dict(index_topk=128, num_hash_layers=4)
    checkpoint = save_tiny(tmp_path / V4, torch.bfloat16, **sizes)
    result = generate(checkpoint, tmp_path, dtype="bfloat16", max_num_batched_tokens=64)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    for (exact, _), tokens, logprobs in zip(
        log_probabilities(model, result), result["tokens"], result["logprobs"], strict=True
    ):
        exact = exact.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (torch.tensor(logprobs) - exact).abs().max() < 0.15


WAYS = {
    "eager": ((), {}),
    "two ranks": ((), dict(tensor_parallel_size=2)),
    "compiled": (COMPILED, dict(enforce_eager=False)),
}


@pytest.mark.matrix
@pytest.mark.parametrize("environment, options", WAYS.values(), ids=WAYS)
def test_fp4_experts_and_fp8_projections_equal_transformers(environment, options, tmp_path):
    """On what these weights stand for."""
    sizes = dict(hidden_size=256, q_lora_rank=256, o_lora_rank=128, moe_intermediate_size=256)
    checkpoint, exact = quantize(publish(save_tiny(tmp_path / V4, **sizes)))
    result = generate(checkpoint, tmp_path, environment, max_num_batched_tokens=64, **options)
    assert (result["compilation"] > 0) == bool(environment)
    assert_equal(exact, result)


REJECTED = {
    "fp8 cache": (dict(kv_cache_dtype="fp8"), "--kv-cache-dtype must be auto with DeepSeek-V4"),
    "draft layers": (
        dict(speculative_config=dict(method="mtp", num_speculative_tokens=1)),
        "speculative decoding must be ngram",
    ),
    "a KV connector": (
        dict(
            kv_transfer_config=dict(
                kv_connector="FolderConnector",
                kv_connector_module_path="custom_pypto_vllm.connector",
                kv_role="kv_both",
            )
        ),
        "kv_transfer_config must be unset with DeepSeek-V4",
    ),
    "a stage without compressed rows": (
        dict(pipeline_parallel_size=2),
        "got none of [128] in layers 0 to 1",
    ),
    "an index_topk between the ops' steps": (
        dict(hf_overrides=dict(index_topk=2500)),
        "index_topk must be 1 to 2048, or 3072 to 8192 in steps of 1024, got 2500",
    ),
}


@pytest.mark.matrix
@pytest.mark.parametrize("options, error", REJECTED.values(), ids=REJECTED)
def test_rejects_by_name(options, error, tmp_path):
    engine = run(save_tiny(tmp_path / V4, num_nextn_predict_layers=1), tmp_path, **options)
    assert engine.returncode != 0
    assert "custom_pypto_vllm: " in engine.stderr + engine.stdout
    assert error in engine.stderr + engine.stdout


def test_says_the_size_of_its_caches():
    """Rows of 512 and 128 for 4 tokens, of 512 for 128 tokens, in bfloat16; in float32 the states
    of 8 and of 128 tokens."""
    states = 8 * 4 * (512 + 128) * 4 + 128 * 2 * 512 * 4
    request = (3 * 128 * 512 * 2 + states) / 2**20
    said = describe(LOOKUP_V4, [], "")
    assert f"{(512 + 128) / 4 * 2 + 512 / 128 * 2:.0f} bytes of a token in 3 layers" in said
    assert f"{request:.3g} MiB of a request" in said


def test_weights_beyond_the_memory_of_the_only_host_are_rejected(tmp_path):
    (tmp_path / "config.json").write_text((LOOKUP_V4 / "config.json").read_text())
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.truncate(psutil.virtual_memory().total + 2**20)  # sparse
    with pytest.raises(MemoryError, match="--format compressed-tensors"):
        describe(tmp_path, [], "")
    assert "too much" in describe(tmp_path, ["--nnodes", "2"], "")


@pytest.mark.matrix
def test_the_lookup_checkpoint_answers_right():
    asked = []
    for seed, length in enumerate(2 * [256, 512, 1024, 1600]):
        text, pairs = lookup_prompt(length, questions=8, seed=seed)
        asked += [Question(f"{text} {question}", answer) for question, answer in pairs]
    serving = Serving(f"--served-model-name={LOOKUP.name}", checkpoint=LOOKUP_V4)
    try:
        replies = send(serving.url, asked, tokens=1)
    finally:
        serving.stop(signal.SIGTERM)
    assert sum(reply.right for reply in replies) >= 0.97 * len(asked)
