"""MTP layers of models that ranks share, and of models whose experts stay in their files."""

import logging
from pathlib import Path

import pytest
import torch
from mtp_harness import upstream_drafting
from processes import in_ranks
from published import V4
from streaming_harness import in_memory, pool_of, streamed
from tiny import SHARED, representatives, token_ids
from torch.distributed.tensor import DTensor

from custom_pypto import models
from custom_pypto.models.mtp.layer import mtp_layer
from custom_pypto.models.patched import text_model

IDS = token_ids(1, 40)
DRAFTS = {"use_mtp": True, "num_assistant_tokens": 2, "return_dict_in_generate": True}
OPTIONS = {"max_new_tokens": 16, "do_sample": False}
HEADS, EXPERTS = {"tensor_parallel": True}, {"expert_parallel": True}
WAYS = {"heads": HEADS, "experts": EXPERTS, "both": HEADS | EXPERTS}
WAYS_OF = {V4: {"experts": EXPERTS}}  # whose heads no ranks share


def generated(model):
    got = model.generate(IDS, **OPTIONS, **DRAFTS)
    return got.sequences, got.drafts.drafted, got.drafts.accepted


@torch.no_grad()
def work(rank: int, folder: Path, kind: str):
    seen = {}
    for name, way in WAYS_OF.get(kind, WAYS).items():
        model = models.load(folder / kind, mtp=True, dtype=torch.float32, **way)
        layer = mtp_layer(text_model(model))
        shared = [n for n, one in layer.named_parameters() if isinstance(one, DTensor)]
        seen[name] = generated(model), shared
    try:
        model.generate(IDS, num_assistant_tokens_schedule="heuristic", **DRAFTS, **OPTIONS)
    except ValueError as error:
        seen["rejected"] = str(error)
    torch.save(seen, folder / f"{rank}.pt")


@pytest.mark.parametrize("kind", representatives([k for k in SHARED if k != "dots3_note"]))
def test_ranks_draft_and_accept_what_one_process_does(kind, tmp_path):
    upstream_drafting(kind).save_pretrained(tmp_path / kind)
    alone = models.load(tmp_path / kind, mtp=True, dtype=torch.float32)
    text, drafted, accepted = generated(alone)
    assert torch.equal(alone.generate(IDS, **OPTIONS), text) and accepted[0] > 0
    in_ranks(work, tmp_path, kind, ranks=2)
    for rank in range(2):
        seen = torch.load(tmp_path / f"{rank}.pt")
        for way in WAYS_OF.get(kind, WAYS):
            (tokens, *counts), shared = seen[way]
            assert torch.equal(tokens, text) and counts == [drafted, accepted]
            parts = {name.partition(".")[0] for name in shared}
            assert parts == ({"mlp"} if way == "experts" else {"mlp", "self_attn"})
        assert "schedule must be 'constant' for ranks" in seen["rejected"]


# for each kind the layers whose experts are in files, that of the MTP layer included
IN_FILES = {"glm_moe_dsa": {1, 2, 3}, V4: {0, 1, 2, 3, 4}}


@pytest.fixture(scope="module", name="saved")
def saved_models(tmp_path_factory):
    paths = {}
    for kind in IN_FILES:
        paths[kind] = tmp_path_factory.mktemp(kind)
        upstream_drafting(kind, hidden_size=128).bfloat16().save_pretrained(paths[kind])
    return paths


@pytest.mark.parametrize("slots", [3, 8])
@pytest.mark.parametrize("kind", IN_FILES)
def test_experts_in_files_draft_as_in_memory(kind, slots, saved, caplog):
    caplog.set_level(logging.INFO, "custom_pypto")
    whole = in_memory(saved[kind], mtp=True)
    want = generated(whole)
    model = streamed(saved[kind], slots, whole, mtp=True)
    got = generated(model)
    assert torch.equal(got[0], want[0]) and got[1:] == want[1:] and want[2][0] > 0
    # those of the layer are in files, too
    assert {expert.layer for expert in pool_of(model).places} == IN_FILES[kind]
    counts = pool_of(model).counts()
    assert counts.misses and "read" in caplog.records[-1].getMessage()
    models.use_transformers(model)
    assert torch.equal(model.generate(IDS, **OPTIONS), whole.generate(IDS, **OPTIONS))
    models.use_custom_pypto(model)
    assert torch.equal(generated(model)[0], want[0])
