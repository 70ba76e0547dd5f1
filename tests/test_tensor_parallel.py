"""Ranks that share a model compute what one process computes, and say so when they do not."""

import functools
import json
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch
from loading_harness import edit_json
from model_harness import assert_close
from processes import in_ranks
from tiny import SHARED, clear_case, tiny_config, tiny_model, token_ids
from torch.distributed.tensor import DTensor
from transformers import DynamicCache

from custom_pypto import models, npu
from custom_pypto.models import CACHE, latent_attention, sharing

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "integrations/vllm/tests"))
from second_host import NEAR, second_host  # noqa: E402

PREFILL, DECODE = 40, 4


@torch.no_grad()
def logits(model, ids, cache):
    """Of a prefill and of every decode step."""
    calls = ids.split([PREFILL, *[1] * DECODE], 1)
    return torch.cat([model(call, **{CACHE: cache}).logits for call in calls], 1)


def generated(model, ids):
    """The tokens that follow a batch, one row of it left-padded."""
    ids, mask = ids.clone(), torch.ones_like(ids)
    ids[1, :9], mask[1, :9] = 0, 0
    return model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)


def computed(model, ids):
    cache = models.PagedCache(model, len(ids), ids.size(1))
    return {"logits": logits(model, ids, cache), "tokens": generated(model, ids)}


def int8_index_rows(model, ids):
    """The cached index keys and scales of all tokens, after a prefill that selects by them."""
    cache = models.PagedCache(model, len(ids), ids.size(1), index_dtype=torch.int8)
    model(ids, cache=cache)
    return [
        pool[cache.block_table].flatten(1, 2)[:, : ids.size(1)]
        for layer in cache.layers
        for name, pool in layer.pools.items()
        if name in ("index", "index_scale")
    ]


def failure(call) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def work(rank: int, folder: Path):
    """What each of two ranks does, and notes in a file."""
    latent_attention.CHECK_RANKS = True  # as CUSTOM_PYPTO_CHECK_RANKS=1 does at the import
    ids = torch.load(folder / "ids.pt")
    seen = {"rejected": failure(lambda: models.load(folder / "3 heads", tensor_parallel=True))}
    for name, kind, options in [
        ("dtype", "deepseek_v32", {"dtype": ["float32", "bfloat16"][rank]}),
        ("layers", "deepseek_v32", {"num_hidden_layers": 2 + rank}),
        ("index_topk", f"index_topk {rank}", {}),
        ("values", f"values {rank}", {}),
        ("stops", f"stops {rank}", {}),
    ]:
        for way in ("tensor_parallel", "expert_parallel"):
            call = functools.partial(models.load, folder / kind, **{way: True}, **options)
            seen[name, way] = failure(call)
    for kind in SHARED:
        model = models.load(folder / kind, tensor_parallel=True)
        seen[kind] = computed(model, ids[kind])
        attention = model.model.layers[0].self_attn
        seen[kind]["class"] = type(attention).__name__
        weight = attention.kv_b_proj.weight
        seen[kind]["sharded"] = isinstance(weight, DTensor) and weight.to_local().shape
        local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
        seen[kind]["bytes"] = sum(p.untyped_storage().nbytes() for p in local)
        if attention.int8:
            seen[kind]["int8"] = int8_index_rows(model, ids[kind])
        models.use_transformers(model)
        seen[kind]["upstream"] = logits(model, ids[kind], DynamicCache(config=model.config))

    models.use_custom_pypto(model)
    if rank == 1:
        model.model.layers[2].self_attn.indexer.weights_proj.weight.data.neg_()
    seen["different"] = failure(lambda: computed(model, ids[kind]))
    torch.save(seen, folder / f"{rank}.pt")
    if rank == 1:
        return  # as a rank does that has failed
    seen["alone"] = failure(lambda: computed(model, ids[kind]))
    torch.save(seen, folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """What two ranks have seen, and what one process computes."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.set_num_threads(1)
    alone, ids = {}, {}
    for kind in SHARED:
        upstream = tiny_model(kind)
        upstream.save_pretrained(folder / kind)

        def run(seed, upstream=upstream):
            ids = token_ids(2, PREFILL + DECODE, seed)
            generated(upstream, ids)
            return ids, logits(upstream, ids, DynamicCache(config=upstream.config))

        _, (ids[kind], expected) = clear_case(run)
        alone[kind] = computed(models.load(folder / kind), ids[kind]) | {"upstream": expected}
    for rank in range(2):
        shutil.copytree(folder / "deepseek_v32", folder / f"index_topk {rank}")
        edit_json(folder / f"index_topk {rank}" / "config.json", index_topk=8 + rank)
        model = tiny_model()
        model.model.layers[1].self_attn.kv_a_proj_with_mqa.weight.data += rank * 0.01
        model.save_pretrained(folder / f"values {rank}")
        shutil.copytree(folder / "deepseek_v32", folder / f"stops {rank}")
        edit_json(folder / f"stops {rank}" / "generation_config.json", eos_token_id=rank)
    tiny_config(num_attention_heads=3, num_key_value_heads=3).save_pretrained(folder / "3 heads")
    torch.save(ids, folder / "ids.pt")
    in_ranks(work, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)], alone


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa", "axk2"])
def test_both_ranks_quantize_the_same_keys_to_the_same_bytes(shared, kind):
    one, other = (rank[kind]["int8"] for rank in shared[0])
    assert len(one) >= 4 and all(rows.any() for rows in one)
    assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("kind", SHARED)
def test_two_ranks_give_what_one_process_gives_with_half_of_the_heads_and_weights(shared, kind):
    ranks, alone = shared
    with torch.device("meta"):
        model = tiny_model(kind)
    whole = {name: p.nbytes for name, p in model.named_parameters()}
    replicated = ("indexer", "norm", "_a_proj", "gate.weight", "hc")
    kept = sum(size for name, size in whole.items() if any(part in name for part in replicated))
    rest = sum(whole.values()) - kept
    assert alone[kind]["tokens"].shape == (2, PREFILL + DECODE + 8)
    for rank in (rank[kind] for rank in ranks):
        assert_close(rank["logits"], alone[kind]["logits"], kind)
        assert_close(rank["upstream"], alone[kind]["upstream"], kind)
        assert torch.equal(rank["tokens"], alone[kind]["tokens"])
        assert rank["class"].startswith("Paged")
        assert rank["sharded"] == (2 * (32 + 24), 64)
        # 199 rows of embedding and head are 100 and 99
        assert rank["bytes"] == pytest.approx(kept + rest / 2, abs=2 * 96 * 4)


def test_ranks_that_cannot_share_or_differ_say_so(shared):
    ranks, _ = shared
    for rank in ranks:  # the folder has a config.json and no weights
        assert "must have 1 ranks" in rank["rejected"] and "got 2" in rank["rejected"]
        assert "layer 2" in rank["different"] and "between rank 0 and rank 1," in rank["different"]
    assert ranks[0]["alone"] and "imed out" not in ranks[0]["alone"]  # fails at once


@pytest.mark.parametrize("way", ["tensor_parallel", "expert_parallel"])
def test_ranks_that_load_different_things_say_so_before_the_first_layer(shared, way):
    for rank in shared[0]:
        for name, message in [
            ("dtype", "dtype must be .* got torch.float32 on rank 0 and torch.bfloat16 on rank 1"),
            ("layers", "num_hidden_layers of config.json must be .* got 2 on rank 0 and 3 on rank"),
            ("index_topk", "index_topk of config.json must be equal on all ranks, got 8 on rank 0"),
            ("stops", "eos_token_id of generation_config.json must be .* got 0 on rank 0 and 1 on"),
            ("values", r"a checksum of model.layers.1.self_attn.kv_a_proj_with_mqa.weight must be"),
        ]:
            assert re.search(f"^load: {message}", rank[name, way]), rank[name, way]


def test_numbers_of_ranks_that_can_share_a_model():
    def sizes(device="cpu", **changes):
        return sharing.possible_sizes(tiny_config(**changes), device)

    assert sizes() == [1, 2, 4]
    assert sizes(num_attention_heads=6, num_key_value_heads=6) == [1, 2]  # experts of 32
    dense = {"num_attention_heads": 6, "num_key_value_heads": 6, "first_k_dense_replace": 3}
    assert sizes(**dense) == [1, 2, 3, 6]
    assert sizes(num_attention_heads=256, num_key_value_heads=256)[:3] == [1, 2, 4]
    assert sizes("npu", num_attention_heads=256, num_key_value_heads=256)[:2] == [2, 4]


def test_an_npu_takes_the_heads_it_is_given():
    def check(heads):
        query = torch.empty(1, 1, heads, 512, dtype=torch.bfloat16, device="meta")
        cache = torch.empty(2, 128, 1, 512, dtype=torch.bfloat16, device="meta")
        table = torch.empty(1, 1, dtype=torch.int32, device="meta")
        arguments = dict(query=query, key=cache, value=None, key_rope=None, block_table=table)
        npu.check("npu_sparse_flash_attention_pto", arguments | dict(layout_kv="PA_BSND"))

    check(sharing.NPU_HEADS)
    with pytest.raises(RuntimeError, match="at most 128"):
        check(sharing.NPU_HEADS + 1)


def test_sharing_needs_a_process_group_and_no_device(tmp_path):
    tiny_config().save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="torchrun"):
        models.load(tmp_path, tensor_parallel=True)
    with pytest.raises(ValueError, match="device must be None"):
        models.load(tmp_path, tensor_parallel=True, device="cpu")


def started(*command: str, there: Sequence[str] = (), **environment: str) -> subprocess.Popen:
    """A program of Python, ``there`` on another host."""
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*there, sys.executable, *command],
        cwd=ROOT,
        env=os.environ | environment | {"CUSTOM_PYPTO_CHECK_RANKS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def generate(*command: str) -> dict:
    process = started(*command)
    printed, errors = process.communicate()
    assert process.returncode == 0, errors
    return json.loads(printed)


TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
EXAMPLE = ["examples/generate.py", "--json", "--dtype", "float32"]


WAYS = [("--tp", "lookup"), ("--ep", "lookup_v4"), ("--cp", "lookup")]


@pytest.mark.slow
@pytest.mark.parametrize("way, checkpoint", WAYS)
def test_the_example_answers_as_in_one_process_and_prints_once(way, checkpoint):
    example = [*EXAMPLE, "--prompt-tokens", "200", "--questions", "2"]
    example += ["--model", f"examples/checkpoints/{checkpoint}"]
    one, both = generate(*example), generate(*TWO, *example, way)
    assert (one["ranks"], both["ranks"]) == (1, 2)
    for alone, shared in zip(one["results"], both["results"], strict=True):
        assert shared["answers"] == alone["answers"] and shared["right"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_ends_the_other_with_one_sentence(killed):
    """Far before the ten minutes after which a rank that hangs is given up. Without torchrun, which
    would end the other: on two hosts it may know later than the connection."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    group = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    example = [*EXAMPLE, "--prompt-tokens", "100000", "--tp"]
    ranks = [started(*example, **group, RANK=str(rank)) for rank in range(2)]
    processes = [psutil.Process(rank.pid) for rank in ranks]
    # once gloo's threads run, each waits for the other again and again
    while min(process.num_threads() for process in processes) < 4:
        assert [rank.poll() for rank in ranks] == [None, None]
        time.sleep(0.1)
    ranks[killed].kill()
    _, errors = ranks[1 - killed].communicate(timeout=60)
    ranks[killed].communicate()
    assert ranks[1 - killed].returncode == 1
    message = errors.splitlines()[-1]
    assert message.startswith("generate.py: ") and message.endswith(f" (rank {1 - killed})")
    assert "waits for has ended or hangs; its own error says why" in message
    assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize("seconds, loss", [(0.0, 0.0), (0.002, 0.005)])
@pytest.mark.parametrize("way, checkpoint", WAYS)
def test_two_hosts_answer_as_one(way, checkpoint, seconds, loss):
    """By the commands of docs/many_machines.md, over a cable that delays and loses packets."""
    example = [*EXAMPLE, "--prompt-tokens", "200", "--questions", "1", "--backend", "custom_pypto"]
    example += ["--model", f"examples/checkpoints/{checkpoint}"]
    hosts = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    hosts += ["--master-addr", NEAR, "--master-port", "29500", "--node-rank"]
    with second_host(seconds, loss) as (there, near, far):
        first = started(*hosts, "0", *example, way, GLOO_SOCKET_IFNAME=near)
        second = started(*hosts, "1", *example, way, there=there, GLOO_SOCKET_IFNAME=far)
        printed, errors = first.communicate()
        assert first.returncode == 0, errors
        assert second.wait() == 0, second.stderr.read()
    both, one = json.loads(printed), generate(*example)
    assert both["ranks"] == 2 and both["results"][0]["right"] == 1
    assert both["results"][0]["answers"] == one["results"][0]["answers"]


def test_the_example_without_torchrun_says_how(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["generate.py", "--tp"])
    monkeypatch.syspath_prepend(ROOT / "examples")
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "examples/generate.py"), run_name="__main__")
    assert "torchrun --nproc" in capsys.readouterr().err


def test_sinks_that_are_handed_over_sharded_are_rejected(monkeypatch):
    """As before transformers 5.23."""
    config = tiny_config("hy_v4")
    plan = {k: v for k, v in config.base_model_tp_plan.items() if not k.endswith(".self_attn")}
    monkeypatch.setattr(type(config), "base_model_tp_plan", plan)
    with pytest.raises(ValueError, match="must be False for hy_v4 with .*; install transformers 5"):
        sharing.check_sharing(config, None, heads=True, experts=False)
