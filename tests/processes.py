"""Processes of a test's own: Python on machines that are not as they should be, compilers, ranks;
and what a process takes of memory."""

import contextlib
import ctypes
import functools
import json
import mmap
import multiprocessing.forkserver
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from repository import REPOSITORY
from torch import Tensor

MIB = 2**20
# What memory may grow by after the first tenth of the calls: pages that the allocators of C, Python
# and torch come to use late, seen up to 0.4 MiB. A leak of 210 bytes a call shows among 10,000.
FLAT = 2 * MIB
# What a call may take besides its tensors: pages of code, stacks of threads, free pages that the
# allocators keep. Seen up to 2 MB, by when the threads that read give their buffers back.
PAGES = 8 * MIB
# Forks for each line of its input a child that runs the line's code as a program, and says how the
# child ended. That skips the end of Python, which takes longer than most programs.
FORKING = """
import json, os, sys, torch, traceback
for line in sys.stdin:
    code, arguments, path, cwd, variables, out, err = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    for name, number in (out, 1), (err, 2):
        os.dup2(os.open(name, os.O_WRONLY), number)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    sys.argv[1:], sys.path[:1] = arguments, [cwd, *path]
    status = 0
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code or 0
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)
"""


def variables_of(path, changes: dict) -> dict:
    """The environment with ``path`` before everything else, and no CANN."""
    inherited = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    path = os.pathsep.join(map(str, path))
    return inherited | {"PYTHONPATH": path, "LD_LIBRARY_PATH": ""} | changes


def python(*arguments, path=(), cwd=REPOSITORY, **variables) -> subprocess.CompletedProcess:
    """Runs Python."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=variables_of(path, variables),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )


def install(site, name, version, init, entry_points=""):
    """A package as pip would leave it in ``site``."""
    (site / name).mkdir(parents=True)
    (site / name / "__init__.py").write_text(init)
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)
    return site


@contextlib.contextmanager
def forking():
    """A function that runs code in a process that has imported torch, and nothing else."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    # torch reads both once: threads that wait must not occupy the cores of others, and an installed
    # torch_npu may lack its CANN
    once = {"OMP_WAIT_POLICY": "PASSIVE", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    variables = variables_of((), once)
    server = subprocess.Popen([sys.executable, "-c", FORKING], env=variables, **pipes)

    def run(code: str, *arguments: str, path=(), cwd=REPOSITORY, **variables):
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, name) for name in ("stdout", "stderr")]
            for file in files:
                file.touch()
            changed = variables_of(path, variables)
            order = [code, arguments, [*map(str, path)], str(cwd), changed, *map(str, files)]
            print(json.dumps(order), file=server.stdin, flush=True)
            status = int(server.stdout.readline())
            said = (file.read_text() for file in files)
            return subprocess.CompletedProcess(code, status, *said)

    with server:
        yield run


def compiled(folder: Path, source: str, headers: Path, *flags: str) -> ctypes.CDLL:
    """The library of a C++ source that includes ``headers``."""
    library = folder / f"compiled{len(flags)}.so"
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    command = [*compiler, "-std=c++17", "-O2", "-shared", "-fPIC", f"-I{headers}", *flags]
    command += ["-x", "c++", "-", "-o", str(library)]
    subprocess.run(command, input=source, text=True, check=True)
    return ctypes.CDLL(str(library))


@functools.cache
def forkserver():
    """Forks a process that has imported the models and done nothing else, in place of 3 CPU seconds
    for a new one. Its environment is that of the first call."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tiny", "custom_pypto.models"])
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # before Python 3.14 its own
        multiprocessing.forkserver.ensure_running()
    return context


def in_a_process(function, *args):
    """The result of ``function`` in a process of its own, whose memory is nobody else's."""
    with ProcessPoolExecutor(1, mp_context=forkserver()) as processes:
        return processes.submit(function, *args).result()


def in_ranks(work, folder: Path, *args, ranks: int = 2):
    """Calls ``work(rank, folder, *args)`` in so many processes of a group, on a thread each."""
    forkserver()
    of_each = (work, ranks, folder, *args)
    torch.multiprocessing.start_processes(
        in_group, of_each, nprocs=ranks, start_method="forkserver"
    )


def in_group(rank: int, work, ranks: int, folder: Path, *args):
    torch.set_num_threads(1)
    dist.init_process_group(
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    work(rank, folder, *args)
    # The group's destructor waits for its thread, with the GIL, for which the thread may wait to
    # free the state of its last work (seen with torch 2.13 and DistributedDataParallel).
    time.sleep(0.1)
    dist.destroy_process_group()


def status(line: str) -> int:
    """Bytes of the process as Linux counts them: VmRSS now, VmHWM at the peak."""
    lines = Path("/proc/self/status").read_text()
    return int(re.search(rf"^{line}:\s*(\d+) kB", lines, re.MULTILINE)[1]) * 1024


def growth(call, calls: int) -> int:
    """Bytes that the process grows by, after a tenth of the calls."""
    for _ in range(calls // 10):
        call()
    before = status("VmRSS")
    for _ in range(calls - calls // 10):
        call()
    return status("VmRSS") - before


def peak_of(call) -> int:
    """Bytes that a call takes at its peak."""
    ctypes.CDLL(None).malloc_trim(0)  # memory that is free, but there, would be taken unseen
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS")
    call()
    return status("VmHWM") - before


def at_the_end_of_memory(x: Tensor | None) -> Tensor | None:
    """A copy, and behind it memory that ends the process when it is read."""
    if x is None:
        return None
    size = x.untyped_storage().nbytes()
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    last = ctypes.c_void_p(begin + pages)
    assert ctypes.CDLL(None).mprotect(last, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    values = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=pages - size)
    values.copy_(torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()))
    return values.view(x.dtype).as_strided(x.size(), x.stride())
