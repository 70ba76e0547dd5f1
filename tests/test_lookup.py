"""The trained checkpoint: its answers are right only if indexer and attention are."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from transformers import DeepseekV32ForCausalLM

from custom_pypto import models

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from train_lookup import VALUES, lookup_accuracy, lookup_batch

CHECKPOINT = Path(__file__).parents[1] / "examples/checkpoints/lookup"
BY_LENGTH = [256, 512, *(pytest.param(n, marks=pytest.mark.slow) for n in (1024, 2048))]
CHANCE = 1 / len(VALUES)


def patched_accuracy(model, length):
    return lookup_accuracy(model, length, new_cache=lambda: models.PagedCache(model, 1, length))


@pytest.mark.parametrize("length", BY_LENGTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_patched_model_is_as_accurate_as_upstream(dtype, length):
    upstream = DeepseekV32ForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    expected = lookup_accuracy(upstream, length)
    assert expected > 0.9
    patched = patched_accuracy(models.load(CHECKPOINT, dtype=dtype), length)
    assert abs(patched - expected) <= 0.02


@pytest.mark.parametrize("length", BY_LENGTH)
def test_broken_indexer_answers_by_chance(length):
    model = models.load(CHECKPOINT, dtype=torch.float32)
    for layer in model.model.layers:
        layer.self_attn.indexer.weights_proj.weight.data.neg_()
    # 128 questions: three standard deviations of guessing are 0.09
    assert patched_accuracy(model, length) < CHANCE + 0.12


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

    model = models.load(CHECKPOINT, dtype=torch.bfloat16)
    input_ids, labels = lookup_batch(1, 96, questions=6, seed=3)
    calls = input_ids.split([96 - 12, *[1] * 12], dim=1)

    def answers():
        cache = models.PagedCache(model, 1, 96)
        return torch.cat(
            [model(ids, past_key_values=cache).logits.argmax(-1) for ids in calls], dim=1
        )[:, :-1]

    expected = answers()
    with simulation.on_cpu(generated=generated):
        got = answers()
    asked = labels[:, 1:] >= 0
    assert torch.equal(got[asked], expected[asked])
    assert (got == labels[:, 1:])[asked].float().mean() > 0.9
