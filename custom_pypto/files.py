"""Files that others read while they are written, and that a process may be killed over."""

import contextlib
import fcntl
import json
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

PARTIAL = ".custom_pypto-partial-"  # in the name of a file that is being written
#: safetensors' names of dtypes
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@contextlib.contextmanager
def replacing(path: Path, tidy: bool = True) -> Iterator[Path]:
    """An empty file to write, which gets the name ``path`` when the block ends without an error.

    A reader sees the file that was there or the new one, never a part, and of several writers in
    threads, processes and hosts the last one wins: each has a name of its own beside ``path``. What
    a killed writer left, the next one of the same ``path`` removes. The block opens the file by its
    name and closes it: before that, NFS does not show all of it to other hosts.

    Args:
        tidy: whether to look for such remains, which lists the folder; see :func:`remove_remains`.
    Raises:
        OSError: of the system, with ``path`` as its file.
    """
    target = Path(os.path.realpath(path))  # a link stays, and what it names is replaced
    try:
        if tidy:
            remove_remains(target.parent, re.escape(target.name))
        partial, lock = _begun(target)
        try:
            yield partial
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
            os.close(lock)
    except OSError as error:
        if PARTIAL not in str(error.filename or PARTIAL):
            raise  # of a file that the block reads
        raise OSError(error.errno, error.strerror, str(path)) from error


def _begun(path: Path) -> tuple[Path, int]:
    """A new file beside ``path`` and the descriptor that locks it. The system releases the lock
    when the process ends, however it ends."""
    while True:
        partial = path.parent / f"{path.name}{PARTIAL}{secrets.token_hex(8)}"
        # not by tempfile, whose files are for this user alone
        lock = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        if partial.exists():
            return partial, lock
        os.close(lock)  # another writer has removed it before it was locked


def remove_remains(folder: Path, names: str = ".*") -> None:
    """Removes the partial files of killed writers: those that no process has locked, on any host.

    Args:
        names: a regular expression of the names that the files were to get.
    """
    name = re.compile(f"{names}{re.escape(PARTIAL)}[0-9a-f]{{16}}")
    with contextlib.suppress(OSError):  # a folder that may be written, but not listed
        for partial in folder.iterdir():
            if name.fullmatch(partial.name):
                with contextlib.suppress(OSError):  # locked, of another user, or gone by now
                    lock = os.open(partial, os.O_RDWR)  # NFS locks what is open for writing
                    try:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        partial.unlink()
                    finally:
                        os.close(lock)


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """A file of safetensors, written as by :func:`replacing` and :func:`write_tensors`."""
    with replacing(path) as partial:
        write_tensors(partial, tensors, metadata)


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes a file of safetensors; equal contents give equal bytes.

    The library's ``save_file`` writes metadata in a random order, into a file of a name of its own
    that a kill leaves behind, and that no other user may read.
    """
    # as the library orders them, so that every element is aligned
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header: dict[str, dict] = {"__metadata__": metadata}
    end = 0
    for name, x in ordered:
        begin, end = end, end + x.nbytes
        facts = {"dtype": NAMES[x.dtype], "shape": [*x.shape], "data_offsets": [begin, end]}
        header[name] = facts
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, x in ordered:
            values = x.detach().cpu().contiguous().view(-1).view(torch.uint8)
            file.write(values.numpy().data)
