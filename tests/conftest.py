"""What every test starts from: poisoned uninitialised memory, one seed, all threads; and which
tests a run takes.

With ``--all`` a run takes every case. Without, it leaves out those marked ``slow`` and thins the
products of parameters: each value of each parameter occurs, not each combination.
Those marked ``ascend_host`` are taken by ``--ascend-host``, and alone.
"""

import itertools
import os
import warnings

import hypothesis
import pytest
import torch
from cpu_time import CpuTime

hypothesis.settings.register_profile(
    "custom_pypto", deadline=None, derandomize="CI" in os.environ, print_blob=True
)
hypothesis.settings.load_profile("custom_pypto")

stand_in_problem = pytest.StashKey[str]()


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run every case of every test")
    parser.addoption(
        "--ascend-host",
        action="store_true",
        help="run the tests, and only these, that run on the host stand-in for CANN",
    )


def function_of(item) -> tuple:
    return item.path, getattr(item, "originalname", item.name)


def thinned(items: list) -> list:
    """Of a function's cases, a diagonal through the product of its parameters."""
    kept = []
    for _, cases in itertools.groupby(items, function_of):
        cases = list(cases)
        # the ids of each parametrization; the indices of a case count the cases of the product
        places = [
            tuple(case.callspec._idlist) if hasattr(case, "callspec") else () for case in cases
        ]
        values = [list(dict.fromkeys(column)) for column in zip(*places, strict=True)]
        longest = max(map(len, values), default=1)
        diagonal = {tuple(own[i % len(own)] for own in values) for i in range(longest)}
        kept += [case for case, place in zip(cases, places, strict=True) if place in diagonal]
    return kept


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    everything, stand_in = config.getoption("all"), config.getoption("ascend_host")
    wanted = [
        item
        for item in items
        if bool(item.get_closest_marker("ascend_host")) is stand_in
        and (everything or not item.get_closest_marker("slow"))
    ]
    wanted = wanted if everything else thinned(wanted)
    config.hook.pytest_deselected(items=list(set(items) - set(wanted)))
    items[:] = wanted


def pytest_configure(config):
    config.pluginmanager.register(CpuTime(config))
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
