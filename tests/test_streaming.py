"""Models whose routed experts stay in their files: outputs equal those of the model in memory, to
the bit, whatever is in memory at the time."""

import gc
import io
import logging
import random
import sys
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from model_harness import whole_graph
from published import V4
from streaming_harness import (
    assert_at_rest,
    assert_same,
    folders,  # noqa: F401
    generated,
    in_memory,
    no_gradients,  # noqa: F401
    pool_of,
    streamed,
)
from tiny import ALL_KINDS, KINDS, clear_case, token_ids
from transformers import CompileConfig

from custom_pypto import models
from custom_pypto.models import CACHE
from custom_pypto.models.streaming import files
from custom_pypto.models.streaming import model as streaming
from custom_pypto.models.streaming.slots import Slots

CASES = [(kind, None) for kind in KINDS] + [(V4, None)]
CASES += [(kind, "bfloat16") for kind in ALL_KINDS]
CASES += [(KINDS[0], "int8"), (KINDS[0], "int4"), (V4, "int4"), (KINDS[0], "stored")]
FIRST = [(KINDS[0], None), (V4, None), (KINDS[0], "int4")]
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))]
IN_MEMORY = [3, 8, 15]  # of 16 or 24 experts; a token needs 2 of a layer


@pytest.mark.parametrize(
    "kind, weights",
    [pytest.param(*case, marks=[] if case in FIRST else pytest.mark.slow) for case in CASES],
)
def test_outputs_are_those_of_the_model_in_memory(folder, kind, weights):
    path = folder(kind, weights)
    whole = in_memory(path)
    prompts = [token_ids(2, tokens) for tokens in (1, 3, 17)]
    want = [generated(whole, ids) for ids in prompts]
    for slots in IN_MEMORY:
        model = streamed(path, slots, whole)
        for ids, of_whole in zip(prompts, want, strict=True):
            assert_same(generated(model, ids), of_whole)
        counts = pool_of(model).counts()
        assert counts.misses and counts.nbytes and (counts.hits or slots < 8)
        assert_at_rest(pool_of(model))


@pytest.fixture(scope="module", name="both")
def in_memory_and_streamed(folder):
    whole = in_memory(folder())
    return whole, streamed(folder(), 5, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dtypes_of_the_rest(folder, dtype):
    whole, ids = in_memory(folder(), dtype=dtype), token_ids(2, 20)
    model = streamed(folder(), 5, whole, dtype=dtype)
    assert_same(generated(model, ids), generated(whole, ids))


def test_stored_weights_of_the_rest(folder):
    weights = {"rest": "int4"}
    whole, ids = in_memory(folder(), weights=weights), token_ids(2, 20)
    model = streamed(folder(), 5, whole, weights=weights)
    assert_same(generated(model, ids), generated(whole, ids))


def test_prompts_go_in_waves(both):
    whole, model = both
    for tokens in (300, 700):
        ids = token_ids(1, tokens) % 199
        assert torch.equal(model(ids).logits, whole(ids).logits)


def test_batches_chunks_caches_and_records(both, tmp_path):
    whole, model = both
    ids, mask = token_ids(3, 40), torch.ones(3, 40, dtype=torch.int64)
    mask[0, :9] = mask[2, :30] = 0
    options = dict(attention_mask=mask)
    assert_same(generated(model, ids, **options), generated(whole, ids, **options))
    options |= dict(prefill_chunk_size=16)
    assert_same(generated(model, ids, **options), generated(whole, ids, **options))
    beams = dict(num_beams=3, tokens=6)
    assert torch.equal(
        generated(model, ids, **beams).sequences, generated(whole, ids, **beams).sequences
    )
    results = []
    for one in both:
        cache = models.PagedCache(one, 3, 64, block_size=16)
        with models.record_indices(one, experts=True) as record:
            one(ids, **{CACHE: cache})
        cache.save(tmp_path / "cache")
        restored = models.PagedCache.load(tmp_path / "cache", one)
        results.append((record.tensors(), one(ids[:, :2], **{CACHE: restored}).logits))
        other = token_ids(3, 40, seed=2)
        with models.replay_indices(one, record), models.record_indices(one, experts=True) as again:
            results[-1] += (one(other, **{CACHE: models.PagedCache(one, 3, 64)}).logits,)
        torch.testing.assert_close(again.tensors(), record.tensors(), rtol=0, atol=0)
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_transformers_attention(both):
    whole, model = both
    ids = token_ids(2, 20)
    try:
        logits = [models.use_transformers(one)(ids, use_cache=False).logits for one in both]
    finally:
        for one in both:
            models.use_custom_pypto(one)
    assert torch.equal(*logits)


LAYERS = CompileConfig(backend="eager", dynamic=False, mode=None)


@pytest.mark.parametrize(
    "config", [LAYERS, pytest.param(whole_graph("eager"), marks=pytest.mark.slow)]
)
def test_compiled_layers_and_graphs(both, config):
    ids = token_ids(2, 20)
    assert_same(*(generated(one, ids, compile_config=config) for one in both))


@pytest.mark.slow
def test_layers_compiled_by_inductor(both):
    whole, model = both
    seed, want = clear_case(lambda seed: generated(whole, token_ids(2, 20, seed)))
    config = CompileConfig(dynamic=False)
    got = generated(model, token_ids(2, 20, seed), compile_config=config)
    assert torch.equal(got.sequences, want.sequences)


def test_threads_generate_at_once(both):
    whole, model = both
    prompts = [token_ids(1, 20, seed) for seed in range(3)]
    want, got = [generated(whole, ids, 20) for ids in prompts], [None] * len(prompts)

    def run(i):
        with torch.no_grad():
            got[i] = generated(model, prompts[i], 20)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for of_got, of_want in zip(got, want, strict=True):
        assert_same(of_got, of_want)
    assert_at_rest(pool_of(model))


# ---- how bytes are read -------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [None, "int4"])
@pytest.mark.parametrize("way", ["buffered", "copied", "direct"])
def test_ways_of_reading(folder, way, weights, monkeypatch):
    monkeypatch.setattr(files, "DIRECT", None if way == "buffered" else files.DIRECT)
    monkeypatch.setattr(files, "ALIGNMENTS", {"copied": [4096], "direct": [8]}.get(way, ()))
    path, ids = folder(weights=weights), token_ids(2, 20)
    model = streamed(path, 5)
    alignments = {file.alignment for file in pool_of(model).files.values()}
    if way != "buffered" and alignments == {None}:
        pytest.skip("the file system takes no direct reads into memory that is aligned so")
    assert alignments == {"buffered": {None}, "copied": {4096}, "direct": {8}}[way]
    assert_same(generated(model, ids), generated(in_memory(path), ids))


def test_every_place_in_a_file_and_in_memory(tmp_path, monkeypatch):
    content = np.random.default_rng(0).integers(0, 256, 5 * files.BLOCK + 77, dtype=np.uint8)
    (path := tmp_path / "file").write_bytes(content.tobytes())
    monkeypatch.setattr(files, "BOUNCE", 2 * files.BLOCK)
    sizes = [0, 1, 8, 100, files.BLOCK - 8, files.BLOCK, 2 * files.BLOCK + 5, 4 * files.BLOCK]
    for alignments in ([8], [512], [files.BLOCK], []):
        monkeypatch.setattr(files, "ALIGNMENTS", alignments)
        file = files.StreamedFile(path)
        for offset in (0, 8, 77, 512, files.BLOCK - 8, files.BLOCK, files.BLOCK + 13):
            for size in sizes:
                for shift in (0, 8, 13):
                    out = files.aligned(size + shift + 16)
                    out[:] = 99
                    assert file.read(offset, out[shift : shift + size])
                    assert (out[shift : shift + size] == content[offset : offset + size]).all()
                    assert (out[:shift] == 99).all() and (out[shift + size :] == 99).all()
        assert file.read(len(content) - 5, files.aligned(5))
        assert not file.read(len(content) - 5, files.aligned(6))


@pytest.mark.parametrize("readers", [1, 4])
@pytest.mark.parametrize("seed", SEEDS)
def test_reads_end_in_any_order(folder, readers, seed, monkeypatch):
    read, chance = files.StreamedFile.read, random.Random(seed)

    def late(self, *args):
        time.sleep(chance.choice((0, 0, 0.001, 0.004)))
        return read(self, *args)

    path, ids = folder(V4), token_ids(2, 12)
    whole = in_memory(path)
    model = streamed(path, 5, whole)
    pool_of(model).read_with(readers)
    monkeypatch.setattr(files.StreamedFile, "read", late)
    assert_same(generated(model, ids), generated(whole, ids))
    assert_at_rest(pool_of(model))


def test_what_made_room_is_not_used(folder, monkeypatch):
    path, ids = folder(), token_ids(2, 20)
    whole = in_memory(path)
    model = streamed(path, 5, whole)
    pool, lose = pool_of(model), Slots.lose

    def spoil(self, slot):
        lose(self, slot)
        for array in pool.memory.bytes:
            array[slot.index] = 0xFF  # NaN, in fp8 and in scales

    monkeypatch.setattr(Slots, "lose", spoil)
    assert_same(generated(model, ids), generated(whole, ids))
    assert pool.counts().misses > 5


# ---- around it ----------------------------------------------------------------------------------


def test_what_fits_is_in_memory(folder):
    whole = in_memory(folder())
    size = sum(x.nbytes for x in whole.state_dict().values())
    model = models.load(folder(), memory=size)
    assert model.state_dict().keys() == whole.state_dict().keys()
    assert not any(hasattr(module, "streamed") for module in model.modules())


def test_the_log_says_what_was_read(folder, caplog):
    caplog.set_level(logging.INFO, "custom_pypto")
    model = streamed(folder(), 5)
    assert "load: 5 of 16 experts" in caplog.text
    generated(model, token_ids(1, 8))
    [line] = [record.message for record in caplog.records if "generate:" in record.message]
    counts = pool_of(model).counts()
    asked = counts.hits + counts.late + counts.misses
    assert counts.asked == asked
    assert line.startswith(f"generate: of {asked} experts {counts.hits / asked:.0%} in memory, ")
    assert counts.nbytes >= counts.misses * pool_of(model).form.nbytes() > 0


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_long_forward_shows_its_layers(both, monkeypatch):
    _, model = both
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    model(token_ids(1, 8))
    assert not terminal.getvalue()  # a short one
    monkeypatch.setattr(streaming, "DELAY", 0.0)
    model(token_ids(1, 8))
    assert "experts: 100%" in terminal.getvalue() and "2/2" in terminal.getvalue()


def test_threads_end_with_their_model(folder):
    model = streamed(folder(), 5)
    pool = weakref.ref(pool_of(model))
    del model
    gc.collect()
    deadline = time.monotonic() + 60
    while pool() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert pool() is None
