"""Which experts are in memory, and which one makes room: the least recently used."""

import itertools
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple
from weakref import WeakSet


class Expert(NamedTuple):
    layer: int
    number: int


class State(Enum):
    QUEUED = auto()
    READING = auto()
    READY = auto()
    LOST = auto()  # not in its slot any more


@dataclass(eq=False)
class Slot:
    """An expert that has or will have a place in memory.

    Args:
        calls: that need it. Weak: what Ctrl-C keeps from ending its need, in whichever line, ends
            with its call.
        error: why it could not be read.
    """

    expert: Expert
    index: int
    state: State = State.QUEUED
    calls: WeakSet = field(default_factory=WeakSet)
    error: Exception | None = None

    def is_done(self) -> bool:
        """Whether it was read, or could not be."""
        return self.state in (State.READY, State.LOST)


class Slots:
    """Experts in memory, from the one that makes room first to the one that does last.

    Attributes:
        taken: all there is to know; which slots are free follows from it.
        guesses: slots of experts that no call has asked for.
        wasted: how many of these made room.
    """

    def __init__(self, count: int):
        self.count, self.wasted = count, 0
        self.taken: OrderedDict[Expert, Slot] = OrderedDict()
        self.guesses: set[Slot] = set()

    def pin(self, expert: Expert, call: object) -> Slot | None:
        """The slot of an expert that a call needs; None: all are needed, or being read."""
        slot = self.taken.get(expert) or self._take(expert, len(self.taken))
        if slot is not None:
            slot.calls.add(call)
            self.guesses.discard(slot)
            self.taken.move_to_end(expert)
        return slot

    def guess(self, expert: Expert) -> Slot | None:
        """A slot for an expert that a call may need soon; None: it has one, or would push out what
        was used lately, or too many others."""
        half = self.count // 2
        if expert in self.taken or len(self.guesses) >= half:
            return None
        if (slot := self._take(expert, half)) is not None:
            self.guesses.add(slot)
        return slot

    def unpin(self, slot: Slot, call: object, last: bool) -> None:
        """Ends the need of a call.

        Args:
            last: makes room after all others that no call needs; else before them.
        """
        slot.calls.discard(call)
        if slot.state != State.LOST:
            self.taken.move_to_end(slot.expert, last)

    def lose(self, slot: Slot) -> None:
        slot.state = State.LOST
        del self.taken[slot.expert]
        self.guesses.discard(slot)

    def _take(self, expert: Expert, among: int) -> Slot | None:
        """A free slot, or that of the first of the ``among`` coldest that no call needs."""
        if len(self.taken) < self.count:
            used = {slot.index for slot in self.taken.values()}
            index = next(i for i in range(self.count) if i not in used)
        else:
            cold = itertools.islice(self.taken.values(), among)
            unneeded = (slot for slot in cold if not slot.calls and slot.state != State.READING)
            if (victim := next(unneeded, None)) is None:
                return None
            self.wasted += victim in self.guesses
            self.lose(victim)
            index = victim.index
        slot = self.taken[expert] = Slot(expert, index)
        return slot
