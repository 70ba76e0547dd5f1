"""What every test starts from: poisoned uninitialised memory, one seed, all threads.

A run takes neither the tests marked ``slow`` nor those marked ``ascend_host``, unless by option.
"""

import os
import warnings

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile(
    "custom_pypto", deadline=None, derandomize="CI" in os.environ, print_blob=True
)
hypothesis.settings.load_profile("custom_pypto")

# their tests run by themselves, with the option of that name; the stand-in for CANN changes torch
# for a whole process
ALONE = {"slow": "take minutes each", "ascend_host": "run on the host stand-in for CANN"}
stand_in_problem = pytest.StashKey[str]()


def pytest_addoption(parser):
    for mark, what in ALONE.items():
        option = f"--{mark.replace('_', '-')}"
        parser.addoption(
            option, action="store_true", help=f"run the tests, and only these, that {what}"
        )


def pytest_collection_modifyitems(config, items):
    def wanted(item):
        return all(bool(item.get_closest_marker(m)) is config.getoption(m) for m in ALONE)

    config.hook.pytest_deselected(items=[item for item in items if not wanted(item)])
    items[:] = filter(wanted, items)


def pytest_configure(config):
    shared_out = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if not config.getoption("ascend_host") or shared_out:
        return
    try:
        from custom_pypto.simulation import ascend_host
    except ImportError as problem:  # the sim extra has no PyPTO for this Python
        config.stash[stand_in_problem] = str(problem)
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch_npu's own
            ascend_host.start()
    except ascend_host.AscendHostUnavailable as problem:
        config.stash[stand_in_problem] = str(problem)


def pytest_runtest_setup(item):
    if problem := item.config.stash.get(stand_in_problem, None):
        pytest.skip(problem)


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
