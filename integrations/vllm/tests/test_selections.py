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
from custom_pypto_vllm.selections import WORKER, take
from engine import PROMPTS
from test_engines import GLM, NEARLY_TIED, V32, NarrowestChoices, generate
from test_server import SMALL, Serving
from torch import Tensor
from traffic import LOOKUP, ROOT
from transformers import AutoModelForCausalLM

MODELS = ROOT / ".venv" / "bin" / "python"  # transformers is too new for vLLM there


def assert_selected(got: np.ndarray, indices: list, distance: Tensor, count: int, ratio) -> None:
    """``got [tokens, layers, count]`` has the rows of ``indices`` that each token sees."""
    tokens = len(got)
    assert got.shape == (tokens, len(indices), count) and got.dtype == np.int16
    for layer, of_layer in enumerate(indices):
        for token in range(tokens):
            if distance[token] >= NEARLY_TIED:
                mine = got[token, layer][got[token, layer] >= 0]
                theirs = of_layer.view(tokens, -1)[token]
                assert sorted(mine) == sorted(theirs[theirs < (token + 1) // ratio].tolist())


@torch.no_grad()
def assert_recorded(
    checkpoint, folder, count: int, *, ratio=1, reference=None, environment=(), **options
) -> dict:
    """A model without a top-k but those of its indexers, of rows of so many tokens, selects as
    transformers does, with the checkpoint ``reference`` if that is another one."""
    recording = dict(worker_extension_cls=WORKER, selections=str(folder / "selections.npz"))
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
    return result


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
        assert indices.shape == (tokens, 2, 16) and indices.dtype == np.int16
        assert (np.sort(indices[-1, 0]) == np.unique(indices[-1, 0])).all()
        assert indices.max() == tokens - 1 and (indices[0, :, 0] == 0).all()


@pytest.mark.matrix
def test_a_reply_has_the_experts_of_each_choice():
    flags = "--enable-return-indexer-topk", "--enable-return-routed-experts"
    ids = [(7 * i + i * i % 11) % 50 + 5 for i in range(600)]
    request = dict(prompt=[ids, ids[:320]], max_tokens=3, ignore_eos=True, return_token_ids=True)
    replies = []
    for checkpoint in (LOOKUP.with_name("lookup_v4"), LOOKUP):
        serving = Serving(*flags, checkpoint=checkpoint)
        try:
            url, of_model = f"{serving.url}/v1/completions", dict(model=checkpoint.name)
            for _ in range(2):  # the second time behind a cached prefix
                replies.append(httpx.post(url, json=request | of_model, timeout=600))
        finally:
            serving.stop(signal.SIGTERM)
    assert [reply.status_code for reply in replies] == [200, 200, 500, 500]
    assert all("of models whose layers of experts" in reply.text for reply in replies[2:])
    found = []
    for choice in (choice for reply in replies[:2] for choice in reply.json()["choices"]):
        experts = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
        tokens = len(choice["prompt_token_ids"]) + len(choice["token_ids"]) - 1
        assert experts.shape == (tokens, 3, 2) and experts.dtype == np.uint8 and experts.max() == 3
        found.append(experts)
    assert all((one[:320] == found[0][:320]).all() for one in found)


def arrays(choice: dict) -> list[np.ndarray]:
    fields = choice["indexer_topk"], choice["routed_experts"]
    return [np.load(io.BytesIO(base64.b64decode(field))) for field in fields]


@pytest.mark.parametrize("start", [-1, 1.5, True, "1", None])
def test_a_start_that_is_no_number_of_tokens_is_rejected_before_anything_is_taken(start):
    with pytest.raises(ValueError, match="start must be a number of tokens from 0 on, got"):
        take(None, None, start)
    if start is not True:
        with pytest.raises(ValueError, match="implied must be true or false, got"):
            take(None, None, 0, start)


@pytest.mark.matrix
def test_a_reply_leaves_out_the_record_of_the_first_tokens_on_request():
    flags = "--enable-return-indexer-topk", "--enable-return-routed-experts"
    ids = [(7 * i + i * i % 11) % 50 + 5 for i in range(400)]
    request = dict(model="lookup_v4", prompt=ids, max_tokens=3, temperature=0, ignore_eos=True)
    serving = Serving(*flags, checkpoint=LOOKUP.with_name("lookup_v4"))

    def ask(**more) -> httpx.Response:
        url = f"{serving.url}/v1/completions"
        return httpx.post(url, json=request | dict(return_token_ids=True) | more, timeout=600)

    try:
        whole, *parts = (ask(record_start=n).json()["choices"][0] for n in (0, 1, 397, 402, 500))
        wrong = [ask(record_start=n) for n in (-1, 1.5, True, "1")]
        own = [ask(record_start=n, record_implied=False).json()["choices"][0] for n in (0, 9, 397)]
        unknown = [ask(record_implied=value) for value in (0, "no")]
    finally:
        serving.stop(signal.SIGTERM)
    # 16 rows of 4 tokens are all that the first 67 tokens see
    for start, part in zip((0, 9, 397), own, strict=True):
        (indices, experts), (all_indices, all_experts) = arrays(part), arrays(whole)
        assert np.array_equal(indices, all_indices[max(start, 67) :])
        assert np.array_equal(experts, all_experts[start:])
    assert all(reply.status_code == 400 for reply in unknown)
    assert "record_implied must be true or false, got 'no'" in unknown[1].text
    for start, part in zip((1, 397, 402, 500), parts, strict=True):
        assert part["token_ids"] == whole["token_ids"]
        for some, every in zip(arrays(part), arrays(whole), strict=True):
            assert len(every) == 402 and some.dtype == every.dtype
            assert np.array_equal(some, every[start:])
    told = "record_start must be a number of tokens from 0 on, got "
    assert all(reply.status_code == 400 and told in reply.text for reply in wrong)


@pytest.mark.matrix
@pytest.mark.skipif(
    not MODELS.exists(), reason="needs .venv: build_and_install.sh --editable models"
)
@pytest.mark.parametrize("experts", [False, True], ids=["selections", "experts"])
def test_training_replays_what_a_server_selected(experts):
    checkpoint = LOOKUP.with_name("lookup_v4") if experts else LOOKUP
    flags = ["--enable-return-routed-experts"] * experts
    serving = Serving(
        "--enable-return-indexer-topk", "--dtype=float32", *flags, checkpoint=checkpoint
    )
    try:
        example = [MODELS, ROOT / "examples" / "replay_served.py", "--url", serving.url]
        example += ["--model", checkpoint, "--prompt-tokens", "256"]
        environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        run = subprocess.run(example, env=environment, capture_output=True, text=True)
    finally:
        serving.stop(signal.SIGTERM)
    assert run.returncode == 0, run.stderr
    counts = re.findall(r"(\d+) of (\d+) are the model's own", run.stdout)
    assert len(counts) == 1 + experts
    assert all(int(own) >= 0.999 * int(total) for own, total in counts)  # all but near ties
    assert re.search(r"replay, other indexer .* equal to the bit", run.stdout), run.stdout
    log_ratios = [float(x) for x in re.findall(r"log-ratio\| (\S+?),?\s", run.stdout)]
    replayed, _, without = log_ratios
    assert replayed < 1e-4 < 0.1 < without


PREFIXES = dict(enable_prefix_caching=True, max_num_batched_tokens=64, rounds=2)


def test_a_cached_prefix_has_the_selections_of_who_computed_it(tmp_path):
    checkpoint = save_tiny(tmp_path / V32, V32, first_k_dense_replace=9)
    result = assert_recorded(checkpoint, tmp_path, INDEX_TOPK, **PREFIXES)
    assert max(result["cached"]) >= 128


@pytest.mark.matrix
def test_rows_of_deepseek_v4_behind_a_cached_prefix_are_those_of_transformers(tmp_path):
    checkpoint = deepseek_v4.save_tiny(tmp_path / "v4", num_hash_layers=4)
    result = assert_recorded(checkpoint, tmp_path, count=32, ratio=4, **PREFIXES)
    assert max(result["cached"]) >= 128


@torch.no_grad()
def assert_routed(checkpoint, folder, reference=None, **options) -> None:
    """Experts are those of transformers' routers, in the layers that have some."""
    recording = dict(worker_extension_cls=WORKER, selections="selections.npz", experts=True)
    result = generate(checkpoint, folder, **recording, **options)
    assert not options.get("enable_prefix_caching") or max(result["cached"]) >= 128
    load = AutoModelForCausalLM.from_pretrained
    model = load(reference or checkpoint, dtype=torch.float32).eval()
    chosen, taken = {}, np.load(folder / "experts.npz")
    for i, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(lambda _, x, out, i=i: chosen.update({i: out[2]}))
    assert len(taken.files) == len(PROMPTS)
    for name, prompt, tokens in zip(taken.files, PROMPTS, result["tokens"], strict=True):
        ids, experts = (prompt + tokens)[:-1], taken[name]
        with NarrowestChoices(len(ids)) as choices:
            model(torch.tensor([ids]))
        clear = (choices.distance >= NEARLY_TIED).numpy()
        assert clear.sum() >= len(ids) * 7 / 8
        assert experts.shape == (len(ids), len(model.model.layers), 2) and experts.dtype == np.uint8
        for layer in range(experts.shape[1]):
            got = np.sort(experts[:, layer], -1)
            want = np.sort(chosen[layer], -1) if layer in chosen else np.zeros_like(got)
            assert (got == want)[clear].all()


@pytest.mark.parametrize("kind", [V32, "deepseek_v4"])
def test_experts_are_those_of_transformers_behind_a_cached_prefix_too(kind, tmp_path):
    save = deepseek_v4.save_tiny if kind == "deepseek_v4" else lambda path: save_tiny(path, kind)
    assert_routed(save(tmp_path / kind), tmp_path, **PREFIXES)


@pytest.mark.matrix
def test_experts_of_hy4_are_those_of_transformers(tmp_path):
    checkpoint, reference = hy_v4.save_tiny(tmp_path / "halves")
    assert_routed(checkpoint, tmp_path, reference, **PREFIXES)


@pytest.mark.matrix
@pytest.mark.parametrize("options", [dict(tensor_parallel_size=2), dict(rounds=1)], ids=str)
def test_experts_of_ranks_and_without_a_prefix_cache_are_those_of_transformers(options, tmp_path):
    options |= dict(enable_prefix_caching=False)
    assert_routed(save_tiny(tmp_path / GLM, GLM), tmp_path, **options)


def test_experts_of_a_compiled_model_are_rejected(tmp_path):
    recording = dict(worker_extension_cls=WORKER, selections="x.npz", experts=True)
    with pytest.raises(AssertionError, match="not recorded without --enforce-eager"):
        checkpoint = save_tiny(tmp_path / V32, V32)
        generate(checkpoint, tmp_path, test_engines.COMPILED, enforce_eager=False, **recording)
