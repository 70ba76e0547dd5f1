"""Layers that share the selection of an earlier one (IndexCache): what stock transformers computes
whose indexers are told the same, by the keys that vLLM takes."""

import deepseek_v4
import hy_v4
import pytest
from checkpoints import save_tiny
from custom_pypto_vllm.config import sharing
from custom_pypto_vllm.resources import describe
from deepseek_v4 import V4
from test_engines import COMPILED, GLM, V32, assert_equal, generate, run

RATIOS = [4, 128, 4, 4, 0, 4]
CASES = {
    "freq": (V32, dict(num_hidden_layers=4), dict(index_topk_freq=2), {2: 1}, {}),
    "pattern": (V32, {}, dict(use_index_cache=True, index_topk_pattern="FSS"), {1: 0, 2: 0}, {}),
    "tensor_parallel": (
        V32,
        {},
        dict(index_topk_pattern="FSS"),
        {1: 0, 2: 0},
        dict(tensor_parallel_size=2, max_num_batched_tokens=64),
    ),
    "deepseek_v4": (V4, {}, dict(index_topk_freq=2), {3: 2}, dict(max_num_batched_tokens=64)),
    "deepseek_v4, by a pattern": (
        V4,
        {},
        dict(use_index_cache=True, index_topk_pattern="FSSF"),
        {2: 0, 3: 0},
        dict(rounds=2),
    ),
    "deepseek_v4, compiled": (
        V4,
        {},
        dict(index_topk_pattern="FSSS"),
        {2: 0, 3: 0, 5: 0},
        dict(enforce_eager=False),
    ),
}


def made(kind, folder, changes):
    if kind == V4:
        sizes = dict(num_hidden_layers=len(RATIOS), compress_ratios=RATIOS)
        return deepseek_v4.save_tiny(folder / V4, **sizes | changes)
    return save_tiny(folder / kind, kind, **changes)


@pytest.mark.matrix
@pytest.mark.parametrize("kind, changes, keys, sources, options", CASES.values(), ids=CASES)
def test_equals_transformers(kind, changes, keys, sources, options, tmp_path):
    checkpoint = made(kind, tmp_path, changes)
    environment = {} if options.get("enforce_eager", True) else COMPILED
    result = generate(checkpoint, tmp_path, environment, hf_overrides=keys, **options)
    assert_equal(checkpoint, result, sources=sources)
    with pytest.raises(AssertionError):  # nor is it what layers select that share nothing
        assert_equal(checkpoint, result)


@pytest.mark.matrix
def test_hy4_shares_more_than_its_config_says(tmp_path):
    checkpoint, reference = hy_v4.save_tiny(
        tmp_path / "halves", num_hidden_layers=4, indexer_types=["full", "full", "shared", "full"]
    )
    result = generate(checkpoint, tmp_path, hf_overrides=dict(index_topk_pattern="FSSF"))
    assert_equal(reference, result, sources={1: 0})


REJECTED = {
    "a first layer that shares": (V32, {}, dict(index_topk_pattern="SFF"), {}, "the first layer"),
    "a pattern of another length": (
        V32,
        {},
        dict(index_topk_pattern="FS"),
        {},
        "config.index_topk_pattern must have a letter F or S for each of 3 layers",
    ),
    "a frequency of 0": (V32, {}, dict(index_topk_freq=0), {}, "index_topk_freq must be at least"),
    "a layer without an indexer": (
        GLM,
        dict(indexer_types=["full", "shared", "full"]),
        dict(index_topk_pattern="FFS"),
        {},
        "config.index_topk_pattern must let layers [1] share a selection",
    ),
    "a key that vLLM does not read": (
        V32,
        {},
        dict(use_index_cache=False, index_topk_freq=2),
        {},
        "use_index_cache must not be false with index_topk_freq",
    ),
    "letters of another alphabet": (
        V4,
        {},
        dict(index_topk_pattern="FXXF"),
        {},
        "must have a letter F or S for each of 4 (layers that select keys) or 6 layers",
    ),
    "a stage of a pipeline": (
        V32,
        dict(num_hidden_layers=4),
        dict(index_topk_pattern="FSSF"),
        dict(pipeline_parallel_size=2),
        "got layers [2] of stage 1 without layer 0",
    ),
}


@pytest.mark.matrix
@pytest.mark.parametrize("kind, changes, keys, options, error", REJECTED.values(), ids=REJECTED)
def test_rejects_by_name(kind, changes, keys, options, error, tmp_path):
    engine = run(made(kind, tmp_path, changes), tmp_path, hf_overrides=keys, **options)
    assert engine.returncode != 0
    assert "custom_pypto_vllm: " in engine.stderr + engine.stdout
    assert error in engine.stderr + engine.stdout


def test_a_server_says_how_many_bytes_a_token_takes(tmp_path):
    """Of DeepSeek-V3.2 in float32: latents and RoPE keys in every layer, index keys in one."""
    checkpoint = save_tiny(tmp_path / V32, V32)
    row, index = (512 + 64) * 4, 128 * 4
    assert f"{3 * (row + index):,} bytes in 3 layers" in describe(checkpoint, [], "")
    shared = ["--hf-overrides", '{"index_topk_pattern": "FSS"}']
    assert f"{3 * row + index:,} bytes in 3 layers" in describe(checkpoint, shared, "")


def test_keys_mean_what_they_mean_for_models():
    config = dict(model_type=V4, num_hidden_layers=6, compress_ratios=[*RATIOS, 4])
    assert sharing(config) == {}
    assert sharing(config | dict(index_topk_freq=3)) == {3: 2, 5: 2}
    assert sharing(config | dict(index_topk_pattern="FFSSFS")) == {2: 0, 3: 0, 5: 0}
    assert sharing(config | dict(index_topk_freq=3, use_index_cache=False)) == {}
    hy4 = dict(model_type="hy_v4", num_hidden_layers=3, indexer_types=["full", "shared", "full"])
    assert sharing(hy4) == {1: 0}
    assert sharing(hy4 | dict(index_topk_pattern="FSS")) == {1: 0, 2: 0}
