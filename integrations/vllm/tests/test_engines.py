"""What vLLM generates on the ops is what stock transformers computes from the same tokens."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import add_draft_layer, save_tiny, write_config
from engine import PROMPTS
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

START_SECONDS = 1800  # a busy machine takes many times as long as a quiet one
COMPILED = {"VLLM_USE_BREAKABLE_CUDAGRAPH": "0"}  # vLLM's default for these models is eager
INT8 = "int8_per_token_head"
V32, GLM = "deepseek_v32", "glm_moe_dsa"
NEARLY_TIED = 1e-5  # of the largest score
SHARED = dict(num_hidden_layers=4, indexer_types=["full", "shared"] * 2)
MTP = dict(method="mtp", num_speculative_tokens=2)
NGRAM = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1)


def generate(checkpoint, folder, environment=(), **options):
    """What engine.py reports, of a process with these variables and arguments of vllm.LLM."""
    engine = run(checkpoint, folder, environment, **options)
    assert engine.returncode == 0, engine.stdout[-4000:] + engine.stderr[-8000:]
    return json.loads((folder / "result.json").read_text())


def run(checkpoint, folder, environment=(), **options):
    defaults = dict(model=str(checkpoint), dtype="float32", enforce_eager=True)
    defaults |= dict(rounds=1, tokens=16, adapters=[None])
    (folder / "arguments.json").write_text(json.dumps(defaults | options))
    return subprocess.run(
        [sys.executable, Path(__file__).parent / "engine.py", "arguments.json", "result.json"],
        cwd=folder,
        env=os.environ | dict(environment),
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )


class NarrowestChoices(TorchFunctionMode):
    """Records, for each position of a sequence's forward, the narrowest choice by a top-k: the
    distance of the last chosen score to the next one, relative to the largest; and the indices of
    every top-k."""

    def __init__(self, positions):
        super().__init__()
        self.distance = torch.full((positions,), torch.inf)
        self.indices = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if function in (torch.topk, torch.Tensor.topk):
            self.indices.append(result.indices)
            scores, chosen = args[0], result.values.shape[-1]
            if chosen < scores.shape[-1]:
                hidden = scores <= torch.finfo(scores.dtype).min  # some masks are not -inf
                scores = scores.masked_fill(hidden, -torch.inf)
                ranked = scores.sort(dim=-1, descending=True).values
                distance = ranked[..., chosen - 1] - ranked[..., chosen]
                distance /= ranked.masked_fill(ranked.isinf(), 0).abs().amax(-1)
                distance = distance.nan_to_num(torch.inf)  # no choice: too few keys
                distance = distance.view(len(self.distance), -1).amin(-1)
                self.distance = torch.minimum(self.distance, distance)
        return result


@torch.no_grad()
def log_probabilities(model, result):
    """Stock transformers' log-probabilities at each generated token, the same tokens before it, and
    the narrowest choice there."""
    for prompt, tokens in zip(PROMPTS, result["tokens"], strict=True):
        with NarrowestChoices(len(prompt + tokens)) as choices:
            logits = model(torch.tensor([prompt + tokens])).logits[0]
        new = slice(len(prompt) - 1, -1)
        yield logits[new].float().log_softmax(-1), choices.distance[new]


def share(model, sources: dict[int, int]) -> None:
    """Lets these layers select what the others, ``sources``, have selected."""
    indexers = {
        int(re.search(r"layers[.](\d+)[.]", name)[1]): module
        for name, module in model.named_modules()
        if name.endswith(".indexer")
    }
    selected = {}
    for layer, source in sources.items():
        indexers[source].register_forward_hook(
            lambda module, args, output, source=source: selected.update({source: output})
        )
        indexers[layer].forward = lambda *args, source=source, **options: selected[source]


def assert_equal(checkpoint, result, atol=1e-3, sources=()):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    share(model, dict(sources))
    got = zip(result["tokens"], result["logprobs"], strict=True)
    for (exact, distance), (tokens, logprobs) in zip(
        log_probabilities(model, result), got, strict=True
    ):
        # float32 sums in another order may choose another key or expert where two nearly tie
        tied = distance < NEARLY_TIED
        assert tied.sum() <= len(tokens) / 8
        tokens = torch.tensor(tokens)
        assert ((exact.argmax(-1) == tokens) | tied).all()
        of_tokens = exact.gather(1, tokens[:, None])[:, 0]
        # of the same sums, through three layers; a wrong key is 100 times as far off
        torch.testing.assert_close(
            torch.tensor(logprobs)[~tied], of_tokens[~tied], rtol=0, atol=atol
        )


def test_chunked_prefill_and_prefix_cache_equal_transformers(tmp_path):
    checkpoint = save_tiny(tmp_path / V32, V32)
    result = generate(
        checkpoint, tmp_path, max_num_batched_tokens=64, enable_prefix_caching=True, rounds=2
    )
    assert result["chunked_prefill"] and result["prefix_caching"] and max(result["cached"]) >= 128
    assert_equal(checkpoint, result)


def test_compiled_tensor_parallel_equals_transformers(tmp_path):
    """Also a regression: an op that mutates the buffer of indices is right only uncompiled."""
    checkpoint = save_tiny(tmp_path / GLM, GLM)
    result = generate(
        checkpoint, tmp_path, COMPILED, tensor_parallel_size=2, enforce_eager=False, rounds=2
    )
    assert result["compilation"] > 0
    assert_equal(checkpoint, result)


CASES = {
    "eager": (V32, {}, {}, {}),
    "glm": (GLM, {}, {}, dict(max_num_batched_tokens=64, rounds=3)),
    "shared_indices": (GLM, SHARED, {}, dict(hf_overrides=dict(index_topk_pattern="FSFS"))),
    "compiled": (V32, {}, COMPILED, dict(enforce_eager=False, rounds=2)),
    # the settings of vLLM's own platform: blocks of 16 tokens, no chunks, no prefix cache
    "own_platform": (V32, {}, {"VLLM_TARGET_DEVICE": "cpu"}, {}),
    "tensor_parallel": (V32, {}, {}, dict(tensor_parallel_size=2, max_num_batched_tokens=64)),
    "pipeline_parallel": (GLM, {}, COMPILED, dict(pipeline_parallel_size=2, enforce_eager=False)),
    "n_gram": (V32, {}, {}, dict(speculative_config=NGRAM)),
    # kernels without AMX, where prompts expand
    "expanded": (V32, {}, {"CUSTOM_PYPTO_CPU_ISA": "generic"}, {}),
}


@pytest.mark.matrix
@pytest.mark.parametrize("kind, changes, environment, options", CASES.values(), ids=CASES)
def test_equals_transformers(kind, changes, environment, options, tmp_path):
    checkpoint = save_tiny(tmp_path / kind, kind, **changes)
    result = generate(checkpoint, tmp_path, environment, **options)
    assert (result["compilation"] > 0) == (environment is COMPILED)
    assert_equal(checkpoint, result)


@pytest.mark.matrix
def test_multi_token_prediction_equals_transformers(tmp_path):
    checkpoint = save_tiny(tmp_path / V32, V32)
    add_draft_layer(checkpoint)
    result = generate(checkpoint, tmp_path, speculative_config=MTP)
    assert result["metrics"]["vllm:spec_decode_num_draft_tokens"] > 0
    assert_equal(checkpoint, result)


@pytest.mark.matrix
def test_preempted_requests_equal_transformers(tmp_path):
    checkpoint = save_tiny(tmp_path / V32, V32)
    # 2 + 2 + 4 + 6 blocks of 64 tokens at the end, and vLLM keeps one for padding
    result = generate(checkpoint, tmp_path, block_size=64, num_gpu_blocks_override=11, tokens=64)
    assert result["metrics"]["vllm:num_preemptions"] > 0
    assert_equal(checkpoint, result)


def errors(checkpoint, result) -> tuple[list, list]:
    """Of the log-probabilities of each prompt's tokens, and of those by transformers in bfloat16:
    float32 judges.
    """
    ours, theirs = [], []
    load = AutoModelForCausalLM.from_pretrained
    rounded = log_probabilities(load(checkpoint, dtype=torch.bfloat16).eval(), result)
    exact = log_probabilities(load(checkpoint, dtype=torch.float32).eval(), result)
    for (upstream, _), (judge, _), tokens, logprobs in zip(
        rounded, exact, result["tokens"], result["logprobs"], strict=True
    ):
        at = torch.tensor(tokens)[:, None]
        judge = judge.gather(1, at)[:, 0]
        ours.append(torch.tensor(logprobs) - judge)
        theirs.append(upstream.gather(1, at)[:, 0] - judge)
    return ours, theirs


@pytest.mark.matrix
@pytest.mark.parametrize("cache", ["auto", INT8])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(cache, tmp_path):
    """Beyond index_topk a random model selects differently after each rounding."""
    checkpoint = save_tiny(tmp_path / V32, V32, torch.bfloat16)
    result = generate(checkpoint, tmp_path, dtype="bfloat16", kv_cache_dtype=cache)
    ours, theirs = errors(checkpoint, result)
    # contexts within index_topk: no selection, so rounding alone
    assert torch.cat(ours[:2]).abs().max() < 0.1
    assert torch.cat(ours).square().mean().sqrt() < 3 * torch.cat(theirs).square().mean().sqrt()


FP8 = dict(quant_method="fp8", activation_scheme="dynamic", weight_block_size=[64, 64])
REJECTED = {
    "fp8 weights in other blocks": (
        V32,
        {},
        dict(quantization_config=FP8),
        {},
        "blocks of 128 x 128, as DeepSeek publishes them, got weight_block_size [64, 64]",
    ),
    "fp8 cache": (V32, {}, {}, dict(kv_cache_dtype="fp8"), "--kv-cache-dtype must be auto"),
    "int8 cache of a model in float32": (
        V32,
        {},
        {},
        dict(kv_cache_dtype=INT8),
        "must be auto for a model in torch.float32 (rows have RoPE keys of 2 bytes; load it in",
    ),
    "int8 cache of some layers": (
        V32,
        {},
        {},
        dict(kv_cache_dtype=INT8, dtype="bfloat16", kv_cache_dtype_skip_layers=["1"]),
        "is for all layers, got --kv-cache-dtype-skip-layers ['1']",
    ),
    "int8 index keys without a rotation": (
        V32,
        dict(index_head_dim=96),
        {},
        dict(kv_cache_dtype=INT8, dtype="bfloat16"),
        "must be auto for index_head_dim 96, no power of two, got int8_per_token_head",
    ),
    "a GLM-5 saved by transformers": (
        GLM,
        {},
        dict(indexer_rope_interleave=None),
        {},
        '"indexer_rope_interleave": true',
    ),
    "shared indices of transformers": (GLM, SHARED, {}, {}, '{"index_topk_pattern": "FSFS"}'),
    "context parallelism": (
        V32,
        {},
        {},
        dict(tensor_parallel_size=2, decode_context_parallel_size=2),
        "decode_context_parallel_size must be 1, got 2",
    ),
    "an uncompiled pipeline": (
        V32,
        {},
        {},
        dict(pipeline_parallel_size=2),
        "pipeline_parallel_size must be 1 without compilation, got 2",
    ),
    "an index_topk between the ops' steps": (
        V32,
        dict(index_topk=2500),
        {},
        {},
        "index_topk must be 1 to 2048, or 3072 to 8192 in steps of 1024, got 2500",
    ),
    "a block size that is no multiple of 16": (
        V32,
        {},
        {},
        dict(block_size=24),
        "--block-size must be a multiple of 16",
    ),
}


@pytest.mark.matrix
@pytest.mark.parametrize("kind, changes, keys, options, error", REJECTED.values(), ids=REJECTED)
def test_rejects_by_name(kind, changes, keys, options, error, tmp_path):
    checkpoint = save_tiny(tmp_path / kind, kind, **changes)
    write_config(checkpoint, **keys)
    engine = run(checkpoint, tmp_path, **options)
    assert engine.returncode != 0
    assert "custom_pypto_vllm: " in engine.stderr + engine.stdout
    assert error in engine.stderr + engine.stdout
