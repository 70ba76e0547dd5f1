"""The paged cache the ops read: pools of blocks per layer, one block table for all layers."""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from .pools import (
    EVERY_TOKEN,
    PagedLayer,
    RecurrentLayer,
    Row,
    Space,
    check_block_size,
    check_cache_dtypes,
    declared_rows,
    dimensions,
    empty_pool,
    hadamard,
    out_of_memory,
    own_blocks,
    patched_layers,
    text_model,
)
from .projection import device_of


def write(pool: Tensor, slots: Tensor, rows: Tensor) -> None:
    """``pool[slot] = row``, for the slots of a :class:`Step`."""
    width, rows = pool.size(-1), rows.to(pool.dtype)  # autocast computes in another dtype
    if pool.device.type == "npu":
        # in place in every graph mode; torchair may copy a pool to view it, and cannot convert
        # index_copy_
        torch.ops.npu.npu_scatter_nd_update_(pool, slots, rows.reshape(-1, 1, width))
    else:
        pool.view(-1, width).index_copy_(0, slots, rows.reshape(-1, width))


class Step(NamedTuple):
    """Cache state of one forward pass, passed in place of the attention mask."""

    cache: "PagedCache"
    start: Tensor  # [B] int32 cached tokens of each sequence, before this step
    lengths: Tensor  # [B] int32 tokens of each sequence, the new ones included
    valid: Tensor  # [B, tokens] bool, False for padding
    positions: Tensor  # [B, tokens] int64 within the sequence, counted from its first real token
    slots: Tensor | None  # of each new token where every token has a row; see PagedCache.slots

    # no properties: torch 2.10 cannot compile those of a NamedTuple

    def commit(self) -> None:
        """Counts the new tokens as cached, after every layer has written them."""
        self.cache.lengths.copy_(self.lengths)
        self.cache.seen.add_(self.positions.size(1))


class PagedCache(Cache):
    """The cache of a model patched by :func:`models.use_custom_pypto`; ``model.generate()`` creates
    one by default. Create it yourself to keep it between calls or for a custom decode loop::

        cache = models.PagedCache(model, batch_size=1, max_cache_len=4096)
        model(prompt_ids, past_key_values=cache)
        model.generate(all_ids, past_key_values=cache, max_new_tokens=100)

    Padding is not stored: sequence ``b`` has ``lengths[b]`` tokens from position 0 on, regardless
    of left padding, and position ``p`` is row ``p % block_size`` of block ``block_table[b, p //
    block_size]``. Block 0 belongs to no sequence; padding is written there. Some architectures keep
    fewer rows than tokens (:class:`models.pools.Space`), with a block table for each kind of pool
    in ``tables``.
    Left padding needs nothing else: the ops align queries and keys at the last token, so padding,
    left of every real token, sees no key.

    Everything that changes from step to step is tensor data updated in place, never a shape or a
    Python number, so that one compiled graph serves every position.

    New tokens count only when their forward completes: after an exception or Ctrl-C the cache is
    unchanged and usable, unless its rings lost more tokens than they can spare: the next forward
    then raises. An interrupted ``generate()`` has cached tokens that its caller never got:
    ``crop`` the cache to the known ones. An interrupted beam search may leave sequences half
    exchanged: :meth:`reset` the cache.

    A cache keeps its size and its addresses, which compiled graphs need. Only a cache that a
    forward created by default grows (:meth:`reserve`); every step then reads its length, which
    stalls an accelerator and breaks a graph.

    Args:
        model: the model, for its dimensions, dtype (under autocast too) and device.
        batch_size: number of sequences, times the beams or returned sequences of each.
        max_cache_len: capacity of a sequence in tokens, including padding; rounded up to whole
            blocks.
        block_size: tokens per block, a multiple of 16 up to 1024.
        index_dtype: ``torch.int8`` for index keys of a byte per value, or the dtype of the model;
            None: as :func:`models.use_custom_pypto` was told.
        kv_dtype: the same of latents. Caches in int8 hold 1.1, 1.5 or, both, 1.8 times as many
            tokens; the positions that a token selects differ where scores nearly tie.

    Raises:
        torch.OutOfMemoryError: no memory for this many tokens; the message says how many fit. A CPU
            overcommits memory up to a limit: see :attr:`nbytes`.
        ValueError: layers on several devices. Also raised by a forward that exceeds the capacity or
            lacks tokens of its window, before anything is written: this check reads the length,
            which would stall an accelerator, so it runs on CPU only and not inside
            ``torch.compile``; ``generate()`` checks its ``max_length`` everywhere. Unchecked tokens
            that do not fit are written to block 0.
    """

    # Cache derives these properties from its layers; here they hold for the whole cache
    is_compileable = True
    is_croppable = True
    is_initialized = True
    batch_size = property(lambda self: self.lengths.size(0))
    grows = False

    @torch.inference_mode(False)  # inference tensors cannot be written outside of it
    def __init__(
        self,
        model,
        batch_size: int,
        max_cache_len: int,
        *,
        block_size: int = 128,
        index_dtype: torch.dtype | None = None,
        kv_dtype: torch.dtype | None = None,
    ):
        check_block_size("PagedCache", block_size)
        attention = next(iter(patched_layers(model).values())).self_attn
        options = text_model(model).custom_pypto_cache
        index_dtype = index_dtype or options["index_dtype"]
        kv_dtype = kv_dtype or options["kv_dtype"]
        check_cache_dtypes("PagedCache", model, attention, index_dtype, kv_dtype)
        for name, value in (("batch_size", batch_size), ("max_cache_len", max_cache_len)):
            if value < 1:
                raise ValueError(f"PagedCache: {name} must be at least 1, got {value}")
        self.block_size = block_size
        self.max_cache_len = -(-max_cache_len // block_size) * block_size
        self.made_for = dimensions(model)
        device = device_of(patched_layers(model))
        declared = declared_rows(model, index_dtype, kv_dtype)
        rows = [row for layer in declared for row in layer.values() if row is not None]
        try:
            super().__init__(layers=[self._layer(layer, batch_size, device) for layer in declared])
        except RuntimeError as error:  # of any allocator; on an accelerator OutOfMemoryError
            raise out_of_memory(rows, batch_size, max_cache_len, block_size, device) from error
        spaces = dict.fromkeys(row.space.in_blocks(block_size) for row in rows)
        # block ids of each sequence, for every kind of pool; block 0 belongs to no sequence
        self.tables = {
            space: own_blocks(batch_size, space.blocks(self.max_cache_len), device)
            for space in spaces
        }
        # rotates index keys before they are quantised, in this cache all of them or none
        self.hadamard = None
        if index_dtype == torch.int8:
            size = text_model(model).config.index_head_dim
            self.hadamard = hadamard(size, model.dtype, device)
        # last tokens that rings and recurrent states can forget; None: all of them
        self.spare = min((space.spare for space in spaces if space.ring), default=None)
        if self._recurrent():
            self.spare = 0
        self.lengths = torch.zeros(batch_size, dtype=torch.int32, device=device)
        # the length that generate() reads: tokens fed per sequence, including padding
        self.seen = torch.zeros((), dtype=torch.int64, device=device)
        # the most that `seen` has been since the cache was empty, interrupted forwards included
        self.written = torch.zeros((), dtype=torch.int64, device=device)
        for tensor in (*self._tensors(), self.lengths, self.seen, self.written):
            torch._dynamo.mark_static_address(tensor)

    @property
    def block_table(self) -> Tensor:
        """``[B, blocks]`` int32 block ids of the pools with a row for every token."""
        return self.tables[EVERY_TOKEN.in_blocks(self.block_size)]

    @block_table.setter
    def block_table(self, table: Tensor) -> None:
        self.tables[EVERY_TOKEN.in_blocks(self.block_size)] = table
        self.max_cache_len = table.size(1) * self.block_size

    def place(self, batch_size: int, tokens: int, valid: Tensor | None) -> Step:
        """The positions of new tokens, and the resulting sequence lengths.

        The tokens count after :meth:`Step.commit`. Without it, a forward has only written rows that
        are never read, or that rings have to spare.

        Args:
            valid: ``[batch_size, tokens]`` bool, False for padding; None: no padding.
        """
        if batch_size != self.batch_size:
            raise ValueError(
                f"PagedCache: the batch must be {self.batch_size} (batch_size), got {batch_size}"
            )
        self.check_room(tokens)
        if self._recurrent() and not torch.compiler.is_compiling() and self.seen == 0:
            self._reset_recurrent()  # an interrupted forward may have left something
        if self.spare is not None:
            after = self.seen + tokens
            self.written.copy_(torch.where(self.seen > 0, self.written.maximum(after), after))
        if valid is None:
            valid = torch.ones(batch_size, tokens, dtype=torch.bool, device=self.lengths.device)
        positions = self.lengths[:, None] + valid.cumsum(1) - 1
        start = self.lengths.clone()
        lengths = start + valid.sum(1).to(start.dtype)
        every = EVERY_TOKEN.in_blocks(self.block_size)
        slots = self.slots(every, positions, valid) if every in self.tables else None
        return Step(self, start, lengths, valid, positions, slots)

    def slots(self, space: Space, rows: Tensor, valid: Tensor) -> Tensor:
        """Where ``rows [B, n]`` of each sequence are in the flattened pools; on an NPU, block and
        row. Rows that are not ``valid`` or do not fit are in block 0."""
        table = self.tables[space]
        column = rows // space.block
        last = table.size(1) - 1
        block = table.gather(1, column.clamp(0, last)).long()
        fits = valid & (column <= last)
        block = torch.where(fits, block, 0).flatten()
        row = torch.where(fits, rows % space.block, 0).flatten()
        npu = block.device.type == "npu"
        return torch.stack([block, row], -1) if npu else block * space.block + row

    def check_room(self, tokens: int) -> None:
        """Validates the room for ``tokens`` more per sequence, where that needs no device sync."""
        if torch.compiler.is_compiling() or self.seen.device.type != "cpu":
            return
        if self.seen + tokens > self.max_cache_len:
            raise ValueError(
                f"PagedCache: capacity exceeded: holds {self.seen} of {self.max_cache_len} tokens "
                f"per sequence, got {tokens} more; create it with a larger max_cache_len"
            )
        if self._lost(self.seen):
            raise ValueError(
                f"PagedCache: an interrupted forward of {self.written - self.seen} tokens has "
                f"overwritten the window of token {self.seen} (at most {self.spare} leave it "
                "whole); reset() the cache and feed the sequence again"
            )

    def _lost(self, tokens: Tensor) -> bool:
        """Whether rings lack rows that the token after the first ``tokens`` needs."""
        return self.spare is not None and bool((tokens > 0) & (tokens + self.spare < self.written))

    @torch.inference_mode(False)
    def reserve(self, max_cache_len: int) -> None:
        """Grows to at least ``max_cache_len`` tokens per sequence; cached tokens stay.

        Growth at least doubles the capacity, so that copying takes constant time per token. It
        creates new pools and new block tables, which compiled graphs do not see.

        Raises:
            torch.OutOfMemoryError: no memory; the cache stays usable.
        """
        if max_cache_len <= self.max_cache_len:
            return
        blocks = max(
            -(-max_cache_len // self.block_size), 2 * self.max_cache_len // self.block_size
        )
        tokens = blocks * self.block_size
        more = {space: space.blocks(tokens) - table.size(1) for space, table in self.tables.items()}
        used = {space: 1 + table.numel() for space, table in self.tables.items()}
        for layer in self.layers:  # one at a time saves memory; the tables stay valid
            for name, space in layer.spaces.items():
                pool, kept = getattr(layer, name), used[space]
                shape = kept + self.batch_size * more[space], *pool.shape[1:]
                if shape == pool.shape:
                    continue  # of constant size, or grown before memory ran out
                try:
                    larger = empty_pool(shape, pool.dtype, pool.device)
                except RuntimeError as error:
                    raise torch.OutOfMemoryError(
                        "PagedCache: out of memory: cannot grow from max_cache_len="
                        f"{self.max_cache_len} to {tokens} on {pool.device}; pass a "
                        "models.PagedCache of the required size to the first forward"
                    ) from error
                larger[:kept] = pool[:kept]
                torch._dynamo.mark_static_address(larger)
                setattr(layer, name, larger)
        for space, table in self.tables.items():
            new = own_blocks(self.batch_size, more[space], table.device) + (used[space] - 1)
            self.tables[space] = torch.cat([table, new], 1)
            torch._dynamo.mark_static_address(self.tables[space])
        self.max_cache_len = tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last ``-tokens_to_remove`` tokens; negative, as in transformers.

        Raises:
            ValueError: more than :attr:`spare` tokens, but not all: their window is overwritten.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"PagedCache.crop: tokens_to_remove must be negative or 0, got {tokens_to_remove}"
            )
        left = (self.seen + tokens_to_remove).clamp(min=0)
        if self._lost(left):
            fewest = (self.written - self.spare - self.seen).clamp(max=0)
            raise ValueError(
                f"PagedCache.crop: tokens_to_remove must be at least {fewest} (the rest of the "
                f"window is overwritten) or at most {-self.seen} (all tokens), got "
                f"{tokens_to_remove}; reset() the cache and feed the sequence again"
            )
        self.lengths.add_(tokens_to_remove).clamp_(min=0)
        self.seen.copy_(left)
        self.written.mul_(left > 0)
        if self._recurrent() and left == 0:
            self._reset_recurrent()

    def reset(self) -> None:
        for length in (self.lengths, self.seen, self.written):
            length.zero_()
        self._reset_recurrent()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replaces each sequence ``b`` by a copy of sequence ``beam_idx[b]``, for beam search.

        Blocks are copied because two beams may continue one sequence with different tokens.
        """
        for layer in self.layers:
            for name, pool in layer.pools().items():
                table = self.tables[layer.spaces[name]]
                pool[table] = pool[table[beam_idx]]
        for layer in self._recurrent():
            layer.reorder_cache(beam_idx)
        self.lengths.copy_(self.lengths[beam_idx])

    @torch.inference_mode(False)
    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps only these sequences, in this order, in new tensors; repeats are allowed."""
        self.lengths = self.lengths[indices]
        for space, table in self.tables.items():
            source = table[indices]
            self.tables[space] = own_blocks(*source.shape, source.device)
            kept = torch.cat([source.new_zeros(1), source.flatten()])
            for layer in self.layers:
                for name, pool in layer.pools().items():
                    if layer.spaces[name] == space:
                        setattr(layer, name, pool[kept])
        for layer in self._recurrent():
            layer.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        sequences = torch.arange(self.batch_size, device=self.lengths.device)
        self.batch_select_indices(sequences.repeat_interleave(repeats))

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        # a copy, since generate() keeps it across forwards
        return self.seen.clone()

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.max_cache_len

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.max_cache_len, 0

    @property
    def nbytes(self) -> int:
        """Bytes of the pools and recurrent states, all layers."""
        states = [state for layer in self._recurrent() for state in layer.states()]
        return sum(tensor.nbytes for tensor in [*self._pools(), *states])

    def update(self, *args, **kwargs):
        raise TypeError(
            "PagedCache: model must be patched by models.use_custom_pypto, "
            "got a call from an upstream attention layer"
        )

    def __repr__(self) -> str:
        return (
            f"PagedCache(batch_size={self.batch_size}, max_cache_len={self.max_cache_len}, "
            f"block_size={self.block_size}, layers={len(self.layers)}, nbytes={self.nbytes})"
        )

    def _pools(self) -> list[Tensor]:
        return [pool for layer in self.layers for pool in layer.pools().values()]

    def _recurrent(self) -> list[RecurrentLayer]:
        return [layer for layer in self.layers if isinstance(layer, RecurrentLayer)]

    def _reset_recurrent(self) -> None:
        for layer in self._recurrent():
            layer.reset()

    def _tensors(self) -> list[Tensor]:
        return [*self._pools(), *self.tables.values()]

    def _layer(
        self, rows: dict[str, Row | None], batch_size: int, device
    ) -> PagedLayer | RecurrentLayer:
        if not rows:
            return RecurrentLayer()
        pools, spaces = dict.fromkeys(rows), {}
        for name, row in rows.items():
            if row is not None:
                spaces[name] = space = row.space.in_blocks(self.block_size)
                shape = (1 + batch_size * space.blocks(self.max_cache_len), space.block, 1)
                pools[name] = empty_pool((*shape, row.width), row.dtype, device)
        return PagedLayer(pools, spaces)
