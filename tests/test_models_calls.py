"""What is around a call acts in every step of it, and in no other call of the model."""

import copy
import io
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from model_harness import no_grad_and_one_thread, patched_model  # noqa: F401
from tiny import ALL_KINDS, representatives, token_ids
from torch.nn.modules.module import register_module_forward_hook
from transformers import CompileConfig

from custom_pypto import models
from custom_pypto.models import CACHE
from custom_pypto.models.cache import store
from custom_pypto.models.patched import text_model

COMPILED = {"compile_config": CompileConfig(backend="eager", mode=None)}
STEPS = 5


def generated(model, seed=1, **options):
    ids = token_ids(1, 20, seed)
    mask = torch.ones_like(ids)
    options |= {"max_new_tokens": STEPS, "do_sample": False}
    return model.generate(ids, attention_mask=mask, **options)[0, 20:].tolist()


def in_a_thread(call):
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


# ---- hooks beside compiled layers -------------------------------------------------------------


class Steering:
    """A hook that moves what a module returns, and counts."""

    def __init__(self):
        self.calls = 0

    def __call__(self, module, args, output):
        self.calls += 1
        first = output[0] if isinstance(output, tuple) else output
        moved = first + 30 * torch.sin(torch.arange(first.size(-1)).float())
        return (moved, *output[1:]) if isinstance(output, tuple) else moved


def of_a_module(find, layer):
    return lambda model, hook: find(text_model(model).layers[layer]).register_forward_hook(hook)


def of_every_mlp(model, hook):
    """A global hook of torch, that acts on one module."""
    mlp = text_model(model).layers[1].mlp
    return register_module_forward_hook(
        lambda module, *args: hook(module, *args) if module is mlp else None
    )


PLACES = {
    f"{name}-{layer}": of_a_module(find, layer)
    for layer in (1, 2)  # alike in most architectures: they share a graph
    for name, find in {
        "layer": lambda layer: layer,
        "mlp": lambda layer: layer.mlp,
        "norm": lambda layer: layer.input_layernorm,
    }.items()
} | {"global": of_every_mlp}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("kind", representatives(ALL_KINDS))
def test_a_hook_acts_in_every_step_of_compiled_layers(kind, place):
    model, hook = patched_model(kind), Steering()
    plain = generated(model)
    handle = place(model, hook)
    steered, calls = generated(model), hook.calls
    assert steered != plain and calls >= STEPS
    handle.remove()

    # before anything is compiled, then removed, then again in a model with compiled layers
    handle = place(model, hook)
    for _ in range(2):
        hook.calls = 0
        assert generated(model, **COMPILED) == steered
        assert hook.calls == calls
        handle.remove()
        assert generated(model, **COMPILED) == plain
        handle = place(model, hook)
    handle.remove()


# ---- records and threads ----------------------------------------------------------------------


def recorded(model, seed):
    with models.record_indices(model) as record:
        generated(model, seed)
    return record


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[i], other[i]) for i in one)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_records_and_replays_are_of_the_thread_that_asked_for_them(kind):
    model = patched_model(kind)
    first, second = recorded(model, 1), recorded(model, 2)
    want = generated(model, 2)
    assert not same(first, second)

    with models.record_indices(model) as record:
        generated(model, 1)
        other = in_a_thread(lambda: recorded(model, 2))
        assert in_a_thread(lambda: generated(model, 2)) == want
    assert same(record, first) and same(other, second)

    with models.replay_indices(model, first):
        assert generated(model, 2) != want or kind == "deepseek_v4"  # few rows to select from
        assert in_a_thread(lambda: generated(model, 2)) == want
    assert generated(model, 2) == want


def test_contexts_that_overlap_leave_nothing_behind():
    model = patched_model()
    want = recorded(model, 1)
    first, second = models.record_indices(model), models.record_indices(model)
    one, two = first.__enter__(), second.__enter__()
    generated(model, 1)
    first.__exit__(None, None, None)  # as two threads may leave them
    second.__exit__(None, None, None)
    assert same(one, want) and same(two, want)
    model.generate(token_ids(1, 20), num_beams=2, max_new_tokens=2)  # rejected by a recorder

    left_elsewhere = models.record_indices(model)
    left_elsewhere.__enter__()
    in_a_thread(lambda: left_elsewhere.__exit__(None, None, None))
    model.generate(token_ids(1, 20), num_beams=2, max_new_tokens=2)


def test_a_context_is_of_its_model_and_the_innermost_replay_counts():
    model, other = patched_model(), patched_model()
    first, second = recorded(model, 1), recorded(model, 2)
    with models.replay_indices(model, first), models.replay_indices(model, second):
        with models.record_indices(model) as record, models.record_indices(other) as nothing:
            generated(model, 2)
    assert same(record, second)
    assert all(not indices.numel() for indices in nothing.values())


@pytest.mark.parametrize("replayed", [0, 9, 6], ids="padding-of-{}".format)
@pytest.mark.parametrize("path", ["ops", "upstream"])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_record_of_other_padding_is_rejected_on_every_path(kind, path, replayed):
    """Its positions count from the first real token."""
    model, ids = patched_model(kind), token_ids(2, 24)
    models.use_custom_pypto(model, training=path)

    def call(pads):
        mask = torch.ones_like(ids)
        mask[1, :pads] = 0
        return model(ids, attention_mask=mask, use_cache=False)

    with models.record_indices(model) as record:
        call(5)
    with models.replay_indices(model, record):
        call(5)
        for _ in range(2):  # in evaluation mode, then in training
            with pytest.raises(ValueError, match="replay_indices: attention_mask must have"):
                call(replayed)
            model.train()


def test_a_model_is_not_unpatched_inside_of_a_record():
    model = patched_model()
    with models.record_indices(model):
        with pytest.raises(ValueError, match="must be called outside of record_indices"):
            models.use_transformers(model)
        in_a_thread(lambda: models.use_transformers(patched_model()))  # others may
    models.use_transformers(model)


@pytest.mark.parametrize("kind", representatives(ALL_KINDS))
def test_layers_that_run_again_in_the_backward_attend_to_the_record_after_the_context(kind):
    model, ids = patched_model(kind).train(), token_ids(1, 24)
    models.use_custom_pypto(model, training="ops")
    with models.record_indices(model) as record, torch.enable_grad():
        model(token_ids(1, 24, seed=5), use_cache=False)
    gradients = []
    for inside in (True, False):
        model.gradient_checkpointing_enable()
        model.zero_grad()
        with torch.enable_grad():
            with models.replay_indices(model, record):
                loss = model(ids, labels=ids, use_cache=False).loss
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    one, two = gradients
    assert one and one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


# ---- Ctrl-C ---------------------------------------------------------------------------------


class Struck(KeyboardInterrupt):
    pass


def struck(call, line: int | None) -> int:
    """Runs ``call``, with an interruption at one of the lines of caches and hooks that run in it;
    the number of these lines."""
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
        own = name.startswith(folder) and ("cache" in name or "generation" in name)
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


# ---- other processes ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", representatives(ALL_KINDS))
def test_a_model_goes_to_another_process_after_its_layers_were_compiled(kind):
    model = patched_model(kind)
    want = generated(model, **COMPILED)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copied = torch.load(file, weights_only=False)
    assert generated(copied) == generated(copied, **COMPILED) == want
    assert generated(model, **COMPILED) == want


def test_an_output_with_the_indexers_loss_goes_to_another_process():
    model, ids = patched_model().train(), token_ids(1, 20)
    models.use_custom_pypto(model, indexer_loss="sparse")
    with torch.enable_grad():
        output = model(ids, labels=ids)
    items = {name: x.detach() for name, x in output.items() if isinstance(x, torch.Tensor)}
    file = io.BytesIO()
    torch.save(type(output)(**items), file)
    file.seek(0)
    copied = torch.load(file, weights_only=False)
    assert type(copied) is type(output) and copied.keys() == items.keys()
    assert torch.equal(copied.indexer_loss, output.indexer_loss)
    assert torch.equal(copied[0], output[0])
