"""What every test starts from: poisoned uninitialised memory, one seed, all threads; and which
tests a run takes.

With ``--all`` a run takes every case. Without, it leaves out those marked ``slow`` and thins the
products of parameters: each value of each parameter occurs, not each combination.
Those marked ``ascend_host`` are taken by ``--ascend-host``, and alone.
"""

import contextlib
import functools
import io
import os
import runpy
import signal
import sys
import warnings
from collections import defaultdict
from pathlib import Path

import hypothesis
import processes
import pytest
import torch
from cpu_time import CpuTime
from repository import REPOSITORY

hypothesis.settings.register_profile(
    "custom_pypto", deadline=None, derandomize="CI" in os.environ, print_blob=True
)
hypothesis.settings.load_profile("custom_pypto")

# Programs that tests interrupt inherit it where a shell that has this run in the background, or
# nohup, had SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

simulator_problem = pytest.StashKey[str]()


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run every case of every test")
    parser.addoption(
        "--ascend-host",
        action="store_true",
        help="run the tests, and only these, that run on the host simulator of CANN",
    )


def function_of(item) -> tuple:
    return item.path, getattr(item, "originalname", item.name)


def thinned(items: list) -> list:
    """Of a function's cases, a diagonal through the product of its parameters."""
    functions, kept = defaultdict(dict), set()
    for item in items:  # cases that share a fixture run together, those of a function may not
        ids = item.callspec._idlist if hasattr(item, "callspec") else ()  # one for each decorator
        functions[function_of(item)][tuple(ids)] = item
    for cases in functions.values():
        values = [list(dict.fromkeys(ids)) for ids in zip(*cases, strict=True)]
        longest = max(map(len, values), default=1)
        diagonal = {tuple(own[i % len(own)] for own in values) for i in range(longest)}
        seen = {(i, one) for ids in diagonal & cases.keys() for i, one in enumerate(ids)}
        # where the product has gaps, each value that the diagonal misses
        diagonal |= {ids for ids in cases if not seen.issuperset(enumerate(ids))}
        kept |= {cases[ids] for ids in diagonal & cases.keys()}
    return [item for item in items if item in kept]


@functools.cache
def names_simulator(file: Path) -> bool:
    return "mark.ascend_host" in file.read_text()


def pytest_ignore_collect(collection_path, config):
    """Of the run on the simulator, files without its tests, which would be imported for nothing."""
    simulator = config.getoption("ascend_host") and collection_path.suffix == ".py"
    return True if simulator and not names_simulator(collection_path) else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    everything, simulator = config.getoption("all"), config.getoption("ascend_host")
    for item in items:
        if item.get_closest_marker("ascend_host") and not names_simulator(item.path):
            raise pytest.UsageError(f"{item.nodeid}: its file must name pytest.mark.ascend_host")
    wanted = [
        item
        for item in items
        if bool(item.get_closest_marker("ascend_host")) is simulator
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
        config.stash[simulator_problem] = str(problem)
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch_npu's own
            ascend_host.start()
    except ascend_host.AscendHostUnavailable as problem:
        config.stash[simulator_problem] = str(problem)


def pytest_runtest_setup(item):
    if problem := item.config.stash.get(simulator_problem, None):
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


@pytest.fixture(scope="session")
def with_torch():
    """Runs code in a process that has imported torch, which takes a second, and nothing else."""
    with processes.forking() as run:
        yield run


@pytest.fixture
def run_example(monkeypatch, capsys):
    """Runs an example in this process, which has imported what each would import anew."""
    import transformers  # which may be missing

    def run_example(name: str, *arguments: str, stdin: str = "") -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            runpy.run_path(str(REPOSITORY / "examples" / name), run_name="__main__")
        except SystemExit as end:
            return str(end)
        said = capsys.readouterr()
        run_example.errors = said.err
        return said.out

    yield run_example
    transformers.utils.logging.enable_progress_bar()


# ---- NPUs ----------------------------------------------------------------------------------------


@pytest.fixture
def for_compiled_models(monkeypatch):
    torch.set_num_threads(1)  # tensors this small only wait for a second one
    # torchair makes the inputs of a captured graph by torch.empty inside of the capture: what fills
    # them here would do so again at every replay
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    with torch.no_grad():
        yield


@contextlib.contextmanager
def on_cpu(**options):
    from custom_pypto import simulation  # with PyPTO, which may be missing

    with simulation.on_cpu(**options):
        yield


@pytest.fixture
def interpreted():
    with on_cpu():
        yield


@pytest.fixture
def generated():
    with on_cpu(generated=True):
        yield


@pytest.fixture(params=["interpreted", pytest.param("generated", marks=pytest.mark.slow)])
def both_ways(request):
    with on_cpu(generated=request.param == "generated"):
        yield


@pytest.fixture
def fresh_kernels(monkeypatch, request):
    """Kernels of the test's own, of the programs that it changes: ``PROGRAMS`` of its module."""
    for module in request.module.PROGRAMS:
        monkeypatch.setattr(module, "kernel", functools.cache(module.kernel.__wrapped__))
