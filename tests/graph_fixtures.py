"""Fixtures of tests that compile models for NPUs."""

import pytest
import torch


@pytest.fixture
def for_compiled_models(monkeypatch):
    torch.set_num_threads(1)  # tensors this small only wait for a second one
    # torchair makes the inputs of a captured graph by torch.empty inside of the capture: what fills
    # them here would do so again at every replay
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    with torch.no_grad():
        yield
