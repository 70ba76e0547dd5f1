"""A further format of cache rows is one class and one line: here fp8 with a scale per row."""

from types import SimpleNamespace

import pytest
import torch
from model_harness import (
    feed,
    left_padded,
    no_grad_and_one_thread,  # noqa: F401
    patched_model,
    round_latents,
)
from tiny import tiny_model, token_ids

from custom_pypto import models
from custom_pypto.models.cache import formats, store, write
from custom_pypto.models.cache.layout import Row

FP8 = torch.float8_e4m3fn


def scaled(latent):
    """The nearest fp8 to ``[.., L]`` over a float32 scale ``[.., 1]``."""
    scale = latent.float().abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
    return (latent.float() / scale).to(FP8), scale


class Float8LatentRows(formats.LatentRows):
    """Latents of a byte per value, and a pool of scales beside them."""

    @staticmethod
    def lacking(config, dtype):
        return None

    def rows(self, declared):
        latent = declared["latent"]
        scale = Row(1, torch.float32, latent.layout)
        return declared | {"latent": latent._replace(dtype=torch.uint8), "latent_scale": scale}

    def write(self, step, layer, latent, rope):
        values, scale = scaled(latent)
        write(layer.latent_scale, step.slots, scale)
        super().write(step, layer, values.view(torch.uint8), rope)

    def first_rows(self, layer, table, count, width):
        pools = layer.latent, layer.latent_scale
        latent, scale = (store.first_rows(pool, table, count) for pool in pools)
        return latent.view(FP8).to(self.dtype) * scale, store.first_rows(layer.rope, table, count)

    def read(self, layer, *arguments, **call):
        latent = (layer.latent.view(FP8).float() * layer.latent_scale).to(self.dtype)
        return super().read(SimpleNamespace(latent=latent, rope=layer.rope), *arguments, **call)


@pytest.fixture(autouse=True)
def with_fp8(monkeypatch):
    monkeypatch.setitem(formats.LATENT_FORMATS, FP8, Float8LatentRows)


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
