"""Training of a whole model on the NPU kernels, in PyPTO's interpreter."""

import copy

import pytest
import torch
from tiny import tiny_model, token_ids
from training_harness import trained
from with_pypto import simulation

from custom_pypto import models

pytestmark = pytest.mark.sim


def steps(model, batches) -> list:
    """Loss and gradients of each step."""
    found = []
    for batch in batches:
        loss, gradients = trained(model, batch)
        found.append((loss, {name: g.clone() for name, g in gradients.items()}))
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.01 * p.grad
    return found


@pytest.mark.slow
@pytest.mark.parametrize("loss", [None, "sparse"])
def test_three_steps_on_the_programs_are_as_near_to_float32_as_on_the_cpu(loss):
    """All visible keys are selected and no layer routes: rounding changes no choice."""
    sizes = dict(num_hidden_layers=2, first_k_dense_replace=2, index_head_dim=128, index_topk=64)
    exact = tiny_model(**sizes).train()
    half = copy.deepcopy(exact).bfloat16()
    exact.load_state_dict(half.state_dict())
    batches = []
    for seed in range(3):
        ids = token_ids(2, 12, seed)
        batches.append({"input_ids": ids, "labels": ids})
    wanted, on_cpu, on_npu = (
        models.use_custom_pypto(model, training="ops", indexer_loss=loss)
        for model in (exact, half, copy.deepcopy(half))
    )
    expected, others = steps(wanted, batches), steps(on_cpu, batches)
    with simulation.on_cpu():
        got = steps(on_npu, batches)
    errors, allowed = [], []  # of each parameter in each step, relative to its gradient
    for (found, mine), (_, theirs), (right, exactly) in zip(got, others, expected, strict=True):
        assert abs(found - right) <= 2**-8 * right
        assert mine.keys() == theirs.keys() == exactly.keys()
        for name, gradient in exactly.items():
            for of_all, grads in ((errors, mine), (allowed, theirs)):
                of_all.append((grads[name].float() - gradient).norm() / gradient.norm())
    # the programs round probabilities and their gradients besides results: three times the variance
    assert torch.stack(errors).norm() <= 3**0.5 * torch.stack(allowed).norm()
