"""Routed experts in a record are those of the routers, and a replay passes tokens through them."""

import pytest
import torch
from model_harness import WRONG
from test_models_replay import (
    CASES,
    logits,
    patched_model,
    prompt,
    rollout,
    same,
)
from tiny import ALL_KINDS, representatives, token_ids
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.overrides import TorchFunctionMode
from training_harness import checkpointed

from custom_pypto import models
from custom_pypto.models import CACHE
from custom_pypto.models.calls import Around
from custom_pypto.models.patched import text_model
from custom_pypto.models.replay import Replay
from custom_pypto.models.routing import AskingRouter, routed_layers, router_of, weights_of


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)  # tensors this small only wait for a second one


def layers_of(model):
    """The layers with routed experts, by number."""
    return {i: layer for layer, i in routed_layers("", text_model(model)).items()}


def routers(model):
    """The routers of transformers, by layer."""
    return {i: router_of(layer).inside for i, layer in layers_of(model).items()}


def other_routers(kind, training="auto"):
    """The same model but for its routers, which prefer the experts that those of the rollout avoid;
    tables of token ids name the next expert."""
    model = patched_model(kind, training)
    for router in routers(model).values():
        router.weight.data.neg_()
        if hasattr(router, "tid2eid"):
            router.tid2eid.copy_((router.tid2eid + 1) % router.num_experts)
    return model


def fed_in(model, fed, split):
    """Logits of these tokens, so many in each forward on a cache."""
    cache, parts, first = models.PagedCache(model, 2, 48, block_size=16), [], 0
    for n in split:
        step = {name: x[:, first : first + n] for name, x in fed.items()}
        step["attention_mask"] = fed["attention_mask"][:, : first + n]
        parts.append(model(**step, **{CACHE: cache}).logits)
        first += n
    return torch.cat(parts, 1)


# ---- what a record has --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_record_has_the_experts_that_each_router_chose_of_every_token(kind):
    model, seen = patched_model(kind), {}
    fed, record = rollout(model, experts=True)
    assert record.experts.keys() == routers(model).keys() and record.experts
    for i, router in routers(model).items():
        router.register_forward_hook(lambda _, args, out, i=i: seen.update({i: out[2]}))
    with torch.no_grad():
        model(**fed, use_cache=False)
    for layer, experts in record.experts.items():
        assert experts.dtype == torch.int32 and experts.shape == (2, 37, 2)
        assert torch.equal(experts.sort(-1).values, seen[layer].view(2, 37, 2).sort(-1).values)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_record_follows_chunks_crops_and_second_turns(kind):
    model = patched_model(kind)
    fed, whole = rollout(model, experts=True)
    with models.record_indices(model, experts=True) as record:
        model.generate(**prompt(), max_new_tokens=8, do_sample=False, prefill_chunk_size=16)
    assert same(sorted_experts(record), sorted_experts(whole))
    with models.record_indices(model, experts=True) as record, torch.no_grad():
        model(token_ids(2, 20, seed=7))  # of another cache
        cache = models.PagedCache(model, 2, 64, block_size=16)
        states = kind == "glm5_next"  # which forget no token
        for first, end in [(0, 20), (20, 30), (30 if states else 28, 37)]:
            if first < int(cache.seen):
                cache.crop(first - int(cache.seen))
            step = {name: x[:, first:end] for name, x in fed.items()}
            step["attention_mask"] = fed["attention_mask"][:, :end]
            model(**step, **{CACHE: cache})
    assert same(sorted_experts(record), sorted_experts(whole))


def sorted_experts(record):
    """The op that routes a few tokens gives them in another order than torch."""
    experts = {i: x.sort(-1).values for i, x in record.experts.items()}
    return models.Record({i: x.sort(-1).values for i, x in record.indices.items()}, experts)


def test_a_record_has_no_forward_on_the_upstream_path():
    model = patched_model(training="upstream").train()
    with models.record_indices(model, experts=True) as record:
        model(token_ids(2, 20), use_cache=False)
    assert record.experts and all(x.numel() == 0 for x in record.tensors().values())


def test_an_exchange_of_sequences_is_rejected():
    model, ids = patched_model(), token_ids(1, 20)
    with models.record_indices(model, experts=True) as record:
        model.generate(ids.expand(2, -1), max_new_tokens=4, do_sample=False)
    recording = models.record_indices(model, experts=True)
    for name, context in (("record", recording), ("replay", models.replay_indices(model, record))):
        message = f"{name}_indices: sequences must keep their places .*of beam search"
        with pytest.raises(ValueError, match=message), context:
            model.generate(ids, num_beams=2, max_new_tokens=4, do_sample=False)


# ---- what a replay repeats ----------------------------------------------------------------------


@pytest.mark.parametrize("split", [[37], [30, *[1] * 7], [16, 14, 3, 4]], ids=str)
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_replay_on_the_same_weights_keeps_every_bit(kind, split):
    model = patched_model(kind)
    fed, _ = rollout(model)
    with torch.no_grad():
        with models.record_indices(model, experts=True) as record:
            want = fed_in(model, fed, split)
        with (
            models.replay_indices(model, record),
            models.record_indices(model, experts=True) as again,
        ):
            got = fed_in(model, fed, split)
    assert torch.equal(got, want) and same(again, record)


@pytest.mark.parametrize("kind", ["deepseek_v32", "deepseek_v4"])
def test_weights_of_the_op_that_routes_a_few_tokens_keep_every_bit(kind):
    layer = layers_of(patched_model(kind))[1]
    router, rounded, number = router_of(layer), 0, {layer: 1}
    with torch.no_grad():
        for x in torch.randn(200, 4, 1, router.inside.hidden_dim):
            logits, weights, experts = router.inside(x)
            of_torch = weights_of(router.inside, layer.scores(router.inside, logits), experts)
            rounded += (of_torch != weights).sum()
            record = models.Record(experts={1: experts.view(4, 1, -1).int()})
            around = Around((Replay(None, record, number),), None)
            assert torch.equal(AskingRouter(layer, router, around)(x)[1], weights)
    assert rounded


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_other_routers_pass_tokens_through_the_recorded_experts(kind):
    model = other_routers(kind)
    fed, record = rollout(patched_model(kind), experts=True)
    with torch.no_grad():
        with models.replay_indices(model, record, experts=False):
            with models.record_indices(model, experts=True) as own:
                alone = logits(model, fed)
        with models.replay_indices(model, record):
            with models.record_indices(model, experts=True) as again:
                replayed = logits(model, fed)
                in_steps = fed_in(model, fed, [30, *[1] * 7])[fed["attention_mask"].bool()]
    assert same(again, record)
    own, want = (sorted_experts(x) for x in (own, record))
    assert all((own.experts[i] != x).any() for i, x in want.experts.items())
    assert (alone - replayed).abs().max() > WRONG
    torch.testing.assert_close(in_steps, replayed, rtol=0, atol=CASES[kind].tolerance)


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("path", ["ops", "upstream"])
def test_training_passes_through_the_recorded_experts_and_routers_learn(kind, path, checkpointing):
    case, trained = CASES[kind], other_routers(kind, path)
    fed, record = rollout(patched_model(kind), 1, case.pads, experts=True)
    with models.replay_indices(trained, record), torch.no_grad():
        want = logits(trained.eval(), fed)
    if checkpointing:
        checkpointed(trained)
    trained.train()
    buffers = {name: x.clone() for name, x in trained.named_buffers()}
    with models.replay_indices(trained, record):
        got = logits(trained, fed)
        got.logsumexp(-1).sum().backward()
    # both choices are the record's: no seed has to leave them clear
    torch.testing.assert_close(got.detach(), want, rtol=0, atol=case.tolerance)
    for router in routers(trained).values():
        gradient = router.weight.grad
        chosen = gradient.abs().sum(-1) > 0
        assert gradient.isfinite().all() and chosen.sum() >= 2
    assert all(torch.equal(x, buffers[name]) for name, x in trained.named_buffers())


class Chooses(TorchFunctionMode):
    """transformers' routers inside choose these experts, by their own code."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.gather:
            args = (*args[:2], self.experts)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_weights_and_gradients_are_those_of_the_router_that_chooses_the_same(kind):
    for layer in layers_of(patched_model(kind).train()).values():
        router = router_of(layer).inside
        x = torch.randn(1, 40, router.hidden_dim)
        others = [torch.randint(0, 199, (1, 40))] if hasattr(router, "tid2eid") else []
        experts = torch.stack([torch.randperm(router.num_experts)[:2] for _ in range(40)])
        results = []
        for mode in (Chooses(experts), None):
            router.zero_grad()
            if mode:
                with mode:
                    _, weights, _ = router(x, *others)
            else:
                found, _, own = router(x, *others)
                assert (own != experts).any()
                weights = weights_of(router, layer.scores(router, found), experts)
            (weights**2 @ torch.arange(1.0, 3.0)).sum().backward()
            results.append((weights.detach(), router.weight.grad))
        assert torch.equal(results[0][0], results[1][0])
        assert results[0][1].abs().max() > 0 and torch.equal(results[0][1], results[1][1])


def test_a_replay_without_experts_leaves_routers_alone():
    fed, record = rollout(patched_model(), experts=True)
    model = other_routers("deepseek_v32")
    with torch.no_grad():
        with models.replay_indices(model, record, experts=False):
            one = logits(model, fed)
        with models.replay_indices(model, models.Record(record.indices)):
            two = logits(model, fed)
    assert torch.equal(one, two)


@pytest.mark.parametrize("kind", representatives(ALL_KINDS))
def test_a_part_of_a_record_is_of_these_sequences_and_tokens(kind):
    fed, record = rollout(patched_model(kind), experts=True)
    model = other_routers(kind)
    with models.replay_indices(model, record), torch.no_grad():
        want = model(**fed).logits
    alone = {"input_ids": fed["input_ids"][1:, 9:30]}
    with models.replay_indices(model, record[1:, 9:30]), torch.no_grad():
        got = model(**alone).logits
    torch.testing.assert_close(got, want[1:, 9:30], rtol=0, atol=CASES[kind].tolerance)
    with pytest.raises(TypeError, match="slices of sequences and of tokens, got 1; record"):
        record[1]


# ---- what is rejected ---------------------------------------------------------------------------


def numbers(record, layer, x):
    record.experts[layer] = record.experts[layer].clone()
    record.experts[layer][1, 20, 1] = x
    return record


RECORDS = {
    "no-experts": (lambda r: models.Record(r.indices), "record must have experts for experts=True"),
    "a-dict": (lambda r: r.indices, "record must be a models.Record, got a dict"),
    "other-layers": (
        lambda r: models.Record(r.indices, {1: r.experts[1]}),
        r"record.experts must have layers \[1, 2\] .*got \[1\]",
    ),
    "other-k": (
        lambda r: models.Record(r.indices, {i: x[..., :1] for i, x in r.experts.items()}),
        r"record.experts\[1\] must be int32 \[B, T, 2\].*got torch.int32 \[2, 37, 1\]",
    ),
    "other-dtype": (
        lambda r: models.Record(r.indices, {i: x.long() for i, x in r.experts.items()}),
        r"record.experts\[1\] must be int32 .*got torch.int64",
    ),
    "other-tokens": (
        lambda r: models.Record(r.indices, r[:, 1:].experts),
        r"record.experts\[1\] must be .*\[B, T\] = \[2, 37\], got torch.int32 \[2, 36, 2\]",
    ),
    "experts-of-a-dense-layer": (
        lambda r: models.Record(r.indices, r.experts | {0: r.experts[1]}),
        r"record.experts must have layers \[1, 2\] .*got \[0, 1, 2\]",
    ),
    "too-large": (lambda r: numbers(r, 1, 8), r"experts\[1\] must have numbers from 0 to 7, .* 8"),
    "largest": (lambda r: numbers(r, 2, 2**31 - 1), r"experts\[2\] must have numbers from 0 to 7"),
    "negative": (lambda r: numbers(r, 2, -1), r"experts\[2\] must have numbers .*got -1 to"),
    "smallest": (lambda r: numbers(r, 1, -(2**31)), r"experts\[1\] must have numbers from 0 to 7"),
    "another-model": (
        lambda r: models.Record(r.indices, r.experts, r.made_for | {"model_type": "axk2"}),
        "of a model with model_type=deepseek_v32, got one of a model with model_type=axk2",
    ),
    "more-experts": (
        lambda r: models.Record(r.indices, r.experts, r.made_for | {"num_local_experts": 16}),
        "with num_local_experts=8, got one of a model with num_local_experts=16",
    ),
}


@pytest.mark.parametrize("change, message", RECORDS.values(), ids=RECORDS)
def test_a_record_of_another_model_is_rejected(change, message):
    model = patched_model()
    _, record = rollout(model, experts=True)
    with pytest.raises((ValueError, TypeError), match=f"replay_indices: .*{message}"):
        with models.replay_indices(model, change(record), experts=True):
            pass


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("training", [False, True], ids=["ops", "upstream"])
def test_more_tokens_than_recorded_are_rejected_before_any_layer(kind, training):
    model = patched_model(kind, "upstream").train(training)
    _, record = rollout(patched_model(kind), pads=CASES[kind].pads, experts=True)
    text_model(model).layers[0].register_forward_pre_hook(lambda *_: pytest.fail("a layer ran"))
    with models.replay_indices(model, record):
        for ids in (token_ids(2, 38), token_ids(1, 37)):
            with pytest.raises(ValueError, match=r"\[2, 37\] tokens \[B, T\] of the record"):
                model(ids)


def compiled(model):
    return torch.compile(model, backend="eager")


def checkpoint_wrapped(model):
    apply_activation_checkpointing(model, check_fn=lambda x: x in [*model.model.layers])
    return model


def offloaded(model):
    accelerate = pytest.importorskip("accelerate")
    return accelerate.cpu_offload(model)


def with_an_adapter_on_routers(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["o_proj"], target_parameters=["gate.weight"])
    adapted = peft.get_peft_model(model, config).eval()
    for name, x in adapted.named_parameters():
        if "gate" in name and "lora_B" in name:
            x.data.normal_(std=0.3)
    return adapted


WRAPPERS = [compiled, checkpoint_wrapped, offloaded, with_an_adapter_on_routers]


@pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda wrap: wrap.__name__)
def test_experts_of_a_wrapped_model_are_recorded_and_replayed(wrap):
    model, ids = patched_model(), token_ids(2, 20)
    wrapped = wrap(model)
    with torch.no_grad():
        with models.record_indices(model, experts=True) as record:
            want = wrapped(ids).logits
        with models.replay_indices(model, record, experts=True):
            got = wrapped(ids).logits
            with models.record_indices(model, experts=True) as again:
                wrapped(token_ids(2, 20, seed=4))
    assert torch.equal(got, want) and same(again, record)


def test_layers_that_the_patch_did_not_reach_are_rejected():
    model = patched_model()
    layer = model.model.layers[1]
    layer.__class__ = type(layer).__bases__[-1]
    with pytest.raises(TypeError, match="record_indices: layer 1 must be one .*experts=False"):
        with models.record_indices(model, experts=True):
            pass
    with models.record_indices(model):
        pass
