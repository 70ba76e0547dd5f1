"""Fixtures of tests that run Python processes."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from processes import variables_of
from repository import REPOSITORY

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


@pytest.fixture(scope="session")
def with_torch():
    """Runs code in a process that has imported torch, which takes a second, and nothing else."""
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
