"""A cache in a file: another cache of it continues to the bit, and damage is named."""

import contextlib
import errno
import os
import resource
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
from model_harness import (
    PADS,
    feed,
    left_padded,
    no_grad_and_one_thread,  # noqa: F401
    paged_cache,
    patched_model,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import ALL_KINDS, representatives, tiny_model, token_ids

from custom_pypto import models
from custom_pypto.models import CACHE
from custom_pypto.models.cache import saved as saved_caches
from custom_pypto.models.cache.saved import VERSION

INT8 = {"index_dtype": torch.int8, "kv_dtype": torch.int8}


def filled(patched, pads=PADS, tokens=40, **options):
    """A cache, whose blocks lie in no order, with a prompt."""
    cache = models.PagedCache(patched, len(pads), 96, block_size=16, **options)
    for table in cache.tables.values():
        shuffled = torch.randperm(table.numel(), generator=torch.Generator().manual_seed(3))
        table.copy_(table.flatten()[shuffled].view_as(table))
    ids, mask, positions = left_padded(pads, tokens, seed=1)
    feed(patched, cache, ids, mask, positions, [tokens - 3, 3])
    return cache, mask


def continued(patched, cache, mask):
    """Logits of a token, of a few, and of one more behind what is cached."""
    logits = []
    for tokens in (1, 7, 1):
        mask = torch.cat([mask, torch.ones(len(mask), tokens, dtype=torch.int64)], 1)
        positions = (mask.cumsum(-1) - 1)[:, -tokens:]
        ids = token_ids(len(mask), tokens, seed=mask.size(1))
        given = {"attention_mask": mask, "position_ids": positions, CACHE: cache}
        logits.append(patched(ids, **given).logits)
    return torch.cat(logits, 1)


def assert_continues(patched, path, mask, want, **options):
    # memory that is not cleared would show an unwritten row
    loaded = models.PagedCache.load(path, patched, **options)
    assert torch.equal(continued(patched, loaded, mask), want)
    return loaded


@pytest.mark.parametrize("kind", representatives(ALL_KINDS))
def test_a_loaded_cache_continues_to_the_bit(kind, tmp_path):
    patched = patched_model(kind)
    # upstream's layers of linear attention count padding
    pads = (0, 0) if kind == "glm5_next" else PADS
    cache, mask = filled(patched, pads)
    cache.save(tmp_path / "cache")
    assert [x.name for x in tmp_path.iterdir()] == ["cache"]
    want = continued(patched, cache, mask)
    loaded = assert_continues(patched, tmp_path / "cache", mask, want)
    assert (loaded.block_size, loaded.max_cache_len) == (16, 96)
    # from another capacity, and from a file that is replaced
    loaded.save(tmp_path / "cache")
    larger = models.PagedCache.load(tmp_path / "cache", patched, max_cache_len=200)
    assert larger.max_cache_len == 208 and torch.equal(larger.lengths, cache.lengths)
    assert int(larger.seen) == mask.size(1) + 9
    mask = torch.cat([mask, torch.ones(len(mask), 9, dtype=torch.int64)], 1)
    want = continued(patched, cache, mask)
    assert torch.equal(continued(patched, larger, mask), want)


def test_int8_rows_are_saved_as_they_are(tmp_path):
    patched = models.use_custom_pypto(tiny_model(kv_lora_rank=128).bfloat16(), block_size=16)
    cache, mask = filled(patched, **INT8)
    cache.save(tmp_path / "cache")
    want = continued(patched, cache, mask)
    loaded = assert_continues(patched, tmp_path / "cache", mask, want)
    assert loaded.layers[0].pools["latent"].dtype == torch.int8


def test_the_file_has_the_rows_of_cached_tokens_alone(tmp_path):
    patched = patched_model()
    cache = paged_cache(patched, 2)  # whose pools are full of NaN
    cache.save(tmp_path / "empty")
    feed(patched, cache, *left_padded((0, 9), 30, seed=1), [30])
    cache.save(tmp_path / "cache")
    for name, rows in (("empty", 0), ("cache", 51)):
        tensors = load_file(tmp_path / name)
        assert tensors["0.latent"].shape == (rows, 1, 64)
        assert not any(x.isnan().any() for x in tensors.values() if x.is_floating_point())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "cache"
    with torch.no_grad():
        filled(patched_model())[0].save(path)
    return path


def changed(saved, path, change):
    """A copy in which ``change(tensors, metadata)`` was called."""
    tensors = load_file(saved)
    with safe_open(saved, "pt") as file:
        metadata = dict(file.metadata())
    change(tensors, metadata)
    save_file(tensors, path, metadata)
    return path


def other_bytes(tensors, metadata):
    tensors["1.latent"].view(torch.int32)[5, 0, 7] ^= 1


def other_header(tensors, metadata):
    metadata[VERSION] = metadata[VERSION].replace('"batch_size": 3', '"batch_size": 2')


def one_layer_less(tensors, metadata):
    del tensors["2.rope"]


def no_header(tensors, metadata):
    metadata.clear()


@pytest.mark.parametrize(
    "change, message",
    [
        (other_bytes, "is damaged, .*bytes of 1.latent were changed"),
        (other_header, "is damaged, .*header was changed"),
        (one_layer_less, "is damaged, .*2.rope"),
        (no_header, "must be a file that PagedCache.save wrote, .*without the header"),
    ],
)
def test_a_damaged_or_foreign_file_is_named(saved, tmp_path, change, message):
    path = changed(saved, tmp_path / "changed", change)
    with pytest.raises(ValueError, match=f"PagedCache.load: .*{message}") as raised:
        models.PagedCache.load(path, patched_model())
    assert str(path) in str(raised.value)


def test_a_file_that_the_library_wrote_is_taken(saved, tmp_path):
    # as earlier versions let it write, with the entries of its header in any order
    patched = patched_model()
    cache = models.PagedCache.load(changed(saved, tmp_path / "old", lambda *_: None), patched)
    cache.save(tmp_path / "new")
    assert (tmp_path / "new").read_bytes() == saved.read_bytes()


@pytest.mark.parametrize("kind", representatives(ALL_KINDS))
def test_equal_caches_are_equal_bytes(kind, tmp_path):
    cache, _ = filled(patched_model(kind), (0, 0))
    for i in range(20):
        cache.save(tmp_path / str(i))
    again = models.PagedCache.load(tmp_path / "0", patched_model(kind))
    again.save(tmp_path / "again")
    assert len({file.read_bytes() for file in tmp_path.iterdir()}) == 1


def test_a_file_that_is_replaced_while_it_is_loaded_is_loaded_as_it_was(tmp_path, monkeypatch):
    patched, path = patched_model(), tmp_path / "cache"
    cache, other = filled(patched)[0], filled(patched, (0, 0, 1))[0]
    cache.save(path)

    def after_a_save(function, *args, **options):
        other.save(path)
        return function(*args, **options)

    for owner, name in [
        (saved_caches, "read_header"),
        (saved_caches, "read_file"),
        (torch.UntypedStorage, "from_file"),  # safetensors' second look at a file that it maps
    ]:
        monkeypatch.setattr(owner, name, partial(after_a_save, getattr(owner, name)))
    assert torch.equal(models.PagedCache.load(path, patched).lengths, cache.lengths)
    monkeypatch.undo()
    assert torch.equal(models.PagedCache.load(path, patched).lengths, other.lengths)


@contextlib.contextmanager
def full_disk():
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def forbidden(path):
    user, mode = os.geteuid(), path.stat().st_mode
    path.chmod(0o555 if path.is_dir() else 0)
    if user == 0:  # whom no mode stops
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        path.chmod(mode)


@pytest.fixture
def public():
    """A folder that every user reaches."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def test_errors_of_save_name_the_file_and_leave_the_old_one(saved, public):
    patched, path = patched_model(), public / "cache"
    cache = models.PagedCache.load(saved, patched)
    cache.save(path)
    (public / "folder").mkdir()
    size = sum(x.nbytes for x in load_file(saved).values()) / 1e6
    for file, error, why, when in [
        (public / "none" / "cache", FileNotFoundError, "No such file", contextlib.nullcontext),
        (public / "folder", IsADirectoryError, "Is a directory", contextlib.nullcontext),
        (path, PermissionError, "Permission denied", lambda: forbidden(public)),
        (path, OSError, "File too large", full_disk),
    ]:
        message = (
            "PagedCache.save: path must be a file in a folder that exists, may be written and has "
            f"room for {size:.1f} MB, got {file}: {why}.*; give another path"
        )
        with pytest.raises(error, match=message) as raised, when():
            cache.save(file)
        assert raised.value.errno
        assert sorted(x.name for x in public.iterdir()) == ["cache", "folder"]
        assert path.read_bytes() == saved.read_bytes()
    assert raised.value.errno == errno.EFBIG


def test_errors_of_load_name_the_file(saved, public):
    patched, path = patched_model(), public / "cache"
    path.write_bytes(saved.read_bytes())
    for file, error, why, when in [
        (public / "none", FileNotFoundError, "No such file", contextlib.nullcontext),
        (public, IsADirectoryError, "Is a directory", contextlib.nullcontext),
        (path, PermissionError, "Permission denied", lambda: forbidden(path)),
    ]:
        message = f"PagedCache.load: path must be a file of .*, got {file}: {why}.*; check the path"
        with pytest.raises(error, match=message), when():
            models.PagedCache.load(file, patched)


@pytest.mark.parametrize("size", [0, 7, 3000, -1])
def test_a_file_that_was_cut_off_is_named(saved, tmp_path, size):
    path = tmp_path / "short"
    path.write_bytes(saved.read_bytes()[:size])
    with pytest.raises(ValueError, match=rf"PagedCache.load: {path} is damaged.*save it again"):
        models.PagedCache.load(path, patched_model())


def test_what_does_not_fit_is_rejected(saved, tmp_path):
    patched = patched_model()
    message = f"max_cache_len must be at least 40, the tokens per sequence in {saved}, got .* 32; "
    with pytest.raises(ValueError, match=f"PagedCache.load: {message}"):
        models.PagedCache.load(saved, patched, max_cache_len=32)
    with pytest.raises(TypeError, match="must be patched"):
        models.PagedCache.load(saved, tiny_model())
    other = patched_model(kv_lora_rank=32)
    message = rf"PagedCache.load: {saved} is of a model with kv_lora_rank=64, got one with .*=32"
    with pytest.raises(ValueError, match=message):
        models.PagedCache.load(saved, other)
    other = patched_model("glm_moe_dsa")
    with pytest.raises(ValueError, match="model_type=deepseek_v32, .*got one with model_type=glm"):
        models.PagedCache.load(saved, other)
