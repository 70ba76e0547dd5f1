"""The new tokens of one forward pass: where they are in the sequences and in the cache."""

from typing import NamedTuple, Protocol

from torch import Tensor, nn

from ..pieces import Pieces
from .sequence import Sequences
from .store import PagedLayer


class Tokens(NamedTuple):
    """Consecutive new tokens of each sequence, or those that a rank takes of a prompt."""

    start: Tensor  # [B] int32 tokens of each sequence before these; before the prompt
    lengths: Tensor  # [B] int32 tokens of each sequence, these included; of the prompt all
    valid: Tensor  # [B, S] bool, False for padding
    positions: Tensor  # [B, S] int64 within the sequence, counted from its first real token
    position_ids: Tensor  # [B, S] int64 of the caller, or upstream's default
    columns: slice  # among the tokens that this rank computes
    #: whether every rank, if there are several, has these tokens
    on_every_rank: bool = True

    # no properties: torch 2.10 cannot compile those of a NamedTuple

    def count(self) -> int:
        """Tokens of a sequence."""
        return self.positions.size(1)

    def cut(self, first: int, end: int, start: Tensor, lengths: Tensor) -> "Tokens":
        """Columns ``first`` to ``end``, which begin and end at these lengths."""
        columns = slice(first, end)
        own = (x[:, columns] for x in (self.valid, self.positions, self.position_ids))
        return Tokens(start, lengths, *own, columns, self.on_every_rank)

    def slices(self, size: int) -> "list[Tokens]":
        """These consecutive tokens, at most ``size`` at once."""
        if self.count() <= size:
            return [self]
        found, first, start = [], 0, self.start
        while first < self.count():  # range() would give torch.compile one graph per length
            end = first + size if first + size < self.count() else self.count()
            lengths = start + self.valid[:, first:end].sum(1).to(start.dtype)
            found.append(self.cut(first, end, start, lengths))
            first, start = end, lengths
        return found


class Rows(Protocol):
    """What the layers of a forward write to and attend to: a cache, or in training the rows that
    live as long as a call."""

    def layer_of(self, attention: nn.Module) -> PagedLayer:
        """The rows of a call of this layer."""

    def finish(self, step: "Step", last_hidden_state: Tensor) -> None:
        """After every layer has run."""


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
