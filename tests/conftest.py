"""What every test starts from: poisoned uninitialised memory, one seed, all threads."""

import os

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile(
    "custom_pypto", deadline=None, derandomize="CI" in os.environ, print_blob=True
)
hypothesis.settings.load_profile("custom_pypto")


def pytest_addoption(parser):
    parser.addoption(
        "--slow", action="store_true", help="run the tests marked slow, and only these"
    )


def pytest_collection_modifyitems(config, items):
    slow = config.getoption("--slow")
    others = [item for item in items if bool(item.get_closest_marker("slow")) is not slow]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


@pytest.fixture(scope="session", autouse=True)
def uninitialised_memory_is_poison():
    """Fills ``torch.empty`` with NaN (integers: the largest one), so unwritten output shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def same_start():
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.compiler.reset()
