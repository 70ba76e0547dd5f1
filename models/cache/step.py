"""The new tokens of one forward pass: where they are in the sequences and in the cache."""

from typing import NamedTuple, Protocol

from torch import Tensor, nn

from ..pieces import Pieces
from .sequence import Sequences, Tokens
from .store import PagedLayer


class Rows(Protocol):
    """What the layers of a forward write to and attend to: a cache, or in training the rows that
    live as long as a call."""

    def layer_of(self, attention: nn.Module) -> PagedLayer:
        """The rows of a call of this layer."""

    def finish(self, step: "Step", states: Tensor) -> None:
        """After every layer has run.

        Args:
            states: of the tokens, ``[B, S, ..]``: those that an MTP layer takes, or the last hidden
                states.
        """


class Step(NamedTuple):
    """Cache state of one forward pass, passed in place of the attention mask."""

    rows: Rows
    sequences: Sequences
    own: Tokens  # that this rank computes
    whole: Tokens  # of all ranks, the same unless they share a prompt
    slots: Tensor | None  # of all tokens, in pools with a row per token; see store.slots
    pieces: Pieces | None = None  # of a prompt that ranks share
    layer: PagedLayer | None = None  # inside a compiled layer: its rows

    def layer_of(self, attention: nn.Module) -> PagedLayer:
        """The rows of a call of this layer."""
        return self.rows.layer_of(attention) if self.layer is None else self.layer

    def slices(self, size: int) -> list[Tokens]:
        """The tokens that this rank computes, at most ``size`` at once."""
        if self.pieces is None:
            return self.own.slices(size)
        found, column = [], 0
        # of each column of the prompt the tokens of its sequence before it
        before = self.whole.start[:, None] + nn.functional.pad(self.whole.valid.cumsum(1), (1, 0))
        before = before.to(self.whole.start.dtype)
        for first, last in self.pieces.bounds():
            for begin in range(first, last, size):
                end = min(begin + size, last)
                bounds = before[:, begin], before[:, end]
                found.append(self.own.cut(column, column + end - begin, *bounds))
                column += end - begin
        return found

    def part(self, x: Tensor, dim: int = 1) -> Tensor:
        """Of values of all tokens those of the tokens that this rank computes."""
        return x if self.pieces is None else self.pieces.own(x, dim)

    def gathered(self, x: Tensor) -> Tensor:
        """Values ``[B, S, ..]`` of all tokens, from those of this rank's."""
        return x if self.pieces is None else self.pieces.gathered(x)
