"""What drafts were accepted, and whether they pay."""

from dataclasses import dataclass, field
from itertools import zip_longest

#: forwards without drafts before those with drafts, the first of which is not timed
PLAIN = 3
#: forwards with drafts after which their gain is known
ENOUGH = 8
#: tokens without drafts after a loss; twice as many after the next one
PAUSE = 64
#: of a new time in the mean of the times so far
WEIGHT = 0.1


@dataclass
class Counts:
    """What a ``generate()`` drafted, by the place of a draft in its step: how many drafts the model
    checked, of all sequences that had not ended, and how many of them were the text."""

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    #: forwards of the model after the prompt, and those of them without drafts
    forwards: int = 0
    plain: int = 0

    def add(self, drafted: int, sequences: int) -> None:
        """Notes a forward.

        Args:
            drafted: tokens for each sequence; sequences: that have not ended.
        """
        self.forwards += 1
        self.plain += drafted == 0
        for counts in self.drafted, self.accepted:
            counts.extend([0] * (drafted - len(counts)))
        for place in range(drafted):
            self.drafted[place] += sequences

    def accept(self, place: int) -> None:
        """Notes that the draft at this place of its step was right."""
        self.accepted[place] += 1

    def __add__(self, other: "Counts") -> "Counts":
        """Of both calls."""

        def total(name: str) -> list[int]:
            both = getattr(self, name), getattr(other, name)
            return [sum(counts) for counts in zip_longest(*both, fillvalue=0)]

        forwards, plain = self.forwards + other.forwards, self.plain + other.plain
        return Counts(total("drafted"), total("accepted"), forwards, plain)

    @property
    def share(self) -> float:
        """Of all drafts those that were accepted; NaN without drafts."""
        return sum(self.accepted) / total if (total := sum(self.drafted)) else float("nan")


class Gain:
    """Turns drafts off while a token takes longer with them: of a forward without drafts and of one
    with them, and its drafts, the mean times, by the tokens that they give.

    Args:
        drafts: tokens of a draft.
    """

    def __init__(self, drafts: int):
        self.drafts = drafts
        self.plain: float | None = None  # seconds of a token, and of a forward with drafts
        self.drafted: float | None = None
        self.tokens = 0.0  # of a forward with drafts
        self.left, self.pause, self.losses = PLAIN, PAUSE, 0
        self.tried = 0

    def next(self) -> int:
        """Drafts for the next forward."""
        return 0 if self.left else self.drafts

    def add(self, drafted: int, tokens: int, seconds: float) -> bool:
        """Notes a forward, and its drafts; whether it shows a loss.

        Args:
            drafted: tokens that were drafted for it.
            tokens: that it gave.
            seconds: that it took with its drafts.
        """
        if drafted == 0:
            # the first one of all takes longer
            if self.left and (self.plain is not None or self.left < PLAIN):
                self.plain = mean(self.plain, seconds)
            self.left = max(0, self.left - 1)
            return False
        if self.tried:  # the first one takes longer
            self.drafted = mean(self.drafted, seconds)
            self.tokens = mean(self.tokens or None, tokens)
        self.tried += 1
        if self.tried <= ENOUGH or (ratio := self.ratio()) >= 1:
            return False
        self.last = ratio
        self.left, self.tried, self.losses = self.pause, 0, self.losses + 1
        self.pause *= 2
        self.drafted, self.tokens = None, 0.0
        return True

    def __str__(self) -> str:
        return (
            f"drafts are turned off for {self.pause // 2} tokens, and tried again then: with them "
            f"{self.last:.2f} times as many tokens per second"
        )

    def ratio(self) -> float:
        """Tokens per second with drafts over those without."""
        return self.tokens * self.plain / self.drafted


def mean(so_far: float | None, new: float) -> float:
    return new if so_far is None else (1 - WEIGHT) * so_far + WEIGHT * new
