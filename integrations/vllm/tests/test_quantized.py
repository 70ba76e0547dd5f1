"""Quantized weights in vLLM: equal to transformers on what they stand for, or rejected."""

import os
import shutil
import signal
import subprocess

import pytest
from checkpoints import add_draft_layer, save_tiny, write_config
from quantized import EXPERTS_ALONE, PLAIN, SCHEMES, compressed_tensors, exact_of, quantize
from test_engines import COMPILED, GLM, MTP, V32, assert_equal, generate, run
from test_selections import MODELS
from test_server import Serving
from traffic import LOOKUP, ROOT, questions, send

SIZES = dict(hidden_size=256, moe_intermediate_size=128, q_lora_rank=128)

CASES = {
    # the rest of W8A8 rounds activations, after which a random model selects other keys
    "W8A8 experts": (
        V32,
        "W8A8",
        EXPERTS_ALONE,
        dict(tensor_parallel_size=2, enable_expert_parallel=True),
    ),
    "W8A16": (GLM, "W8A16", PLAIN, {}),
    "W4A16": (V32, "W4A16", PLAIN, dict(tensor_parallel_size=2)),
    "fp8": (V32, "fp8", PLAIN, dict(max_num_batched_tokens=64, rounds=2)),
}


@pytest.mark.matrix
@pytest.mark.parametrize("kind, scheme, ignore, options", CASES.values(), ids=CASES)
def test_equals_transformers(kind, scheme, ignore, options, tmp_path):
    checkpoint, exact = quantize(save_tiny(tmp_path / kind, kind, **SIZES), scheme, ignore)
    result = generate(checkpoint, tmp_path, **options)
    assert_equal(exact, result)


needs_models = pytest.mark.skipif(
    not MODELS.exists(), reason="needs .venv: build_and_install.sh --editable models"
)


def converted(source, weights):
    """The checkpoint ``source`` as examples/convert_checkpoint.py writes it for vLLM."""
    checkpoint = source.with_name(f"{source.name}-{weights}")
    example = [MODELS, ROOT / "examples" / "convert_checkpoint.py", source, checkpoint]
    example += ["--weights", weights, "--format", "compressed-tensors"]
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(example, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return checkpoint


CONVERTED = {
    "int8, drafts": (V32, "int8", dict(speculative_config=MTP)),
    "int4": (GLM, "int4", dict(max_num_batched_tokens=64)),
}


@needs_models
@pytest.mark.matrix
@pytest.mark.parametrize("kind, weights, options", CONVERTED.values(), ids=CONVERTED)
def test_a_converted_checkpoint_equals_transformers(kind, weights, options, tmp_path):
    """That int8 stands for the values of ``models.load``: tests/test_converted_weights.py."""
    source = save_tiny(tmp_path / kind, kind, **SIZES)
    add_draft_layer(source)
    checkpoint = converted(source, weights)
    result = generate(checkpoint, tmp_path, **options)
    drafts = result["metrics"].get("vllm:spec_decode_num_draft_tokens", 0)
    assert (drafts > 0) == ("speculative_config" in options)
    # beyond 1e-3 where products of rows that the op rounds select another key for an earlier token
    assert_equal(exact_of(checkpoint), result, atol=1e-2)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "scheme",
    ["W8A8", "W4A16", *(pytest.param(kind, marks=needs_models) for kind in ("int8", "int4"))],
)
def test_the_lookup_checkpoint_answers_right(scheme, tmp_path):
    source = shutil.copytree(LOOKUP, tmp_path / LOOKUP.name)
    if scheme in SCHEMES:
        checkpoint, _ = quantize(source, scheme, [*PLAIN, r"re:.*kv_b_proj$"])
    else:
        checkpoint = converted(source, scheme)
    serving = Serving(f"--served-model-name={LOOKUP.name}", checkpoint=checkpoint)
    try:
        replies = send(serving.url, questions(), tokens=1)
    finally:
        serving.stop(signal.SIGTERM)
    assert sum(reply.right for reply in replies) >= 0.97 * len(replies)  # unquantized: 0.99


def quantization(scheme, ignore, **changes):
    """Of config.json alone: what is rejected is so before weights are read."""
    _, weights, activations = SCHEMES[scheme]
    return compressed_tensors(weights | changes, activations, ignore)


REJECTED = {
    "weights of custom_pypto.models": (
        dict(quant_method="custom_pypto", modules={"int4": ["model.layers.1.mlp.experts"]}),
        {},
        "SOURCE TARGET --weights int4 --format compressed-tensors",
    ),
    "W8A8 of kv_b_proj": (quantization("W8A8", PLAIN), {}, '"re:.*kv_b_proj" in `ignore`'),
    "the indexer's wk": (
        quantization("W4A16", [r"re:.*mlp\.gate$", "re:.*weights_proj$", "lm_head"]),
        {},
        '"re:.*indexer.wk" in `ignore`',
    ),
    "asymmetric experts": (
        quantization("W4A16", EXPERTS_ALONE, symmetric=False),
        {},
        "(both symmetric)",
    ),
    "experts in groups of 16": (quantization("W4A16", EXPERTS_ALONE, group_size=16), {}, "size=16"),
    "experts of a size between groups": (
        quantization("W4A16", EXPERTS_ALONE, group_size=96),
        {},
        "multiples of 96, got 256 and 128",
    ),
    "compilation": (
        quantization("W4A16", PLAIN),
        dict(environment=COMPILED, enforce_eager=False),
        "quantized weights must not be compiled",
    ),
}


@pytest.mark.matrix
@pytest.mark.parametrize("config, options, error", REJECTED.values(), ids=REJECTED)
def test_rejects_by_name(config, options, error, tmp_path):
    checkpoint = save_tiny(tmp_path / V32, V32, **SIZES)
    write_config(checkpoint, quantization_config=config)
    engine = run(checkpoint, tmp_path, **options)
    assert engine.returncode != 0
    assert "custom_pypto_vllm: " in engine.stderr + engine.stdout
    assert error in engine.stderr + engine.stdout
