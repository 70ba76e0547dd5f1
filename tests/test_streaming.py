"""Models whose routed experts stay in their files: outputs equal those of the model in memory, to
the bit, whatever is in memory at the time."""

import pytest
import torch
from published import V4, published
from tiny import KINDS, token_ids

import models
from models.streaming.experts import StreamedExperts
from models.streaming.pool import Pool

WIDE = dict(moe_intermediate_size=128, hidden_size=256)
PROMPTS = (1, 3, 17, 300)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module", name="folder")
def folders(tmp_path_factory):
    """A function that makes a checkpoint once."""
    made = {}

    def folder(kind=KINDS[0], weights=None):
        if (kind, weights) not in made:
            path = published(tmp_path_factory.mktemp("published"), kind, **WIDE)
            if weights is not None:
                saved = tmp_path_factory.mktemp("saved")
                models.load(path, weights=weights).save_pretrained(saved)
                path = saved
            made[kind, weights] = path
        return made[kind, weights]

    return folder


def loaded(path, slots, **options):
    """The model in memory, and one with so many experts in memory at a time."""
    if models_in_memory := options.pop("whole", None):
        whole = models_in_memory
    else:
        stored = {} if is_saved(path) else {"weights": {"experts": "stored"}}
        whole = models.load(path, **stored, **options)
    return whole, streamed(path, whole, slots, **options)


def is_saved(path):
    return '"custom_pypto"' in (path / "config.json").read_text()


def streamed(path, whole, slots, **options):
    of_experts = {name: x for name, x in whole.state_dict().items() if ".experts." in name}
    [count] = {len(x) for x in of_experts.values()}
    layers = len({name.partition(".mlp.")[0] for name in of_experts})
    one = sum(x.nbytes for x in of_experts.values()) // (count * layers)
    rest = sum(x.nbytes for x in whole.state_dict().values()) - one * count * layers
    model = models.load(path, memory=rest + slots * one, **options)
    assert pool_of(model).slots.count == slots
    return model


def pool_of(model) -> Pool:
    [pool] = {m.streamed.pool for m in model.modules() if isinstance(m, StreamedExperts)}
    return pool


def generated(model, ids, tokens=8, **options):
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
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


CASES = [(kind, None) for kind in KINDS] + [(V4, None)]
CASES += [(KINDS[0], "int8"), (KINDS[0], "int4"), (V4, "int4"), (KINDS[0], "stored")]


@pytest.mark.parametrize("kind, weights", CASES)
def test_outputs_are_those_of_the_model_in_memory(folder, kind, weights):
    path = folder(kind, weights)
    whole, model = loaded(path, slots=3)
    for tokens in PROMPTS[:3]:
        ids = token_ids(2, tokens)
        assert_same(generated(model, ids), generated(whole, ids))
    counts = pool_of(model).counts()
    assert counts.hits and counts.misses and counts.nbytes
