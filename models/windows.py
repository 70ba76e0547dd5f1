"""Cache rows of consecutive windows of ``r`` tokens, written when their last token arrives.

Row ``w`` is ``sum_i softmax_i(Z_i + bias_i) * C_i``, the softmax per channel, over the tokens ``i``
of window ``w``, with overlap also those of the window before. With overlap C, Z and the bias are
twice as wide: the first half counts in the next window's row, the second in the window's own.

The state between forwards is a ring of the last tokens' ``[C | Z]``. Windows count from the first
real token of each sequence, so that left padding changes nothing.

Shapes: B batch, S new tokens, n windows, r tokens per window, D width of a row.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .cache import PagedCache, Step, write
from .pools import PagedLayer, Space

# tokens that a sequence can forget although its state is a ring: more than speculative decoding
# drafts
SPARE = 16


class Part:
    """Consecutive new tokens of a step: its columns ``first`` to ``end``."""

    def __init__(self, step: Step, first: int, end: int):
        self.cache: PagedCache = step.cache
        self.columns = slice(first, end)
        #: ``[B, S]``, False for padding
        self.valid = step.valid[:, first:end]
        #: ``[B, S]`` positions of the tokens in their sequences
        self.positions = step.positions[:, first:end]
        #: ``[B]`` tokens of each sequence before the part
        self.start = step.start + step.valid[:, :first].sum(1)
        #: ``[B]`` tokens of each sequence, those of the part included
        self.lengths = self.start + self.valid.sum(1)


def parts(step: Step, size: int) -> list[Part]:
    """The new tokens of a step, at most ``size`` at once."""
    found, first, tokens = [], 0, step.positions.size(1)
    while first < tokens:  # range() would give torch.compile one graph per length
        end = first + size if first + size < tokens else tokens
        found.append(Part(step, first, end))
        first = end
    return found


def state_space(rate: int, overlaps: bool = False) -> Space:
    """The ring of the tokens that an incomplete window may still need."""
    ring = (2 if overlaps else 1) * rate - 1 + SPARE
    return Space(ring, 0, block=ring, spare=SPARE)


def compress(
    layer: PagedLayer,
    rows: str,
    state: str,
    part: Part,
    new: Tensor,
    bias: Tensor,
    finish: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Writes the rows that the tokens of ``part`` complete, and keeps its last tokens.

    Args:
        rows: name of the pool of the rows.
        state: name of the pool with the ring of ``[C | Z]``.
        new: ``[B, S, width]`` ``[C | Z]`` of the tokens.
        bias: ``[r, width / 2]``.
        finish: makes rows ``[B, n, 1, D]`` of the float32 sums ``[B, n, D]`` and the windows ``[B,
            n]``.
    """
    cache, space, ring = part.cache, layer.spaces[rows], layer.spaces[state]
    pool = getattr(layer, state)
    cached = pool[cache.tables[ring][:, 0]].squeeze(2)
    width = getattr(layer, rows).size(-1)
    sums, windows, complete = completed(cached, new, bias, width, part)
    slots = cache.slots(space, space.ring + windows, complete)
    write(getattr(layer, rows), slots, finish(sums, windows))
    last = slice(max(0, new.size(1) - ring.ring), None)
    positions, valid = part.positions[:, last], part.valid[:, last]
    write(pool, cache.slots(ring, positions % ring.ring, valid), new[:, last])


def completed(
    cached: Tensor, new: Tensor, bias: Tensor, width: int, part: Part
) -> tuple[Tensor, Tensor, Tensor]:
    """The float32 sums ``[B, n, width]`` of all windows with tokens of ``part``, the windows ``[B,
    n]``, and whether all their tokens have come.

    Args:
        cached: ``[B, ring, .]`` the state.
        new: ``[B, S, .]`` the same of the new tokens.
    """
    rate, overlap = bias.size(0), bias.size(1) // width - 1
    count = -(-new.size(1) // rate)
    # int64 as positions: a comparison in a GE graph does not promote
    start, lengths = part.start[:, None].long(), part.lengths[:, None].long()
    windows = start // rate + torch.arange(count, device=new.device)
    tokens = (windows[:, :1] - overlap) * rate
    tokens = tokens + torch.arange((overlap + count) * rate, device=new.device)

    ring, pads = cached.size(1), new.size(1) - (lengths - start)
    source = torch.where(tokens < start, tokens % ring, ring + pads + tokens - start)
    # tokens yet to come are in windows that are not complete
    source = source.clamp(max=ring + new.size(1) - 1)[..., None]
    found = torch.cat([cached, new.to(cached.dtype)], 1)
    found = found.gather(1, source.expand(-1, -1, found.size(-1))).float()
    # the window before the first one is empty; the state may hold anything there
    exists = (tokens >= 0)[..., None]
    kv, gate = torch.where(exists, found, 0).unflatten(1, (-1, rate)).chunk(2, -1)
    gate = torch.where(exists.unflatten(1, (-1, rate)), gate + bias.float(), -torch.inf)
    if overlap:
        kv, gate = (
            torch.cat([both[:, :-1, :, :width], both[:, 1:, :, width:]], 2) for both in (kv, gate)
        )
    complete = (windows + 1) * rate <= lengths
    return (kv * gate.softmax(2)).sum(2), windows, complete
