"""The new tokens of one forward pass: where they are in the sequences and in the cache."""

from typing import NamedTuple

from torch import Tensor

from .sequence import Sequences
from .store import PagedLayer, Store


class TokenSlice(NamedTuple):
    """Consecutive new tokens of a step; shapes as in :class:`Step`."""

    store: Store
    start: Tensor
    lengths: Tensor
    valid: Tensor
    positions: Tensor
    position_ids: Tensor
    columns: slice  # among the new tokens of the step

    #: whether every rank, if there are several, has these tokens
    on_every_rank = True


class Step(NamedTuple):
    """Cache state of one forward pass, passed in place of the attention mask."""

    store: Store
    sequences: Sequences
    start: Tensor  # [B] int32 cached tokens of each sequence, before this step
    lengths: Tensor  # [B] int32 tokens of each sequence, the new ones included
    valid: Tensor  # [B, tokens] bool, False for padding
    positions: Tensor  # [B, tokens] int64 within the sequence, counted from its first real token
    position_ids: Tensor  # [B, tokens] int64 of the caller, or upstream's default
    slots: Tensor | None  # of new tokens, in pools with a row per token; see Store.slots
    pieces: tuple | None = None  # of a prompt that ranks share: context_parallel.Pieces
    layer: PagedLayer | None = None  # inside a compiled layer: its rows

    # no properties: torch 2.10 cannot compile those of a NamedTuple

    def commit(self) -> None:
        """Counts the new tokens as cached, after every layer has written them."""
        self.sequences.commit(self.lengths, self.count())

    def count(self) -> int:
        """New tokens of a sequence."""
        return self.positions.size(1)

    def of_call(self, attention) -> tuple["Step", PagedLayer]:
        """The step of a call of this layer, itself, as the rows of a cache last; and its rows."""
        if self.layer is not None:
            return self, self.layer
        return self, self.store.layers[attention.layer_idx]

    def own(self, x: Tensor, dim: int = 1) -> Tensor:
        """Of values of all new tokens those of the tokens that this rank computes."""
        return x

    def whole(self, x: Tensor) -> Tensor:
        """Values ``[B, tokens, ..]`` of all new tokens, from those of this rank's."""
        return x

    def slices(self, size: int) -> list[TokenSlice]:
        """The new tokens, at most ``size`` at once."""
        tokens = self.positions.size(1)
        if tokens <= size:
            whole = slice(0, tokens)
            of_step = self.start, self.lengths, self.valid, self.positions, self.position_ids
            return [TokenSlice(self.store, *of_step, whole)]
        found, first, start = [], 0, self.start
        while first < tokens:  # range() would give torch.compile one graph per length
            end = first + size if first + size < tokens else tokens
            columns = slice(first, end)
            valid = self.valid[:, columns]
            lengths = start + valid.sum(1).to(start.dtype)
            both = self.positions[:, columns], self.position_ids[:, columns]
            found.append(TokenSlice(self.store, start, lengths, valid, *both, columns))
            first, start = end, lengths
        return found
