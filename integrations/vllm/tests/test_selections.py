"""Selections of requests are those that stock transformers makes of the same tokens."""

import base64
import io
import os
import re
import signal
import subprocess

import deepseek_v4
import httpx
import hy_v4
import numpy as np
import pytest
import test_engines
import torch
from checkpoints import INDEX_TOPK, save_tiny
from custom_pypto_vllm.selections import WORKER
from engine import PROMPTS
from test_engines import NEARLY_TIED, V32, NarrowestChoices, generate
from test_server import SMALL, Serving
from torch import Tensor
from traffic import LOOKUP, ROOT
from transformers import AutoModelForCausalLM

MODELS = ROOT / ".venv" / "bin" / "python"  # transformers is too new for vLLM there


def assert_selected(got: np.ndarray, indices: list, distance: Tensor, count: int, ratio) -> None:
    """``got [tokens, layers, count]`` has the rows of ``indices`` that each token sees."""
    tokens = len(got)
    assert got.shape == (tokens, len(indices), count) and got.dtype == np.int32
    for layer, of_layer in enumerate(indices):
        for token in range(tokens):
            if distance[token] >= NEARLY_TIED:
                mine = got[token, layer][got[token, layer] >= 0]
                theirs = of_layer.view(tokens, -1)[token]
                assert sorted(mine) == sorted(theirs[theirs < (token + 1) // ratio].tolist())


@torch.no_grad()
def assert_recorded(
    checkpoint, folder, count: int, *, ratio=1, reference=None, environment=(), **options
) -> None:
    """A model without a top-k but those of its indexers, of rows of so many tokens, selects as
    transformers does, with the checkpoint ``reference`` if that is another one."""
    recording = dict(worker_extension_cls=WORKER, enable_prefix_caching=False)
    recording["selections"] = str(folder / "selections.npz")
    result = generate(checkpoint, folder, environment, **recording, **options)
    load = AutoModelForCausalLM.from_pretrained
    model = load(reference or checkpoint, dtype=torch.float32).eval()
    taken = np.load(folder / "selections.npz")
    assert len(taken.files) == len(PROMPTS)
    for name, prompt, tokens in zip(taken.files, PROMPTS, result["tokens"], strict=True):
        ids = (prompt + tokens)[:-1]
        with NarrowestChoices(len(ids)) as choices:
            model(torch.tensor([ids]))
        assert (choices.distance < NEARLY_TIED).sum() <= len(ids) / 8
        assert_selected(taken[name], choices.indices, choices.distance, count, ratio)


SAME = ("shared_indices", "tensor_parallel", "pipeline_parallel", "n_gram")
CASES = {name: test_engines.CASES[name] for name in SAME} | {
    "chunks": (V32, {}, {}, dict(max_num_batched_tokens=64, rounds=2)),
    "preempted": (V32, {}, {}, dict(block_size=64, num_gpu_blocks_override=11, tokens=64)),
}


@pytest.mark.matrix
@pytest.mark.parametrize("kind, changes, environment, options", CASES.values(), ids=CASES)
def test_are_those_of_transformers(kind, changes, environment, options, tmp_path):
    # without experts, which are chosen by a top-k, too
    checkpoint = save_tiny(tmp_path / kind, kind, first_k_dense_replace=9, **changes)
    assert_recorded(checkpoint, tmp_path, INDEX_TOPK, environment=environment, **options)


@pytest.mark.matrix
def test_rows_of_deepseek_v4_are_those_of_transformers(tmp_path):
    # with experts by a table
    checkpoint = deepseek_v4.save_tiny(tmp_path / "v4", num_hash_layers=4)
    assert_recorded(checkpoint, tmp_path, count=32, ratio=4, max_num_batched_tokens=64)


@pytest.mark.matrix
def test_those_of_hy4_are_those_of_transformers(tmp_path):
    checkpoint, reference = hy_v4.save_tiny(tmp_path / "halves", mlp_layer_types=["dense"] * 3)
    assert_recorded(checkpoint, tmp_path, INDEX_TOPK, reference=reference)


@pytest.mark.matrix
def test_a_reply_has_the_selections_of_each_choice():
    serving = Serving("--enable-return-indexer-topk")
    request = dict(model=LOOKUP.name, prompt=[SMALL, SMALL], max_tokens=3, temperature=1, n=2)
    request |= dict(return_token_ids=True, ignore_eos=True)
    try:
        url = f"{serving.url}/v1/completions"
        choices = httpx.post(url, json=request, timeout=600).json()["choices"]
        plain = httpx.post(url, json=request | dict(return_token_ids=False), timeout=600).json()
        bad = httpx.post(url, json=request | dict(max_tokens=-1), timeout=600)
    finally:
        serving.stop(signal.SIGTERM)
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert bad.status_code == 400 and "indexer_topk" not in plain["choices"][0]
    for choice in choices:
        indices = np.load(io.BytesIO(base64.b64decode(choice["indexer_topk"])))
        tokens = len(choice["prompt_token_ids"]) + len(choice["token_ids"]) - 1
        assert indices.shape == (tokens, 2, 16) and indices.dtype == np.int32
        assert (np.sort(indices[-1, 0]) == np.unique(indices[-1, 0])).all()
        assert indices.max() == tokens - 1 and (indices[0, :, 0] == 0).all()


@pytest.mark.matrix
@pytest.mark.skipif(
    not MODELS.exists(), reason="needs .venv: build_and_install.sh --editable models"
)
def test_training_replays_what_a_server_selected():
    serving = Serving("--enable-return-indexer-topk", "--dtype=float32")
    try:
        example = [MODELS, ROOT / "examples" / "replay_served.py", "--url", serving.url]
        environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        run = subprocess.run(example, env=environment, capture_output=True, text=True)
    finally:
        serving.stop(signal.SIGTERM)
    assert run.returncode == 0, run.stderr
    own, total = map(int, re.search(r"(\d+) of (\d+) are the model's own", run.stdout).groups())
    assert own >= 0.999 * total  # all but near ties
    assert re.search(r"replay, other indexer .* equal to the bit", run.stdout), run.stdout
    log_ratios = [float(x) for x in re.findall(r"log-ratio\| (\S+?),?\s", run.stdout)]
    replayed, _, without = log_ratios
    assert replayed < 1e-4 < 0.1 < without


def test_a_prefix_cache_is_rejected(tmp_path):
    checkpoint = save_tiny(tmp_path / V32, V32)
    with pytest.raises(AssertionError, match="not recorded with --enable-prefix-caching"):
        generate(checkpoint, tmp_path, worker_extension_cls=WORKER, selections="x.npz")
