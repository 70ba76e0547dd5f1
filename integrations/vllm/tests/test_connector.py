"""An engine continues on the prompts that another one computed."""

from types import SimpleNamespace

import pytest
import torch
from checkpoints import save_tiny
from custom_pypto_vllm.connector import FolderConnector
from engine import PROMPTS
from safetensors import safe_open
from test_engines import GLM, INT8, V32, assert_equal, errors, generate
from transformers import DeepseekV32Config
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from custom_pypto.files import PARTIAL

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
    (folder / "shared" / f"x{PARTIAL}0123456789abcdef").touch()  # of an engine that was killed
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


def test_blocks_behind_those_that_the_engine_has_are_read(tmp_path):
    """vLLM counts the cached tokens of a request after it has asked the connector."""
    settings = KVTransferConfig(**connected(tmp_path, "kv_both")["kv_transfer_config"])
    config = SimpleNamespace(
        kv_transfer_config=settings,
        model_config=SimpleNamespace(hf_config=DeepseekV32Config(), dtype=torch.float32),
        cache_config=SimpleNamespace(block_size=SIZE, cache_dtype="auto"),
    )
    groups = SimpleNamespace(kv_cache_groups=[None])
    connector = FolderConnector(config, KVConnectorRole.SCHEDULER, groups)
    given = dict(lora_request=None, cache_salt=None, num_computed_tokens=0)
    request = SimpleNamespace(request_id="0", prompt_token_ids=PROMPTS[3], **given)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    names = connector.prompts["0"].names
    for name in names:
        connector.file(name).touch()
    tokens, _ = connector.get_num_new_matched_tokens(request, 3 * SIZE)
    assert tokens == (WHOLE[3] - 3) * SIZE
    ids = list(range(100, 120))
    blocks = SimpleNamespace(get_block_ids=lambda: (ids,))
    connector.update_state_after_alloc(request, blocks, tokens)
    assert connector.waiting == [*zip(names, ids, strict=False)][3 : WHOLE[3]]


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
