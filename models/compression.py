"""Compressed rows (:mod:`custom_pypto.rows.compressed`), computed when their group's last token
arrives.

The state between forwards is a ring of the last tokens' ``[C | Z]``. Groups count from the first
real token of each sequence, so that left padding changes nothing.

Shapes: B batch, S new tokens, n groups, r tokens per group, D width of a row.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from custom_pypto import layer_ops
from custom_pypto.rows.compressed import pooled
from custom_pypto.rows.parts import write

from .cache import Tokens
from .cache.layout import RowLayout
from .cache.store import PagedLayer, slots
from .one_op import takes_layer_op

# tokens that a sequence can forget, a ring's spare rows: more than speculative decoding drafts
SPARE = 16


def state_layout(rate: int, overlaps: bool = False) -> RowLayout:
    """The ring of the tokens that an incomplete group may still need."""
    ring = (2 if overlaps else 1) * rate - 1 + SPARE
    return RowLayout(ring, 0, block=ring, spare=SPARE)


def compress(
    layer: PagedLayer,
    rows: str,
    state: str,
    tokens: Tokens,
    new: Tensor,
    bias: Tensor,
    finish: Callable[[Tensor, Tensor], Tensor],
    training: bool,
) -> tuple[Tensor, Tensor]:
    """Writes the last tokens into the state, and returns the slots and the rows ``[B * n, D]`` that
    the new tokens complete.

    Args:
        rows: name of the rows' pool.
        state: name of the pool with the ring of ``[C | Z]``.
        new: ``[B, S, width]`` ``[C | Z]`` of the tokens.
        bias: ``[r, width / 2]``.
        finish: rows ``[B, n, ., D]`` from float32 sums ``[B, n, D]`` and groups ``[B, n]``.
        training: without the op: a checkpointed layer runs once without gradients.
    """
    layout, ring = layer.layouts[rows], layer.layouts[state]
    pool, width = layer.pools[state], layer.pools[rows].size(-1)
    table = layer.tables[ring]
    sums, groups, complete = completed(pool, table[:, 0], new, bias, width, tokens, training)
    own = slots(layer.tables[layout], layout, layout.ring + groups, complete)
    last = slice(max(0, new.size(1) - ring.ring), None)
    positions, valid = tokens.positions[:, last], tokens.valid[:, last]
    write(pool, slots(table, ring, positions % ring.ring, valid), new[:, last])
    return own, finish(sums, groups).flatten(0, -2)


def completed(
    pool: Tensor,
    blocks: Tensor,
    new: Tensor,
    bias: Tensor,
    width: int,
    tokens: Tokens,
    training: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The float32 sums ``[B, n, width]`` of all groups of the new tokens, the groups
    ``[B, n]``, and whether all their tokens have come; sums of other groups are any finite numbers.

    Args:
        pool: ``[., ring, 1, .]`` the state.
        blocks: ``[B]`` int32, of the pool.
        new: ``[B, S, .]`` ``[C | Z]`` of the new tokens.
    """
    call = pool, blocks, new, bias.float(), tokens.start, tokens.lengths, width
    by_op = not training and new.dtype == pool.dtype and takes_layer_op("pool_groups", *call)
    sums, complete = (layer_ops.pool_groups if by_op else pooled_groups)(*call)
    return sums, groups_of(tokens.start, new, bias.size(0)), complete


def groups_of(start: Tensor, new: Tensor, rate: int) -> Tensor:
    """The groups ``[B, n]`` of new tokens."""
    # int64 as positions: a comparison in a GE graph does not promote
    count = -(-new.size(1) // rate)
    return start[:, None].long() // rate + torch.arange(count, device=new.device)


def pooled_groups(
    pool: Tensor,
    blocks: Tensor,
    new: Tensor,
    bias: Tensor,
    start: Tensor,
    lengths: Tensor,
    width: int,
) -> tuple[Tensor, Tensor]:
    """:func:`layer_ops.pool_groups`, with gradients."""
    rate, overlap = bias.size(0), bias.size(1) // width - 1
    groups = groups_of(start, new, rate)
    count, start, lengths = groups.size(1), start[:, None].long(), lengths[:, None].long()
    cached = pool[blocks].squeeze(2)
    number = (groups[:, :1] - overlap) * rate
    number = number + torch.arange((overlap + count) * rate, device=new.device)

    ring, pads = cached.size(1), new.size(1) - (lengths - start)
    source = torch.where(number < start, number % ring, ring + pads + number - start)
    # only incomplete groups have tokens yet to come
    source = source.clamp(max=ring + new.size(1) - 1)[..., None]
    found = torch.cat([cached, new.to(cached.dtype)], 1)
    found = found.gather(1, source.expand(-1, -1, found.size(-1))).float()
    values, gates = found.unflatten(1, (-1, rate)).chunk(2, -1)
    # the group before the first one is empty
    exists = (number >= 0).unflatten(1, (-1, rate))
    complete = (groups + 1) * rate <= lengths
    return pooled(values, gates + bias, exists, width), complete
