"""Models whose experts stay in their files take the memory that they may, and reject what they
cannot do."""

import copy
import ctypes
import gc
import math
import mmap
import pickle
import re
import resource
import sys

import numpy as np
import pytest
import torch
from processes import MIB, PAGES, in_a_process, status
from published import published
from streaming_harness import (
    assert_same,
    budget,
    folders,  # noqa: F401
    generated,
    in_memory,
    no_gradients,  # noqa: F401
    pool_of,
    streamed,
)
from tiny import tiny_model, token_ids

from custom_pypto import models
from custom_pypto.models.loading import plan, request
from custom_pypto.models.loading.request import check_memory_option
from custom_pypto.models.memory import free_in_container
from custom_pypto.models.streaming.pool import Pool

SLOTS = 5


# ---- memory -------------------------------------------------------------------------------------

LARGE = dict(hidden_size=1024, moe_intermediate_size=512, n_routed_experts=48)
# Of 8 threads, and what a forward of a few tokens takes
OTHERS = 8 * 8 * MIB + 4 * PAGES


def cached_pages(path):
    """How many pages of a file are in the page cache."""
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        begin = np.frombuffer(memory, np.uint8)
        arguments = begin.ctypes.data, size, pages.ctypes.data
        found = ctypes.CDLL(None).mincore(*map(ctypes.c_size_t, arguments))
        del begin
    assert found == 0
    return int((pages & 1).sum())


def within_a_limit(small, path, memory, mutant):
    """What a process had of anonymous memory at its end more than it had before it loaded the
    model, where the kernel grants no more than the budget; and the pages of files that a generate()
    left in the page cache. An error of memory as text."""
    ids = token_ids(1, 16)
    generated(models.load(small, weights={"experts": "stored"}), ids)  # has imported what there is
    gc.collect()
    if mutant:
        new = Pool.__init__
        Pool.__init__ = lambda self, form, places, count: new(self, form, places, len(places))
    before = status("RssAnon")
    limit = status("VmData") + memory + OTHERS
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        model = models.load(path, memory=memory)
    except (MemoryError, RuntimeError) as error:
        return repr(error)
    files = sorted(path.glob("*.safetensors"))
    pages = sum(map(cached_pages, files))
    generated(model, ids)
    return status("RssAnon") - before, sum(map(cached_pages, files)) - pages


@pytest.fixture(scope="module", name="large")
def large_checkpoint(tmp_path_factory):
    path = published(tmp_path_factory.mktemp("large"), **LARGE)
    whole = in_memory(path)
    size = sum(x.nbytes for x in whole.state_dict().values())
    memory = budget(whole, slots=8)
    assert size > 2 * memory + OTHERS
    return path, memory


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and sets a limit of Linux")
def test_the_budget_is_held(folder, large):
    path, memory = large
    used, pages = in_a_process(within_a_limit, folder(), path, memory, False)
    assert used <= memory + OTHERS
    assert pages * mmap.PAGESIZE < 0.01 * sum(x.stat().st_size for x in path.glob("*.safetensors"))
    assert "OutOfMemoryError" in in_a_process(within_a_limit, folder(), path, memory, True)


@pytest.mark.parametrize(
    "groups, written, free",
    [
        ("0::/a/b", {"a/memory.max": "3000", "a/b/memory.max": "max"}, 2100),
        ("0::/a/b", {"a/memory.max": "3000", "a/b/memory.max": "2000"}, 1100),
        ("4:memory:/a\n0::/", {"memory/a/memory.limit_in_bytes": "5000"}, 4100),
        ("4:memory:/elsewhere\n1:cpu:/a", {"memory/memory.limit_in_bytes": "5000"}, 4100),
        ("0::/a", {}, math.inf),
    ],
)
def test_the_limit_of_a_container(tmp_path, groups, written, free):
    """1000 bytes are used, of which 100 are pages of files."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups + "\n")
    for name, limit in written.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(limit + "\n")
        used = "memory.current" if file.name == "memory.max" else "memory.usage_in_bytes"
        (file.parent / used).write_text("1000\n")
        (file.parent / "memory.stat").write_text("anon 900\ninactive_file 100\n")
    assert free_in_container(tmp_path) == free


# ---- what cannot be -----------------------------------------------------------------------------


def test_sizes_of_memory():
    assert check_memory_option("64GB") == 64 * 10**9
    assert check_memory_option(" 1.5 GiB ") == 3 * 2**29
    assert check_memory_option(1000) == 1000


WRONG = {
    "64": (ValueError, "memory must be bytes, or a string such as '64GB' or '60GiB', got '64'"),
    "64gb": (ValueError, "got '64gb'"),
    0: (ValueError, "more than 0, got 0"),
    True: (TypeError, "got True"),
    1.5: (TypeError, "got 1.5"),
}


@pytest.mark.parametrize("memory", WRONG)
def test_a_size_that_is_none(folder, memory):
    error, message = WRONG[memory]
    with pytest.raises(error, match=f"^load: .*{re.escape(message)}"):
        models.load(folder(), memory=memory)


def test_too_little_or_too_much_memory(folder, tmp_path, monkeypatch):
    whole = in_memory(folder())
    with pytest.raises(
        MemoryError, match="^load: memory must be at least .*for 2 experts and the "
    ):
        models.load(folder(), memory=budget(whole, 1))
    assert pool_of(models.load(folder(), memory=budget(whole, 2))).slots.count == 2
    monkeypatch.setattr(plan, "free_memory", lambda device: budget(whole, 1))
    with pytest.raises(MemoryError, match="^load: memory must be at most what .*; pass less$"):
        models.load(folder(), memory=budget(whole, 2))
    monkeypatch.undo()
    plain = tmp_path / "plain"
    tiny_model(dtype=torch.float32).save_pretrained(plain)
    with pytest.raises(MemoryError, match="nothing of this model can stay in its files, as routed"):
        models.load(plain, memory=1000)


def test_formats_that_no_file_has(folder):
    memory = budget(models.load(folder(), weights={"experts": "int4"}), 4)
    message = (
        "^load: weights must be None or 'stored' .*/convert_checkpoint.py PATH FOLDER --weights"
    )
    with pytest.raises(ValueError, match=f"{message} int4$"):
        models.load(folder(), memory=memory, weights={"experts": "int4"})


def test_a_device(folder, monkeypatch):
    monkeypatch.setattr(request, "check_device", lambda device: torch.device("meta"))
    with pytest.raises(ValueError, match="^load: device must be None or 'cpu' with memory"):
        models.load(folder(), memory="1GB", device="meta")


CANNOT = {
    "deepcopy": (copy.deepcopy, "cannot be copied or pickled; load it once more"),
    "pickle": (pickle.dumps, "cannot be copied or pickled; load it once more"),
    "share_memory": (lambda model: model.share_memory(), "one that is shared by processes; load"),
    "move": (lambda model: model.to("meta"), "got a move to one meta; load it without memory"),
    "save": (lambda model: model.save_pretrained("/nowhere"), "^save_pretrained: .* copy their"),
}


@pytest.mark.parametrize("what", CANNOT)
def test_what_a_streamed_model_cannot(folder, what):
    model, ids = streamed(folder(), SLOTS), token_ids(1, 8)
    want = generated(model, ids)
    call, message = CANNOT[what]
    with pytest.raises(ValueError, match=message):
        call(model)
    assert_same(generated(model, ids), want)


def test_gradients_and_export(folder):
    model, ids = streamed(folder(), SLOTS), token_ids(1, 8)
    with torch.enable_grad(), pytest.raises(ValueError, match="must not require a gradient"):
        model.train()(ids, use_cache=False)
    with pytest.raises(ValueError, match="loaded with memory cannot be exported"):
        torch.export.export(model.eval().model.layers[1].mlp, (torch.randn(1, 3, 256).bfloat16(),))


def test_a_state_dict_has_the_rest(folder):
    model, whole = streamed(folder(), SLOTS), in_memory(folder())
    rest = {name for name in whole.state_dict() if ".experts." not in name}
    assert model.state_dict().keys() == rest
    with pytest.raises(RuntimeError, match="Unexpected key.*experts"):
        model.load_state_dict(whole.state_dict())
