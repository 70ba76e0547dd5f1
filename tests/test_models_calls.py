"""What is around a call acts in every step of it, and in no other call of the model."""

import io
import threading

import pytest
import torch
from model_harness import no_grad_and_one_thread, patched_model, trace  # noqa: F401
from tiny import ALL_KINDS, representatives, token_ids
from torch.nn.modules.module import register_module_forward_hook
from training_harness import checkpointed
from transformers import CompileConfig

from custom_pypto import models
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
LIKE_OTHERS = {"mlp-1", "layer-2", "norm-2"}


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(place, id=id, marks=[pytest.mark.slow] if id in LIKE_OTHERS else [])
        for id, place in PLACES.items()
    ],
)
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
    with models.record_indices(model, experts=True) as record:
        generated(model, seed)
    return record


def same(one, other):
    one, other = one.tensors(), other.tensors()
    return one.keys() == other.keys() and all(torch.equal(one[i], other[i]) for i in one)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_records_and_replays_are_of_the_thread_that_asked_for_them(kind):
    model = patched_model(kind)
    first, second = recorded(model, 1), recorded(model, 2)
    want = generated(model, 2)
    assert not same(first, second)

    with models.record_indices(model, experts=True) as record:
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
    first, second = (models.record_indices(model, experts=True) for _ in range(2))
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
        with (
            models.record_indices(model, experts=True) as record,
            models.record_indices(other, experts=True) as nothing,
        ):
            generated(model, 2)
    assert same(record, second)
    assert all(not indices.numel() for indices in nothing.tensors().values())


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
    with models.record_indices(model, experts=True) as record, torch.enable_grad():
        model(token_ids(1, 24, seed=5), use_cache=False)
    gradients = []
    for inside in (True, False):
        checkpointed(model)
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
