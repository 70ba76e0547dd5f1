"""Ranks of expert parallel, each with a budget for experts of its own."""

from pathlib import Path

import pytest
import torch
from processes import in_ranks
from published import V4
from streaming_harness import (
    folders,  # noqa: F401
    generated,
    in_memory,
    pool_of,
    streamed,
)
from tiny import KINDS, token_ids

RANKS, SLOTS = 2, 4
IDS = token_ids(2, 20)


@torch.no_grad()
def work(rank: int, folder: Path, path: Path):
    share = dict(expert_parallel=True, dtype=torch.float32)
    whole = in_memory(path, **share)
    model = streamed(path, SLOTS, whole, **share)
    pool = pool_of(model)
    # of 8 experts of a layer this rank has 4, whose layer calls them 0 to 3
    assert {expert.number for expert in pool.places} == set(range(4))
    same = torch.equal(generated(model, IDS).sequences, generated(whole, IDS).sequences)
    logits = [one(IDS, use_cache=False).logits for one in (whole, model)]
    torch.save((same, torch.equal(*logits), pool.counts().misses), folder / f"{rank}.pt")


@pytest.mark.parametrize(
    "kind, weights",
    [(KINDS[0], None), (KINDS[0], "int8"), pytest.param(V4, None, marks=pytest.mark.slow)],
)
def test_ranks_with_a_budget_each_compute_what_they_do_in_memory(folder, tmp_path, kind, weights):
    in_ranks(work, tmp_path, folder(kind, weights), ranks=RANKS)
    for rank in range(RANKS):
        same_tokens, same_logits, misses = torch.load(tmp_path / f"{rank}.pt")
        assert same_tokens and same_logits and misses > SLOTS
