"""The trained checkpoints: their answers are right only if indexer and attention are."""

import functools
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from custom_pypto import models

CHECKPOINTS = Path(__file__).parents[1] / "examples/checkpoints"
sys.path.append(str(CHECKPOINTS.parent))

import train_lookup  # noqa: E402
import train_lookup_v4  # noqa: E402

TASKS = {"lookup": train_lookup, "lookup_v4": train_lookup_v4}
BY_LENGTH = [256, 512, *(pytest.param(n, marks=pytest.mark.slow) for n in (1024, 2048))]
CHANCE = 1 / len(train_lookup.VALUES)


@functools.cache
def upstream(name):
    return AutoModelForCausalLM.from_pretrained(CHECKPOINTS / name, dtype=torch.float32)


def load(name, dtype=torch.float32):
    return models.load(CHECKPOINTS / name, dtype=dtype)


def patched_accuracy(name, model, length):
    models.use_custom_pypto(model)
    cache = functools.partial(models.PagedCache, model, 1, length)
    return TASKS[name].lookup_accuracy(model, length, new_cache=cache)


@pytest.mark.parametrize("length", BY_LENGTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", TASKS)
def test_a_patched_model_is_as_accurate_as_upstream(name, dtype, length):
    expected = TASKS[name].lookup_accuracy(upstream(name), length)
    assert expected > 0.9
    assert abs(patched_accuracy(name, load(name, dtype), length) - expected) <= 0.02


@torch.no_grad()
def negated_index_weights(model):
    for layer in model.model.layers:
        layer.self_attn.indexer.weights_proj.weight.neg_()
    return model


V4_DEFECTS = {
    defect.__name__: functools.partial(train_lookup_v4.broken, defect=defect)
    for defect in train_lookup_v4.DEFECTS
}


@pytest.mark.parametrize("length", BY_LENGTH)
@pytest.mark.parametrize(
    "name, patched, break_",
    [
        pytest.param("lookup", True, negated_index_weights, id="lookup"),
        *(
            pytest.param("lookup_v4", False, it, id=f"upstream-{n}", marks=pytest.mark.slow)
            for n, it in V4_DEFECTS.items()
        ),
        *(pytest.param("lookup_v4", True, it, id=f"patched-{n}") for n, it in V4_DEFECTS.items()),
    ],
)
def test_a_defect_answers_by_chance(name, patched, break_, length):
    model = break_(load(name) if name == "lookup" else upstream(name))
    accuracy = functools.partial(patched_accuracy, name) if patched else TASKS[name].lookup_accuracy
    # 128 questions: three standard deviations of guessing are 0.09
    assert accuracy(model, length) < CHANCE + 0.12


@pytest.mark.slow
@pytest.mark.sim
@pytest.mark.parametrize("generated", [False, True], ids=["interpreter", "generated"])
@torch.no_grad()
def test_npu_programs_answer_as_the_cpu_kernels_do(generated):
    """Prompt in one call, then token by token; every op in PyPTO's interpreter, or as generated
    code."""
    if importlib.util.find_spec("pypto") is None:
        pytest.skip("the sim extra is not installed")
    from custom_pypto import simulation

    model = load("lookup", torch.bfloat16)
    input_ids, labels = train_lookup.lookup_batch(1, 96, questions=6, seed=3)
    calls = input_ids.split([96 - 12, *[1] * 12], dim=1)

    def answers():
        cache = models.PagedCache(model, 1, 96)
        return torch.cat([model(ids, cache=cache).logits.argmax(-1) for ids in calls], dim=1)[
            :, :-1
        ]

    expected = answers()
    with simulation.on_cpu(generated=generated):
        got = answers()
    asked = labels[:, 1:] >= 0
    assert torch.equal(got[asked], expected[asked])
    assert (got == labels[:, 1:])[asked].float().mean() > 0.9


@pytest.mark.parametrize("length", [256, 512, 1024])
def test_the_second_layer_may_attend_to_what_the_first_selects(length):
    """The figures of docs/shared_selections.md: 127 of 128 at least."""
    model = models.use_custom_pypto(load("lookup"), index_topk_pattern="FS")
    cache = functools.partial(models.PagedCache, model, 1, length)
    assert train_lookup.lookup_accuracy(model, length, new_cache=cache) >= 127 / 128
