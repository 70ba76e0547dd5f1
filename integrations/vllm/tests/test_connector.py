"""An engine continues on the prompts that another one computed."""

import pytest
import torch
from checkpoints import save_tiny
from engine import PROMPTS
from safetensors import safe_open
from test_engines import GLM, INT8, V32, assert_equal, errors, generate

SIZE = 16
WHOLE = [(len(prompt) - 1) // SIZE for prompt in PROMPTS]
CHUNKS = dict(max_num_batched_tokens=64)


def connected(folder, role, **options):
    transfer = dict(
        kv_connector="FolderConnector",
        kv_connector_module_path="custom_pypto_vllm.connector",
        kv_role=role,
        kv_connector_extra_config={"path": str(folder / "shared")},
    )
    return dict(kv_transfer_config=transfer, block_size=SIZE) | options


def handed_over(checkpoint, folder, producer=None, consumer=None, **options):
    """What a consumer generates, and the files of the producer before it."""
    first = connected(folder, "kv_producer", **options, **producer or {})
    generate(checkpoint, folder, tokens=1, **first)
    files = sorted((folder / "shared").iterdir())
    second = connected(folder, "kv_consumer", **options, **consumer or {})
    result = generate(checkpoint, folder, enable_prefix_caching=False, **second)
    assert sorted((folder / "shared").iterdir()) == files
    assert len(files) == sum(WHOLE) and all(x.suffix == ".safetensors" for x in files)
    assert result["cached"] == [blocks * SIZE for blocks in WHOLE]
    return result, files


def test_a_consumer_continues_on_the_prompts_of_a_producer(tmp_path):
    checkpoint = save_tiny(tmp_path / V32, V32, torch.float32)
    result, files = handed_over(checkpoint, tmp_path, producer=CHUNKS)
    assert_equal(checkpoint, result)
    with safe_open(files[0], "pt") as file:
        assert len(file.keys()) == 6  # latents and index keys of three layers


def test_a_block_that_cannot_be_read_is_computed_again(tmp_path):
    checkpoint = save_tiny(tmp_path / V32, V32, torch.float32)
    generate(checkpoint, tmp_path, tokens=1, **connected(tmp_path, "kv_producer"))
    for file in (tmp_path / "shared").iterdir():
        file.write_bytes(file.read_bytes()[:100])
    options = connected(tmp_path, "kv_both")
    options["kv_transfer_config"]["kv_load_failure_policy"] = "recompute"
    assert_equal(checkpoint, generate(checkpoint, tmp_path, **options))


CASES = {
    "int8": (GLM, {}, {}, dict(dtype="bfloat16", kv_cache_dtype=INT8)),
    "to-more-ranks": (V32, {}, dict(tensor_parallel_size=2), {}),
    "to-fewer-ranks": (GLM, dict(tensor_parallel_size=2), {}, {}),
    "chunks": (V32, {}, dict(max_num_batched_tokens=64), {}),
}


@pytest.mark.matrix
@pytest.mark.parametrize("kind, producer, consumer, options", CASES.values(), ids=CASES)
def test_is_near_to_float32(kind, producer, consumer, options, tmp_path):
    """As in test_int8_caches.py: all keys are selected and no layer has experts, so that rounding
    chooses nothing."""
    sizes = dict(index_topk=512, first_k_dense_replace=9)
    checkpoint = save_tiny(tmp_path / kind, kind, torch.bfloat16, **sizes)
    result, _ = handed_over(checkpoint, tmp_path, producer, consumer, **options)
    ours, _ = errors(checkpoint, result)
    assert torch.cat(ours).abs().max() < 0.15
