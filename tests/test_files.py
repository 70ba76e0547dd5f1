"""Files that are written anew: whole for every reader, and nothing of a killed writer stays."""

import errno
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from repository import REPOSITORY
from safetensors import safe_open
from safetensors.torch import load_file

from custom_pypto.files import NAMES, PARTIAL, replacing, save_tensors

SIZE = 1_000_000
# writes files of one letter until its input ends
WRITER = f"""
import sys, threading
from pathlib import Path
from custom_pypto.files import replacing
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set())).start()
path, letter = Path(sys.argv[1]), sys.argv[2].encode()
print("ready", flush=True)
while not ended.is_set():
    with replacing(path) as partial:
        partial.write_bytes({SIZE} * letter)
"""
# is in the middle of a file until it is killed
HALF = """
import sys, time
from pathlib import Path
from custom_pypto.files import replacing
with replacing(Path(sys.argv[1])) as partial:
    partial.write_bytes(b"half")
    print("ready", flush=True)
    time.sleep(600)
"""


def started(code, *arguments):
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


def write(path, data):
    with replacing(path) as partial:
        partial.write_bytes(data)


def names(folder):
    return sorted(file.name for file in folder.iterdir())


def test_a_reader_beside_writers_in_threads_and_processes_sees_whole_files(tmp_path):
    path, ended = tmp_path / "file", threading.Event()
    write(path, SIZE * b"a")

    def writer(letter):
        while not ended.is_set():
            write(path, SIZE * letter)

    processes = [started(WRITER, path, letter) for letter in "bc"]
    threads = [threading.Thread(target=writer, args=[letter]) for letter in (b"d", b"e")]
    for thread in threads:
        thread.start()
    seen = set()
    try:
        for _ in range(1500):
            data = path.read_bytes()
            assert len(data) == SIZE and data.count(data[:1]) == SIZE
            seen.add(data[:1])
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        for process in processes:
            process.communicate()
    assert len(seen) > 1 and [process.returncode for process in processes] == [0, 0]
    assert names(tmp_path) == ["file"]


def test_what_a_killed_writer_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path):
    path, other = tmp_path / "file", tmp_path / f"other{PARTIAL}0123456789abcdef"
    write(path, b"old")
    other.write_bytes(b"of another path")
    killed, living = started(HALF, path), started(HALF, path)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    try:
        assert len(names(tmp_path)) == 4 and path.read_bytes() == b"old"
        write(path, b"new")
        assert path.read_bytes() == b"new"
        [of_the_living] = set(names(tmp_path)) - {path.name, other.name}
        assert (tmp_path / of_the_living).read_bytes() == b"half"
    finally:
        living.kill()
        living.communicate()
    write(path, b"newer")
    assert names(tmp_path) == [path.name, other.name]


@pytest.mark.parametrize("mask, mode", [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664)])
def test_the_mode_is_that_of_a_new_file(mask, mode, tmp_path):
    before = os.umask(mask)
    try:
        save_tensors(tmp_path / "file", {"a": torch.zeros(3)}, {})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


def test_an_error_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    write(path, b"old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as partial:
        partial.write_bytes(b"half")
        raise KeyboardInterrupt
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # as a full disk
    try:
        with pytest.raises(OSError, match=f"'{path}'") as raised:
            save_tensors(path, {"a": torch.zeros(1000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert raised.value.errno == errno.EFBIG
    assert path.read_bytes() == b"old" and names(tmp_path) == ["file"]


def test_errors_name_the_file_and_not_the_partial_one(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match=r"'\.'$"):
        write(Path("."), b"")
    with pytest.raises(IsADirectoryError, match=f"'{tmp_path}/folder'$"):
        write(tmp_path / "folder", b"")
    with pytest.raises(FileNotFoundError, match=f"'{tmp_path}/none/file'$"):
        write(tmp_path / "none/file", b"")
    with pytest.raises(FileNotFoundError, match="'source'$"), replacing(tmp_path / "file"):
        Path("source").read_bytes()  # of another file
    assert names(tmp_path) == ["folder"]


def test_a_file_system_without_locks_works(tmp_path, monkeypatch):
    def none(*args):
        raise OSError(errno.ENOSYS, "Function not implemented")

    (tmp_path / f"file{PARTIAL}0123456789abcdef").touch()
    monkeypatch.setattr("fcntl.flock", none)
    write(tmp_path / "file", b"new")
    # nothing tells whether its writer lives
    assert names(tmp_path) == ["file", f"file{PARTIAL}0123456789abcdef"]


def test_a_file_that_was_removed_before_it_was_locked_is_begun_again(tmp_path, monkeypatch):
    made, open_ = [], os.open

    def opened(path, *args):
        made.append(Path(path))
        handle = open_(path, *args)
        if len(made) == 1:
            made[0].unlink()
        return handle

    monkeypatch.setattr("os.open", opened)
    with replacing(tmp_path / "file") as partial:
        assert made[0] != partial == made[1]
        partial.write_bytes(b"new")
    monkeypatch.undo()
    assert (tmp_path / "file").read_bytes() == b"new"


def tensors():
    values = torch.arange(24).reshape(2, 12) % 5
    found = {str(dtype): values.to(dtype) for dtype in NAMES}
    return found | {"empty": torch.zeros(0, 3), "none": torch.tensor(7), "strided": values.T}


def test_saved_tensors_are_read_by_safetensors(tmp_path):
    save_tensors(tmp_path / "file", tensors(), {"b": "1", "a": "ä"})
    found = load_file(tmp_path / "file")
    assert found.keys() == tensors().keys()
    for name, want in tensors().items():
        want = want.contiguous()
        assert found[name].dtype == want.dtype and found[name].shape == want.shape
        assert torch.equal(found[name].view(-1).view(torch.uint8), want.view(-1).view(torch.uint8))
    with safe_open(tmp_path / "file", "pt") as file:
        assert file.metadata() == {"b": "1", "a": "ä"}
        mapped = [file.get_tensor(name) for name in file.keys()]
    assert all(x.data_ptr() % x.itemsize == 0 for x in mapped)


def test_equal_tensors_are_equal_bytes(tmp_path):
    metadata = {str(i): str(i) for i in range(6)}
    for i in range(20):
        save_tensors(tmp_path / str(i), tensors(), metadata)
    assert len({file.read_bytes() for file in tmp_path.iterdir()}) == 1


def test_a_link_stays_and_what_it_names_is_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    with replacing(link) as partial:
        partial.write_text("new")
    assert link.is_symlink() and target.read_text() == link.read_text() == "new"
    assert [*tmp_path.iterdir()] != [] and [path.name for path in target.parent.iterdir()] == [
        "target"
    ]
