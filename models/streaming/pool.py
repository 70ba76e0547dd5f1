"""Memory for some of the experts of a model, which threads fill from files."""

import heapq
import itertools
import math
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from ..memory import empty
from ..weights.modules import EXPERT_WEIGHTS
from .files import BLOCK, StreamedFile
from .places import Form, Piece
from .slots import Expert, Slot, Slots, State

DEMAND, GUESS = 0, 1  # the smaller one is read first
READERS = (1, 2, 4, 8)
PROBED = 2**28  # bytes that are read for each number of threads


@dataclass
class Counts:
    """What a pool has done since its model was loaded."""

    hits: int = 0  # experts that were in memory when a layer asked for them
    late: int = 0  # that were being read then, or about to be
    misses: int = 0
    wasted: int = 0  # guesses that made room before a layer asked for them
    nbytes: int = 0  # that were read
    reading: float = 0.0  # seconds in which a thread read
    waiting: float = 0.0  # seconds in which a layer had nothing to multiply

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))

    @property
    def asked(self) -> int:
        return self.hits + self.late + self.misses

    def __str__(self) -> str:
        return (
            f"of {self.asked} experts {self.hits / max(self.asked, 1):.0%} in memory, {self.late} "
            f"on their way, {self.misses} not; read {self.nbytes / 1e9:.2f} GB at "
            f"{self.nbytes / max(self.reading, 1e-9) / 1e9:.2f} GB/s, waited {self.waiting:.1f} s, "
            f"{self.wasted} guesses in vain"
        )


class Memory:
    """The arrays of all slots, and their bytes by slot."""

    def __init__(self, form: Form, count: int):
        self.arrays: list[Tensor] = []
        self.bytes: list[np.ndarray] = []
        for shape, dtype in form.arrays:
            size = math.prod(shape) * dtype.itemsize
            whole = empty([count * size + BLOCK], torch.uint8)
            used = whole[-whole.data_ptr() % BLOCK :][: count * size]
            self.arrays.append(used.view(dtype).view(count, *shape))
            self.bytes.append(used.view(count, size).numpy())

    def weights(self) -> list[tuple[Tensor, Tensor | None]]:
        """Values and scales of both weights, as :func:`layer_ops.experts` takes them."""
        values, scales = self.arrays[: len(EXPERT_WEIGHTS)], self.arrays[len(EXPERT_WEIGHTS) :]
        return list(itertools.zip_longest(values, scales))


class Pool:
    """Slots for experts of one form. Its threads hold it, and no model.

    Args:
        places: the pieces of each expert.
        count: of slots.
    """

    def __init__(self, form: Form, places: dict[Expert, list[Piece]], count: int):
        self.form, self.places = form, places
        self.slots, self.memory = Slots(count), Memory(form, count)
        paths = {piece.file for some in places.values() for piece in some}
        self.files = {path: StreamedFile(path) for path in paths}
        self.checked: set[Expert] = set()
        self.changed = threading.Condition()
        self.queue: list[tuple[int, int, Slot]] = []
        self.order = itertools.count()
        self.threads, self.readers, self.process = 0, 0, os.getpid()
        self._counts, self._active, self._since = Counts(), 0, 0.0

    def check_process(self) -> None:
        """
        Raises:
            RuntimeError: in a fork, which has none of the threads, and maybe a lock that one held.
        """
        if os.getpid() != self.process:
            raise RuntimeError(
                "patched model: experts are read by threads of the process that loaded the model, "
                "got a call in a fork of it; load the model in this process"
            )

    def counts(self) -> Counts:
        return replace(self._counts, wasted=self.slots.wasted)

    def __str__(self) -> str:
        direct = sum(file.alignment is not None for file in self.files.values())
        return (
            f"{self.slots.count} of {len(self.places)} experts, {self.form.nbytes() / 1e6:.1f} MB "
            f"each in {self.form.kind}, fit in memory; threads that read the others: "
            f"{self.readers}; {direct} of {len(self.files)} files directly, the rest through the "
            "page cache"
        )

    # ---- of layers, which hold the lock ----------------------------------------------------------

    def pin(self, expert: Expert, call: object) -> Slot | None:
        """The slot of an expert that a call needs, queued if it must be read; None: none is to be
        had now."""
        known = expert in self.slots.taken
        if (slot := self.slots.pin(expert, call)) is None:
            return None
        ready = slot.state == State.READY
        self._counts.hits += ready
        self._counts.late += known and not ready
        self._counts.misses += not known
        if slot.state == State.QUEUED:  # once more, if it was a guess
            self._put(DEMAND, slot)
        return slot

    def guess(self, experts: Iterable[Expert]) -> None:
        for expert in experts:
            if (slot := self.slots.guess(expert)) is not None:
                self._put(GUESS, slot)

    def wait(self) -> None:
        begin = time.perf_counter()
        self.changed.wait()
        self._counts.waiting += time.perf_counter() - begin

    def _put(self, priority: int, slot: Slot) -> None:
        heapq.heappush(self.queue, (priority, next(self.order), slot))
        self.changed.notify_all()

    # ---- of threads ------------------------------------------------------------------------------

    def read_with(self, readers: int) -> None:
        """Has so many threads read from now on; 0: none, and no layer may ask any more."""
        with self.changed:
            self.readers = readers
            self.changed.notify_all()
            while self.threads < readers:
                args = (self.threads,)
                threading.Thread(target=self._work, args=args, name="experts", daemon=True).start()
                self.threads += 1

    def _work(self, number: int) -> None:
        while True:
            with self.changed:
                while not self.queue and number < self.readers:
                    self.changed.wait()
                if number >= self.readers:
                    self.threads -= 1
                    return
                slot = heapq.heappop(self.queue)[-1]
                if slot.state != State.QUEUED:  # queued twice, or a guess that made room
                    continue
                slot.state = State.READING
                self._count_active(1)
            try:
                self._read(slot.expert, slot.index)
            except Exception as error:  # for the calls that need it
                slot.error = error
            with self.changed:
                self._count_active(-1)
                if slot.error is None:
                    slot.state = State.READY
                    self._counts.nbytes += self.form.nbytes()
                else:
                    self.slots.lose(slot)
                self.changed.notify_all()

    def _read(self, expert: Expert, slot: int) -> None:
        """Fills a slot.

        Raises:
            ValueError: a file that has changed, or has NaN; names it, and the expert.
            OSError: the operating system's, with the same names.
        """
        what = f"expert {expert.number} of layer {expert.layer}"
        for piece in self.places[expert]:
            dtype = self.form.arrays[piece.array][1]
            first = piece.start * dtype.itemsize
            # of values the dtypes differ in name alone: I8 and uint8
            converted = piece.array >= len(EXPERT_WEIGHTS) and piece.dtype != dtype
            if converted:
                out = np.empty(piece.size, np.uint8)
            else:
                out = self.memory.bytes[piece.array][slot, first : first + piece.size]
            try:
                unchanged = self.files[piece.file].read(piece.offset, out)
            except OSError as error:
                why = f"{error.strerror}: {piece.tensor}, for {what} of the patched model"
                raise OSError(error.errno, why, str(piece.file)) from error
            if not unchanged:
                raise ValueError(
                    f"patched model: {piece.file}, with {what}, was written or cut since the model "
                    "was loaded; load it again"
                )
            if expert not in self.checked and not piece.is_finite(out):
                raise ValueError(
                    f"patched model: {piece.file}: {piece.tensor}, of {what}, must be finite, got "
                    "an infinity or NaN; download it again"
                )
            if converted:
                values = torch.from_numpy(out).view(piece.dtype)
                target = self.memory.arrays[piece.array][slot].view(-1)
                target[piece.start : piece.start + len(values)].copy_(values)
        self.checked.add(expert)

    def _count_active(self, more: int) -> None:
        now = time.perf_counter()
        if self._active:
            self._counts.reading += now - self._since
        self._active, self._since = self._active + more, now

    def fill(self, experts: Iterable[Expert]) -> None:
        """Has these experts in memory, fewer than there are slots, while no call needs any; they
        make room first.

        Raises:
            ValueError, OSError: of a read that failed.
        """
        with self.changed:
            slots = [self.pin(expert, self) for expert in experts]
            while not all(slot.is_done() for slot in slots):
                self.changed.wait()
            for slot in slots:
                self.slots.unpin(slot, self, last=False)
        if error := next((slot.error for slot in slots if slot.error), None):
            raise error

    def choose_readers(self) -> None:
        """Takes the number of threads that read experts of this model fastest, into slots that are
        free anyway."""
        experts, rates = iter(self.places), []
        count = max(1, min(PROBED // self.form.nbytes(), self.slots.count // len(READERS)))
        for readers in READERS:
            some = list(itertools.islice(experts, count))
            if len(some) < readers:
                break
            self.read_with(readers)
            begin = time.perf_counter()
            self.fill(some)
            rates.append(len(some) / (time.perf_counter() - begin))
        # more threads take more of the CPU: only for a gain that is no noise
        good = [n for n, rate in zip(READERS, rates, strict=False) if rate >= 0.9 * max(rates)]
        self.read_with(good[0] if good else READERS[0])
        self._counts = Counts()
