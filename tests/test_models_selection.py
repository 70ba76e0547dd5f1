"""Tokens that see no more than they select attend to all by position, and nothing is scored."""

import pytest
import torch
from test_models_replay import CASES, indexers, patched_model
from tiny import token_ids

import custom_pypto
from custom_pypto import models
from custom_pypto.models.cache.store import PagedLayer

#: at index_topk 5 to 16, and rows of 1 to 4 tokens: within, across, and beyond what is selected
CHUNKS = (3, 1, 1, 2, 17, 1, 1, 9)
FEW = 5  # which every case selects whole


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)  # tensors this small only wait for a second one


@torch.no_grad()
def answers(model, chunks):
    """Logits of the real tokens, a record, and the index keys, of a padded batch."""
    ids = token_ids(2, sum(chunks))
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    logits, end = [], 0
    with models.record_indices(model) as record:
        cache = models.PagedCache(model, 2, 64, block_size=16)
        for size in chunks:
            end += size
            new = model(ids[:, end - size : end], attention_mask=mask[:, :end], cache=cache).logits
            logits.append(new[mask[:, end - size : end].bool()])
    keys = [layer.pools["index"] for layer in cache.store.layers if "index" in layer.pools]
    return [*logits, *record.indices.values(), *(torch.nan_to_num(x) for x in keys)]


@pytest.mark.parametrize("kind", CASES)
def test_without_scores_all_is_as_with_them(kind, monkeypatch):
    model = patched_model(kind)
    got = answers(model, CHUNKS)
    monkeypatch.setattr(PagedLayer, "every_row", lambda *_: None)
    want = answers(model, CHUNKS)
    assert all(torch.equal(mine, scored) for mine, scored in zip(got, want, strict=True))


@pytest.mark.parametrize("kind", CASES)
def test_nothing_is_scored_without_need(kind, monkeypatch):
    calls, op = [], custom_pypto.npu_lightning_indexer_pto
    monkeypatch.setattr(
        custom_pypto, "npu_lightning_indexer_pto", lambda *x, **y: calls.append(1) or op(*x, **y)
    )
    model = patched_model(kind)
    answers(model, (3, 1, FEW - 4))
    assert not calls
    answers(model, CHUNKS)
    assert calls or not indexers(model)


@pytest.mark.parametrize("kind", CASES)
def test_training_attends_in_the_order_of_a_rollout(kind):
    """In which order positions are recorded does not depend on the path."""
    model, ids = patched_model(kind, training="ops"), token_ids(1, 24)
    with models.record_indices(model) as rollout, torch.no_grad():
        cache = models.PagedCache(model, 1, 64, block_size=16)
        for part in ids.split(3, 1):
            model(part, cache=cache)
    with models.record_indices(model) as trained:
        model.train()(ids)
    assert list(rollout.indices) == list(trained.indices)
    assert all(torch.equal(x, trained.indices[layer]) for layer, x in rollout.indices.items())
