"""An interruption at any line leaves a cache, a context or a patch as it was, or as it would be, or
the next call says so."""

import copy
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from model_harness import no_grad_and_one_thread, patched_model, trace  # noqa: F401
from test_models_calls import generated, recorded
from tiny import ALL_KINDS, representatives, tiny_model, token_ids

from custom_pypto import models
from custom_pypto.models import CACHE
from custom_pypto.models.cache import store


class Struck(KeyboardInterrupt):
    pass


def struck(call, line: int | None, files=("cache", "generation")) -> int:
    """Runs ``call``, with an interruption at one of the lines of these files that run in it; the
    number of these lines."""
    folder = str(Path(models.__file__).parent)
    count = 0

    def local(frame, event, arg):
        nonlocal count
        count += event == "line"
        if event == "line" and count == line:
            sys.settrace(None)
            raise Struck
        return local

    def trace(frame, event, arg):
        name = frame.f_code.co_filename
        own = name.startswith(folder) and any(file in name[len(folder) :] for file in files)
        return local if own else None

    sys.settrace(trace)
    try:
        call()
    except Struck:
        pass
    finally:
        sys.settrace(None)
    return count


CHANGES = {"token": 1, "tokens": 4, "crop": -3, "reset": 0}
# a state of linear attention forgets no token: a forward after an interrupted one says so
REWINDING = [kind for kind in ALL_KINDS if kind != "glm5_next"]


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("kind", representatives(REWINDING))
def test_an_interruption_at_any_line_leaves_the_cache_as_it_was_or_as_it_would_be(kind, change):
    model, ids = patched_model(kind), token_ids(2, 30)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0

    def fed(cache, first, end):
        part = {"attention_mask": mask[:, :end], CACHE: cache}
        return model(ids[:, first:end], **part).logits

    base = models.PagedCache(model, 2, 64, block_size=16)
    fed(base, 0, 20)

    def changed(cache):
        if change > 0:
            fed(cache, 20, 20 + change)
        else:
            cache.crop(change) if change else cache.reset()

    want = {20: fed(copy.deepcopy(base), 20, 24)}
    after = copy.deepcopy(base)
    changed(after)
    for cache in (base, after):
        seen = int(cache.get_seq_length())
        want[seen] = fed(copy.deepcopy(cache), seen, 24 if seen < 24 else 25)
    for line in range(1, 1 + struck(partial(changed, copy.deepcopy(base)), None)):
        cache = copy.deepcopy(base)
        struck(partial(changed, cache), line)
        seen = int(cache.get_seq_length())
        assert cache.lengths.tolist() == [max(0, seen - 5), seen], f"line {line}"
        assert torch.equal(fed(cache, seen, 24 if seen < 24 else 25), want[seen]), f"line {line}"


def test_an_interruption_where_a_context_begins_or_ends_leaves_no_context():
    model = patched_model()
    record = recorded(model, 1)
    want = generated(model, 2)

    def replayed():
        with models.replay_indices(model, record):
            pass

    lines = struck(replayed, None, ("calls", "replay"))
    assert lines > 10
    for line in range(1, 1 + lines):
        struck(replayed, line, ("calls", "replay"))
        assert generated(model, 2) == want, f"line {line}"


# every fourth line by default, from the first or, with --all, from each
@pytest.mark.parametrize(
    "first", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 4))]
)
@pytest.mark.parametrize("change", [models.use_custom_pypto, models.use_transformers])
def test_a_model_whose_patch_was_interrupted_can_be_patched_and_undone(change, first):
    upstream = tiny_model()
    want = generated(upstream)
    patched = change is models.use_transformers

    def fresh():
        model = copy.deepcopy(upstream)
        return models.use_custom_pypto(model, block_size=16) if patched else model

    lines = struck(partial(change, fresh()), None, ("patch.py",))
    assert lines > 20
    for line in range(first, 1 + lines, 4 if patched else 36):
        for mend in (models.use_custom_pypto, models.use_transformers):
            model = fresh()
            struck(partial(change, model), line, ("patch.py",))
            mend(model)
            models.use_transformers(model)
            assert trace(model) == trace(upstream), f"line {line}"
            assert generated(model) == generated(models.use_custom_pypto(model)) == want


EXCHANGES = {
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
}


@pytest.mark.parametrize("change", EXCHANGES.values(), ids=EXCHANGES)
@pytest.mark.parametrize("kind", representatives(ALL_KINDS))
def test_an_interrupted_exchange_of_sequences_is_never_taken_for_a_whole_one(kind, change):
    model, ids = patched_model(kind), token_ids(4, 30)
    base = models.PagedCache(model, 2, 64, block_size=16)
    model(ids[:2, :20], **{CACHE: base})
    after = copy.deepcopy(base)
    change(after)

    def continued(cache):
        cache = copy.deepcopy(cache)
        return model(ids[: cache.batch_size, 20:24], **{CACHE: cache}).logits

    right = [continued(base), continued(after)]
    named = 0
    for line in range(1, 1 + struck(lambda: change(copy.deepcopy(base)), None)):
        cache = copy.deepcopy(base)
        struck(partial(change, cache), line)
        if cache.half_done is not None:
            named += 1
            with pytest.raises(ValueError, match="an interruption has left half done"):
                model(ids[: cache.batch_size, 20:24], **{CACHE: cache})
            if "reset()" in cache.half_done:
                cache.reset()
                model(ids[:2, :20], **{CACHE: cache})
        if cache.half_done is None:
            got = continued(cache)
            assert any(got.shape == x.shape and torch.equal(got, x) for x in right), f"line {line}"
    assert named


def test_a_cache_that_could_not_grow_goes_on(monkeypatch):
    model, ids = patched_model(), token_ids(2, 30)
    base = models.PagedCache(model, 2, 32, block_size=16)
    model(ids[:, :20], **{CACHE: base})
    want = model(ids[:, 20:30], **{CACHE: copy.deepcopy(base)}).logits
    allocate, failures = store.empty, 0
    for number in range(1, 1 + sum(len(layer.pools) for layer in base.layers)):
        cache, calls = copy.deepcopy(base), []

        def failing(*args, number=number, calls=calls):
            calls.append(args)
            if len(calls) == number:
                raise torch.OutOfMemoryError("no memory")
            return allocate(*args)

        monkeypatch.setattr(store, "empty", failing)
        with pytest.raises(torch.OutOfMemoryError, match="cannot grow from max_cache_len=32"):
            cache.reserve(64)
        monkeypatch.setattr(store, "empty", allocate)
        assert torch.equal(model(ids[:, 20:30], **{CACHE: cache}).logits, want)
        cache.reserve(64)  # with memory again
        assert cache.max_cache_len == 64
        failures += 1
    assert failures >= 6
