"""The trained DeepSeek-V4: its answers are right only if indexer and compressor are."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import DeepseekV4ForCausalLM

from custom_pypto import models

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from train_lookup_v4 import DEFECTS, VALUES, broken, lookup_accuracy

CHECKPOINT = Path(__file__).parents[1] / "examples/checkpoints/lookup_v4"
BY_LENGTH = [256, 512, *(pytest.param(n, marks=pytest.mark.slow) for n in (1024, 2048))]
CHANCE = 1 / len(VALUES)


def load(dtype):
    return DeepseekV4ForCausalLM.from_pretrained(CHECKPOINT, dtype=dtype)


def patched_accuracy(model, length):
    models.use_custom_pypto(model)
    return lookup_accuracy(model, length, new_cache=partial(models.PagedCache, model, 1, length))


@pytest.mark.parametrize("length", BY_LENGTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_patched_model_is_as_accurate_as_upstream(dtype, length):
    expected = lookup_accuracy(load(torch.float32), length)
    assert expected > 0.9
    assert abs(patched_accuracy(load(dtype), length) - expected) <= 0.02


@pytest.mark.parametrize("length", BY_LENGTH)
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
@pytest.mark.parametrize(
    "accuracy",
    [lookup_accuracy, patched_accuracy],
    ids=["upstream", "patched"],
)
def test_a_defect_answers_by_chance(accuracy, defect, length):
    # 128 questions: three standard deviations of guessing are 0.09
    assert accuracy(broken(load(torch.float32), defect), length) < CHANCE + 0.12
