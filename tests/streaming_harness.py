"""Checkpoints whose experts can stay in their files, and models that have them there."""

import json

import pytest
import torch
from published import published
from tiny import KINDS, tiny_model
from torch.distributed.tensor import DTensor

from custom_pypto import models
from custom_pypto.models.streaming.pool import Pool
from custom_pypto.models.streaming.slots import State
from custom_pypto.models.weights.published import METHOD

# blocks of fp8 must not reach from one projection into the next
WIDE = dict(moe_intermediate_size=128, hidden_size=256)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="session", name="folder")
def folders(tmp_path_factory):
    """A function that makes a published checkpoint, or saves the model of it in a format, once; or
    saves a model in bfloat16."""
    made = {}

    def folder(kind=KINDS[0], weights=None):
        if (kind, weights) not in made:
            path = tmp_path_factory.mktemp("published")
            if weights == "bfloat16":
                tiny_model(kind).bfloat16().save_pretrained(path)
            else:
                published(path, kind, **WIDE)
            if weights not in (None, "bfloat16"):
                saved = tmp_path_factory.mktemp("saved")
                models.load(path, weights=weights).save_pretrained(saved)
                path = saved
            made[kind, weights] = path
        return made[kind, weights]

    return folder


def in_memory(path, **options):
    """The model in memory, in the formats that a streamed one has."""
    described = json.loads((path / "config.json").read_text()).get("quantization_config", {})
    if described.get("quant_method") != METHOD:
        options["weights"] = {"experts": "stored", "rest": None} | options.get("weights", {})
    return models.load(path, **options)


def budget(model, slots):
    """Bytes for the weights of ``model``, or for this rank's part, but of experts for so many."""
    state = {
        name: x.to_local() if isinstance(x, DTensor) else x
        for name, x in model.state_dict().items()
    }
    experts = {name: x for name, x in state.items() if ".experts." in name}
    [count] = {len(x) for x in experts.values()}
    layers = len({name.partition(".experts.")[0] for name in experts})
    of_experts = sum(x.nbytes for x in experts.values())
    one = of_experts // (count * layers)
    # and a little: of ranks the last one has fewer rows of the vocabulary
    return sum(x.nbytes for x in state.values()) - of_experts + slots * one + one // 4


def streamed(path, slots, whole=None, **options):
    """A model with so many experts in memory."""
    memory = budget(whole or in_memory(path, **options), slots)
    model = models.load(path, memory=memory, **options)
    assert pool_of(model).slots.count == slots
    return model


def pool_of(model) -> Pool:
    [pool] = {m.streamed.pool for m in model.modules() if hasattr(m, "streamed")}
    return pool


def generated(model, ids, tokens=8, **options):
    return model.generate(
        ids,
        attention_mask=options.pop("attention_mask", torch.ones_like(ids)),
        max_new_tokens=tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )


def assert_same(got, want):
    assert torch.equal(got.sequences, want.sequences)
    for of_got, of_want in zip(got.logits, want.logits, strict=True):
        assert torch.equal(of_got, of_want)


def assert_at_rest(pool):
    """Nobody needs a slot, and none is lost."""
    with pool.changed:
        while any(slot.state != State.READY for slot in pool.slots.taken.values()):
            pool.changed.wait()
        slots = pool.slots.taken.values()
        assert not any(len(slot.calls) for slot in slots)
        assert len({slot.index for slot in slots}) == len(slots) <= pool.slots.count
