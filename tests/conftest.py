"""What every test starts from: poisoned uninitialised memory, one seed, all threads; and where the
tests marked ``ascend_host`` run, in a process of their own."""

import os
import sys

import hypothesis
import pytest
import torch
from ascend_host_worker import Worker

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


def on_stand_in() -> bool:
    """Whether this is the process on the stand-in for CANN."""
    ascend_host = sys.modules.get("custom_pypto.simulation.ascend_host")
    return ascend_host is not None and ascend_host.is_running()


worker = pytest.StashKey[Worker]()


def pytest_configure(config):
    config.stash[worker] = Worker()


def pytest_unconfigure(config):
    config.stash[worker].stop()


def pytest_runtest_protocol(item, nextitem):
    if not item.get_closest_marker("ascend_host") or on_stand_in():
        return None  # as any test
    config, hook = item.config, item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)

    def own_report(outcome, why):
        return pytest.TestReport(item.nodeid, item.location, {}, outcome, why, "setup")

    try:
        options = ["--slow"] if config.getoption("--slow") else []
        reports = [
            hook.pytest_report_from_serializable(config=config, data=data)
            for data in config.stash[worker].run(item.nodeid, options)
        ]
    except pytest.skip.Exception as skip:
        reports = [own_report("skipped", (str(item.path), item.location[1], str(skip)))]
    except RuntimeError as error:
        reports = [own_report("failed", str(error))]
    for report in reports:
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


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
