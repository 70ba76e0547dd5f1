"""The tokens of the sequences in a cache: how many count, and how many can be forgotten."""

from typing import NamedTuple

import torch
from torch import Tensor, nn


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


class Sequences:
    """Lengths of the sequences, as tensors that every step updates in place.

    Args:
        spare: last tokens that a sequence can forget, since rings keep the window of the token
            before them; None: all tokens.
    """

    def __init__(self, batch_size: int, spare: int | None, device: torch.device):
        self.spare = spare
        #: ``[B]`` int32 tokens of each sequence, without padding
        self.lengths = torch.zeros(batch_size, dtype=torch.int32, device=device)
        #: the length that generate() reads: tokens fed per sequence, including padding
        self.seen = torch.zeros((), dtype=torch.int64, device=device)
        #: the largest ``seen`` since the cache was empty, interrupted forwards included
        self.written = torch.zeros((), dtype=torch.int64, device=device)
        #: ``[B, k]`` bool, True for padding among the first k cached tokens; later ones are real.
        #: No graph reads it.
        self.padding = torch.zeros(batch_size, 0, dtype=torch.bool, device=device)
        #: whether they have changed places since the cache was empty, as in beam search
        self.exchanged = False
        #: ``[B, ..]`` the state of each last token that an MTP layer takes; None: there is no such
        #: layer. Zeros: not known, after :meth:`crop`.
        self.hidden: Tensor | None = None
        for tensor in (self.lengths, self.seen, self.written):
            torch._dynamo.mark_static_address(tensor)

    def announce(self, tokens: int) -> None:
        """Notes that a forward is about to write ``tokens`` more per sequence."""
        if self.spare is not None:
            after = self.seen + tokens
            self.written.copy_(torch.where(self.seen > 0, self.written.maximum(after), after))

    def padding_of(self, tokens: int) -> Tensor:
        """``[B, tokens]`` bool, True for padding among the first cached tokens."""
        return nn.functional.pad(self.padding, (0, tokens - self.padding.size(1)))

    def remember(self, first: int, padding: Tensor) -> None:
        """Notes which new tokens, behind the ``first`` cached ones, are padding."""
        self.padding = torch.cat([self.padding_of(first), padding], 1)

    def commit(self, lengths: Tensor, tokens: int) -> None:
        """Counts the tokens of a completed forward."""
        self._count(lengths, self.seen + tokens)

    def _count(self, *values: Tensor) -> None:
        """Sets lengths, seen and, if given, written by one call. Ctrl-C strikes between calls,
        and a cache that counts a token in one of them alone attends to a row it has forgotten."""
        counts = [self.lengths, self.seen, self.written][: len(values)]
        if torch.compiler.is_compiling():  # a graph is one call
            for count, value in zip(counts, values, strict=True):
                count.copy_(value)
        else:
            torch._foreach_copy_(counts, list(values))

    def check_room(self, tokens: int, max_cache_len: int) -> None:
        """Rejects ``tokens`` more per sequence that do not fit, or lack their window.

        Raises:
            ValueError: with the remedy.
        """
        if (seen := int(self.seen)) + tokens > max_cache_len:
            raise ValueError(
                f"PagedCache: capacity exceeded: holds {seen} of {max_cache_len} tokens "
                f"per sequence, got {tokens} more; create it with a larger max_cache_len"
            )
        if self._lost(self.seen):
            raise ValueError(
                f"PagedCache: an interrupted forward of {self.written - self.seen} tokens has "
                f"overwritten the window of token {self.seen} (at most {self.spare} leave it "
                "whole); reset() the cache and feed the sequence again"
            )

    def crop(self, tokens_to_remove: int, restored: bool = False) -> None:
        """Forgets the last ``-tokens_to_remove`` tokens.

        Args:
            restored: whether the rows and states before them are whole.
        Raises:
            ValueError: a positive number, or tokens whose window is overwritten.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"PagedCache.crop: tokens_to_remove must be negative or 0, got {tokens_to_remove}"
            )
        left = (self.seen + tokens_to_remove).clamp(min=0)
        if not restored and self._lost(left):
            fewest = (self.written - self.spare - self.seen).clamp(max=0)
            raise ValueError(
                f"PagedCache.crop: tokens_to_remove must be at least {fewest} (the rest of the "
                f"window is overwritten) or at most {-self.seen} (all tokens), got "
                f"{tokens_to_remove}; reset() the cache and feed the sequence again"
            )
        columns = torch.arange(self.padding.size(1), device=left.device)
        not_counted = self.padding & (columns >= left) & (columns < self.seen)
        lengths = (self.lengths + tokens_to_remove + not_counted.sum(1)).clamp(min=0)
        self._count(lengths, left, left if restored else self.written * (left > 0))
        # after that: what is known of tokens that do not count changes nothing
        self.padding = self.padding & (columns < left)
        if self.hidden is not None and tokens_to_remove:
            self.hidden.zero_()

    def take_back(self, tokens: list[int], seen: int) -> None:
        """Forgets the last ``tokens`` of each sequence, none of which is padding, where no ring
        keeps a window.

        Args:
            seen: of the sequence that then has most.
        """
        lengths = self.lengths - self.lengths.new_tensor(tokens)
        self._count(lengths, self.seen.new_tensor(seen))

    def reset(self) -> None:
        self._count(*map(torch.zeros_like, (self.lengths, self.seen, self.written)))
        self.padding = self.padding[:, :0]
        self.exchanged = False

    def reorder(self, sources: Tensor) -> None:
        """Replaces each sequence ``b`` by a copy of sequence ``sources[b]``."""
        self.lengths.copy_(self.lengths[sources])
        self.padding = self.padding[sources]
        if self.hidden is not None:
            self.hidden.copy_(self.hidden[sources])
        self.exchanged = True

    def select(self, indices: Tensor) -> None:
        """Keeps only these sequences, in this order, in a new tensor."""
        self.lengths = self.lengths[indices]
        self.padding = self.padding[indices]
        if self.hidden is not None:
            self.hidden = self.hidden[indices]
        self.exchanged = True

    def _lost(self, tokens: Tensor) -> bool:
        """Whether rings lack rows that the token after the first ``tokens`` needs."""
        # in Python: each of torch's calls takes long behind a step, which has filled the caches
        return self.spare is not None and 0 < int(tokens) < int(self.written) - self.spare
