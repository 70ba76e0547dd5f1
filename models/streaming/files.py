"""Reads bytes of a file into memory, past the page cache where the file system allows it.

A page cache that everything streams through would evict what others need, and a read through it
takes about ten times the CPU time.
"""

import errno
import os
import weakref
from pathlib import Path

import numpy as np

#: offsets and lengths of direct reads are multiples of it; devices ask for 512 or 4096
BLOCK = 4096
#: multiples that memory may have to be of, the least first: of NVMe devices 4, of others a block
ALIGNMENTS = (8, 512, BLOCK)
BOUNCE = 2**20  # bytes that stay in a CPU's cache until they are copied
DIRECT = getattr(os, "O_DIRECT", None)  # macOS has none


def aligned(size: int) -> np.ndarray:
    """Bytes that begin at a multiple of :data:`BLOCK`."""
    memory = np.empty(size + BLOCK, np.uint8)
    start = -memory.ctypes.data % BLOCK
    return memory[start : start + size]


class StreamedFile:
    """A file from which experts are read for as long as their model lives.

    Attributes:
        alignment: of memory for direct reads; None: reads go through the page cache.
    """

    def __init__(self, path: Path):
        self.path, self.descriptor = path, os.open(path, os.O_RDONLY)
        self.close = weakref.finalize(self, os.close, self.descriptor)
        self.written = self.last_write()
        self.alignment = None
        if DIRECT is not None and self.written[0] >= BLOCK:
            self.read_directly()

    def read_directly(self) -> None:
        """Reads directly from now on, if the file system takes any alignment."""
        try:
            direct = os.open(self.path, os.O_RDONLY | DIRECT)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOTSUP):  # tmpfs, some network file systems
                return
            raise
        memory = aligned(2 * BLOCK)
        for alignment in ALIGNMENTS:
            try:
                os.preadv(direct, [memory[alignment % BLOCK :][:BLOCK]], 0)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                    os.close(direct)
                    raise
                continue
            self.close()
            self.descriptor, self.alignment = direct, alignment
            self.close = weakref.finalize(self, os.close, direct)
            return
        os.close(direct)

    def last_write(self) -> tuple[int, int]:
        """Size and time, which a renamed or deleted file keeps."""
        status = os.fstat(self.descriptor)
        return status.st_size, status.st_mtime_ns

    def read(self, offset: int, out: np.ndarray) -> bool:
        """Fills ``out`` with the bytes from ``offset`` on.

        Returns:
            Whether the file is the one that was opened; else ``out`` is of no use.
        """
        if self.alignment is None:
            whole = self._fill(offset, out)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self.descriptor, offset, len(out), os.POSIX_FADV_DONTNEED)
            return whole and self.last_write() == self.written
        head = min(-offset % BLOCK, len(out))
        tail = head + (len(out) - head) // BLOCK * BLOCK
        if (out.ctypes.data + head) % self.alignment:
            head = tail = 0  # no address in ``out`` is one for this device
        whole = self._fill(offset + head, out[head:tail])
        whole = whole and self._copy(offset, out[:head])
        whole = whole and self._copy(offset + tail, out[tail:])
        return whole and self.last_write() == self.written

    def _fill(self, offset: int, out: np.ndarray) -> bool:
        while len(out):
            count = os.preadv(self.descriptor, [out], offset)
            if count == 0:
                return False
            offset, out = offset + count, out[count:]
        return True

    def _copy(self, offset: int, out: np.ndarray) -> bool:
        """The same through memory of its own, for what a direct read cannot write into ``out``."""
        bounce = aligned(min(BOUNCE, -(-len(out) // BLOCK) * BLOCK + BLOCK))
        while len(out):
            skip = offset % BLOCK
            wanted = min(len(bounce), -(-(skip + len(out)) // BLOCK) * BLOCK)
            # a file may end within a block
            count = min(
                os.preadv(self.descriptor, [bounce[:wanted]], offset - skip) - skip, len(out)
            )
            if count <= 0:
                return False
            out[:count] = bounce[skip : skip + count]
            offset, out = offset + count, out[count:]
        return True
