"""Compressed cache rows of DeepSeek-V4 (technical report, section 2.3).

Row ``w`` covers the ``r`` tokens of window ``w``, with overlap also those of the window before:
``rope_{r w}(RMSNorm(sum_i softmax_i(Z_i + bias_i) * C_i))``, the softmax per channel over all
tokens ``i`` that the row covers, with ``C = kv_proj(x)`` and ``Z = gate_proj(x)``. With overlap
both are twice as wide: the first half counts in the next window's row, the second in the window's
own.

The state between forwards is a ring of the last tokens' ``[C | Z]``. Windows count from the first
real token of each sequence; upstream counts left padding too, which changes every row.

Shapes: B batch, S new tokens, n windows, r tokens per window, D width of a row.
"""

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

from ..cache import PagedCache, Step, write
from ..pools import PagedLayer
from ..projection import brought_in

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


def tokens_of_state(rate: int, overlaps: bool) -> int:
    """Last tokens that the row of an incomplete window may still need."""
    return (2 if overlaps else 1) * rate - 1


def compress(
    module: nn.Module, layer: PagedLayer, rows: str, state: str, part: Part, x: Tensor
) -> None:
    """Writes the rows that the tokens of ``part`` complete, and keeps its last tokens.

    Args:
        module: upstream's compressor or indexer.
        rows: name of the pool of the compressed rows.
        state: name of the pool with the ring of ``[C | Z]``.
        x: ``[B, S, hidden]`` input of the layer.
    """
    cache, space, ring = part.cache, layer.spaces[rows], layer.spaces[state]
    pool = getattr(layer, state)
    new = torch.cat([module.kv_proj(x), module.gate_proj(x)], -1)
    cached = pool[cache.tables[ring][:, 0]].squeeze(2)
    compressed, windows, complete = completed(module, cached, new, part)
    slots = cache.slots(space, space.ring + windows, complete)
    write(getattr(layer, rows), slots, compressed)
    last = slice(max(0, new.size(1) - ring.ring), None)
    positions, valid = part.positions[:, last], part.valid[:, last]
    write(pool, cache.slots(ring, positions % ring.ring, valid), new[:, last])


def completed(
    module: nn.Module, cached: Tensor, new: Tensor, part: Part
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows ``[B, n, 1, D]`` of all windows with tokens of ``part``, the windows ``[B, n]``, and
    whether all their tokens have come.

    Args:
        cached: ``[B, ring, width]`` the state.
        new: ``[B, S, width]`` the same of the new tokens.
    """
    rate, dim = module.compress_rate, module.head_dim
    overlap = new.size(-1) // dim // 2 - 1  # windows before its own that a row covers
    count = -(-new.size(1) // rate)
    windows = (part.start // rate)[:, None] + torch.arange(count, device=new.device)
    tokens = (windows[:, :1] - overlap) * rate
    tokens = tokens + torch.arange((overlap + count) * rate, device=new.device)

    start, ring = part.start[:, None], cached.size(1)
    pads = new.size(1) - (part.lengths[:, None] - start)
    source = torch.where(tokens < start, tokens % ring, ring + pads + tokens - start)
    # tokens yet to come are in windows that are not complete
    source = source.clamp(max=ring + new.size(1) - 1)[..., None]
    found = torch.cat([cached, new.to(cached.dtype)], 1)
    found = found.gather(1, source.expand(-1, -1, found.size(-1))).float()
    # the window before the first one is empty; the state may hold anything there
    exists = (tokens >= 0)[..., None]
    kv, gate = torch.where(exists, found, 0).unflatten(1, (-1, rate)).chunk(2, -1)
    with brought_in(module):
        gate = gate + module.position_bias.float()
    gate = torch.where(exists.unflatten(1, (-1, rate)), gate, -torch.inf)
    if overlap:
        kv, gate = (
            torch.cat([both[:, :-1, :, :dim], both[:, 1:, :, dim:]], 2) for both in (kv, gate)
        )
    rows = module.kv_norm((kv * gate.softmax(2)).sum(2).to(new.dtype)).unsqueeze(2)
    cos, sin = module.rotary_emb(rows, windows * rate, layer_type=module.rope_layer_type)
    rows = apply_rotary_pos_emb(rows, cos, sin, unsqueeze_dim=2)
    return rows, windows, (windows + 1) * rate <= part.lengths[:, None]
