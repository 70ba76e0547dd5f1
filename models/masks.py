"""What the masks and positions of a forward mean: one reading for inference, with a cache in any
state, and for training.

As in upstream transformers, column ``p`` of a mask belongs to token ``p`` of all tokens so far,
padding included, and columns behind these tokens to tokens to come. What a cache has stored it
attends to: a mask can hide tokens when they are new, and not afterwards.

Shapes: B batch, S new tokens, P cached tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.masking_utils import find_packed_sequence_indices

from .cache.sequence import Sequences
from .memory import has_numbers, is_readable
from .patched import CACHE, checkpoints

UPSTREAM = "call models.use_transformers(model) for the upstream path"


class Request(NamedTuple):
    """The arguments of a forward, read once."""

    batch: int
    tokens: int  # S
    mask: Tensor | dict | None
    #: by which RoPE rotates, by axes where it does
    rotating: Tensor | None
    #: by which transformers tells sequences packed into a row, ``[B, S]``
    positions: Tensor | None
    cache: Cache | None
    #: whether upstream transformers would create a cache, without one of the caller
    keeps_cache: bool
    use_cache: bool | None
    output_attentions: bool


def read(model, attention, kwargs: dict) -> Request:
    """What the arguments of a forward, by name, ask for."""
    ids, embeddings = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
    batch, tokens = (ids if embeddings is None else embeddings).shape[:2]
    rotating = positions = kwargs.get("position_ids")
    if attention.counting.axes:
        positions = text_axis(positions)
    mask, cache, use_cache = (kwargs.get(x) for x in ("attention_mask", CACHE, "use_cache"))
    keeps = cache is None and not checkpoints(model)
    if keeps:  # reading a config is slow, and each token has a cache
        keeps = model.config.use_cache if use_cache is None else use_cache
    attentions = kwargs.get("output_attentions", getattr(model.config, "output_attentions", False))
    return Request(
        batch, tokens, mask, rotating, positions, cache, keeps, use_cache, bool(attentions)
    )


def new_tokens(mask: Tensor | dict | None, sequences: Sequences, tokens: int) -> Tensor | None:
    """Which of the ``tokens`` new tokens are real, ``[B, S]`` bool; None: all of them.

    The cache remembers it. Inside a graph, and for one new token on an accelerator, which a number
    read back would stall, nothing is checked.

    Args:
        mask: ``[B, P + S]`` or wider; a dict of :func:`for_generate`; or None.
        sequences: of the cache, before the new tokens.
    Raises:
        ValueError: names the shape, or the columns, and the remedy.
    """
    if isinstance(mask, dict) and mask.keys() == {"indexed_attention"}:
        mask = mask["indexed_attention"]
    batch, seen = sequences.lengths.size(0), sequences.seen
    if mask is not None and (got := other_shape(mask, batch)):
        raise ValueError(
            f"patched model: attention_mask must be [B, tokens so far], B = {batch}, got {got}; "
            "call models.use_transformers(model) for masks of other shapes"
        )
    if not has_numbers(seen) or (tokens == 1 and not is_readable(seen)):
        if mask is None:
            return None
        columns = (seen + torch.arange(tokens, device=seen.device)).clamp(max=mask.size(1) - 1)
        return mask.bool().gather(1, columns.expand(batch, -1))
    if mask is None and not sequences.padding.size(1):
        return None  # no cached token is known as padding, an interrupted forward's neither
    first = int(seen)
    cached, end = ~sequences.padding_of(first), first + tokens
    if mask is None:
        if not cached.all():
            raise ValueError(
                f"patched model: attention_mask must be [B, {end}], with zeros for the padding in "
                f"{columns_of(~cached)} of the cache, got None"
            )
        sequences.remember(first, cached[:, :0])  # not that of an interrupted forward
        return None
    if mask.size(1) < end:
        raise ValueError(
            f"patched model: attention_mask must be [B, tokens so far] with the {first} cached and "
            f"the {tokens} new tokens, got {list(mask.shape)}"
        )
    mask = mask.to(cached.device).bool()
    if (other := mask[:, :first] != cached).any():
        raise ValueError(
            "patched model: attention_mask must be what it was for cached tokens (the ops attend "
            f"to all that were not padding), got other values in {columns_of(other)}; feed the "
            f"tokens again to an empty cache, or {UPSTREAM}"
        )
    real = mask[:, first:end]
    if (holes := ~real & (real.cumsum(1) > 0)).any():
        raise ValueError(
            "patched model: attention_mask must have all padding on the left, got a 0 after a 1 in "
            f"{columns_of(nn.functional.pad(holes, (first, 0)))}; set tokenizer.padding_side = "
            "'left', and with prompt tuning feed sequences of one length"
        )
    sequences.remember(first, ~real)
    return real


def check_pauses(real: Tensor | None, sequences: Sequences) -> None:
    """Rejects real tokens behind padding behind real tokens, where some layers count such padding
    in upstream transformers: in sliding windows and in the state of linear attention.

    Args:
        real: of :func:`new_tokens`.
    """
    if real is None or not is_readable(sequences.seen):
        return
    cached = ~sequences.padding_of(int(sequences.seen))
    paused = ~cached & (cached.cumsum(1) > 0) & real.any(1, keepdim=True)
    if paused.any():
        raise ValueError(
            "patched model: a sequence must not go on after padding (layers with a sliding window "
            f"or linear attention count it), got some in {columns_of(paused)} of the cache; take "
            "idle sequences out of the batch by PagedCache.batch_select_indices"
        )


def for_generate(mask: Tensor | None, sequences: Sequences, tokens: int, capacity: int) -> dict:
    """The mask that ``generate()`` passes to a forward, which may be compiled: checked here, and of
    one width for all steps."""
    new_tokens(mask, sequences, tokens)
    if mask is not None:
        mask = nn.functional.pad(mask.bool(), (0, max(0, capacity - mask.size(1))))
    return {"indexed_attention": mask}


def problem_of_training(mask: Tensor | None, batch: int, tokens: int) -> str | None:
    """Why the ops cannot honour this mask of a training forward; None if they can."""
    if mask is None:
        return None
    got = other_shape(mask, batch)
    if got or mask.size(1) != tokens:
        return (
            f"attention_mask must be [B, tokens] = [{batch}, {tokens}] to train on the ops, got "
            f"{got or list(mask.shape)}"
        )
    real = mask.bool()
    ones = real.cumsum(1)
    if (holes := ~real & (ones > 0) & (ones < ones[:, -1:])).any():
        return (
            "attention_mask must have padding at the ends only, got a 0 between ones in "
            f"{columns_of(holes)}"
        )
    return None


def other_shape(mask, batch: int) -> str | None:
    """What came in place of a mask ``[B, n]``; None if it is one."""
    if not isinstance(mask, Tensor):
        return f"a {type(mask).__name__}"
    return None if mask.ndim == 2 and mask.size(0) == batch else str(list(mask.shape))


def problem_of_positions(positions: Tensor | None, counted: Tensor, real: Tensor) -> str | None:
    """Why windows and groups of tokens, which follow the cache's own count, cannot honour these
    ``position_ids``; None if they can.

    Args:
        counted: ``[B, S]`` the positions of tokens, from the first real one of their sequence on.
        real: ``[B, S]`` bool.
    """
    if positions is None or not is_readable(counted):
        return None
    if (other := real & (positions != counted)).any():
        return (
            "position_ids must count the real tokens of each sequence from 0, since windows and "
            f"groups of tokens follow that count, got others in {columns_of(other)}"
        )
    return None


def columns_of(found: Tensor) -> str:
    """The columns with a True in ``found [B, n]``, and the first row with one."""
    columns = found.any(0).nonzero().flatten().tolist()
    row = int(found.any(1).nonzero()[0])
    first, last = columns[0], columns[-1]
    if first == last:
        return f"column {first} (row {row})"
    some = "" if len(columns) == last - first + 1 else f"{len(columns)} of the "
    return f"{some}columns {first} to {last} (row {row})"


def text_axis(positions: Tensor | None) -> Tensor | None:
    """The positions by which transformers tells sequences packed into a row, where RoPE rotates by
    axes: the first of four axes; None: there are none."""
    if positions is None or positions.ndim == 2 or positions.size(0) < 4:
        return None
    return positions[0]


def is_packed(request: Request) -> bool:
    """Whether transformers treats a row of the batch as several sequences: positions restart, and
    there is neither a mask nor a cache. A graph cannot tell positions and assumes so: upstream's
    mask is right for both."""
    positions = request.positions
    if positions is None or request.mask is not None or request.keeps_cache:
        return False
    return find_packed_sequence_indices(positions) is not None
