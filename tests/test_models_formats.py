"""A further format of cache rows is one class and one line."""

import pytest
import torch
from float8_rows import FP8, Float8LatentRows, scaled
from model_harness import (
    feed,
    left_padded,
    no_grad_and_one_thread,  # noqa: F401
    patched_model,
    round_latents,
)
from tiny import tiny_model, token_ids

from custom_pypto import models, rows


@pytest.fixture(autouse=True)
def with_fp8(monkeypatch):
    monkeypatch.setitem(rows.LATENT_FORMATS, FP8, Float8LatentRows)


def logits(**dtypes):
    model = models.use_custom_pypto(tiny_model(), block_size=16, **dtypes)
    ids, mask, positions = left_padded([0, 9], 42)
    cache = models.PagedCache(model, 2, 64, block_size=16)
    got = feed(model, cache, ids, mask, positions, [40, 1, 1])[mask.bool()]
    cache.reserve(128)
    cache.reorder_cache(torch.tensor([1, 1]))
    cache.batch_repeat_interleave(2)
    cache.crop(-3)
    mask = torch.ones(4, 42)
    mask[:, :9] = 0  # the padding of the sequence that all are copies of
    return got, model(token_ids(4, 3), attention_mask=mask, cache=cache).logits


def test_a_format_that_is_added_computes_like_rounded_rows(monkeypatch):
    got = logits(kv_dtype=FP8)

    def rounded(latent):
        values, scale = scaled(latent)
        return (values.float() * scale).to(latent.dtype)

    round_latents(monkeypatch, rounded)
    assert all(map(torch.equal, got, logits()))


def test_a_format_that_is_added_is_named_where_another_is_rejected():
    with pytest.raises(ValueError, match="kv_dtype must be torch.int8 or torch.float8_e4m3fn or "):
        models.PagedCache(patched_model(), 1, 64, kv_dtype=torch.float16)
