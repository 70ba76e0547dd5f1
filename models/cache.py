"""The paged cache the ops read: pools of blocks per layer, one block table for all layers."""

import ctypes
import mmap
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from .loading import free_memory
from .pools import declared_rows, pools_of
from .projection import device_of


class PagedLayer:
    """Pools of one layer: a tensor ``[nblk, bs, 1, width]`` per pool that the architecture
    declares, or None if this layer has no such pool."""

    def __init__(self, pools: dict[str, Tensor | None]):
        vars(self).update(pools)

    def pools(self) -> dict[str, Tensor]:
        """The pools of this layer, by name."""
        return {name: pool for name, pool in vars(self).items() if pool is not None}


def empty_pool(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised pool: rows past a sequence's length are never read, and memory pages without
    a token cost nothing."""
    pool = torch.empty(shape, dtype=dtype, device=device)
    if pool.device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE"):
        # sparse attention reads rows in random order: fewer pages mean fewer misses in the TLB
        huge = 2**21
        start = -(-pool.data_ptr() // huge) * huge
        size = (pool.data_ptr() + pool.nbytes - start) // huge * huge
        if size > 0:  # advice: nothing depends on its result
            libc = ctypes.CDLL(None)
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)
    return pool


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
    slots: Tensor  # row of each new token in the flattened pools; on an NPU, block and row
    lengths: Tensor  # [B] int32 keys of each sequence, the new tokens included
    tokens: int  # new tokens per sequence, including padding

    def commit(self) -> None:
        """Counts the new tokens as cached, after every layer has written them."""
        self.cache.lengths.copy_(self.lengths)
        self.cache.seen.add_(self.tokens)


class PagedCache(Cache):
    """The cache of a model patched by :func:`models.use_custom_pypto`; ``model.generate()`` creates
    one by default. Create it yourself to keep it between calls or for a custom decode loop::

        cache = models.PagedCache(model, batch_size=1, max_cache_len=4096)
        model(prompt_ids, past_key_values=cache)
        model.generate(all_ids, past_key_values=cache, max_new_tokens=100)

    Padding is not stored: sequence ``b`` has ``lengths[b]`` tokens from position 0 on, regardless
    of left padding, and position ``p`` is row ``p % block_size`` of block ``block_table[b, p //
    block_size]``. Block 0 belongs to no sequence; padding is written there.
    Left padding needs nothing else: the ops align queries and keys at the last token, so padding,
    left of every real token, sees no key.

    Everything that changes from step to step is tensor data updated in place, never a shape or a
    Python number, so that one compiled graph serves every position.

    New tokens count only when their forward completes: after an exception or Ctrl-C the cache is
    unchanged and usable. An interrupted ``generate()`` has cached tokens that its caller never got:
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

    Raises:
        torch.OutOfMemoryError: no memory for this many tokens; the message says how many fit. A CPU
            overcommits memory up to a limit: see :attr:`nbytes`.
        ValueError: layers on several devices. Also raised by a forward that exceeds the capacity,
            before anything is written: this check reads the length, which would stall an
            accelerator, so it runs on CPU only and not inside ``torch.compile``; ``generate()``
            checks its ``max_length`` everywhere. Unchecked tokens that do not fit are written to
            block 0.
    """

    # Cache derives these properties from its layers; here they hold for the whole cache
    is_compileable = True
    is_croppable = True
    is_initialized = True
    batch_size = property(lambda self: self.lengths.size(0))
    max_cache_len = property(lambda self: self.block_table.size(1) * self.block_size)
    grows = False

    @torch.inference_mode(False)  # inference tensors cannot be written outside of it
    def __init__(self, model, batch_size: int, max_cache_len: int, *, block_size: int = 128):
        check_block_size("PagedCache", block_size)
        for name, value in (("batch_size", batch_size), ("max_cache_len", max_cache_len)):
            if value < 1:
                raise ValueError(f"PagedCache: {name} must be at least 1, got {value}")
        self.block_size = block_size
        self.made_for = dimensions(model)
        device = device_of(model.base_model.layers)
        blocks = -(-max_cache_len // block_size)
        declared = declared_rows(model)

        def pool(row: tuple[int, torch.dtype] | None) -> Tensor | None:
            if row is None:
                return None
            width, dtype = row
            return empty_pool((1 + batch_size * blocks, block_size, 1, width), dtype, device)

        try:
            super().__init__(
                layers=[PagedLayer({name: pool(rows[name]) for name in rows}) for rows in declared]
            )
        except RuntimeError as error:  # of any allocator; on an accelerator OutOfMemoryError
            rows = [row for layer in declared for row in layer.values() if row is not None]
            bytes_of_block = sum(block_size * width * dtype.itemsize for width, dtype in rows)
            need = (1 + batch_size * blocks) * bytes_of_block / 2**30
            # a sixteenth is left for the rest of the process
            room = free_memory(device) * 15 // 16 // bytes_of_block - 1
            fits = min(max(0, room) // batch_size, blocks - 1) * block_size
            raise torch.OutOfMemoryError(
                f"PagedCache: out of memory: batch_size={batch_size}, "
                f"max_cache_len={max_cache_len} needs {need:.1f} GiB on {device}; {fits} tokens "
                "per sequence would fit, pass a smaller max_cache_len (to generate(): fewer new "
                "tokens) or batch_size"
            ) from error
        self.block_table = self._own_blocks(batch_size, blocks)
        self.lengths = torch.zeros(batch_size, dtype=torch.int32, device=device)
        # the length that generate() reads: tokens fed per sequence, including padding
        self.seen = torch.zeros((), dtype=torch.int64, device=device)
        for tensor in (*self._pools(), self.block_table, self.lengths, self.seen):
            torch._dynamo.mark_static_address(tensor)

    def place(self, batch_size: int, tokens: int, valid: Tensor | None) -> Step:
        """The slots of new tokens, and the resulting sequence lengths.

        The tokens count after :meth:`Step.commit`. Without it, a forward has only written rows that
        are never read.

        Args:
            valid: ``[batch_size, tokens]`` bool, False for padding; None: no padding.
        """
        if batch_size != self.batch_size:
            raise ValueError(
                f"PagedCache: the batch must be {self.batch_size} (batch_size), got {batch_size}"
            )
        self.check_room(tokens)
        if valid is None:
            valid = torch.ones(batch_size, tokens, dtype=torch.bool, device=self.lengths.device)
        position = self.lengths[:, None] + valid.cumsum(1) - 1
        column = position // self.block_size
        last = self.block_table.size(1) - 1
        block = self.block_table.gather(1, column.clamp(0, last)).long()
        fits = valid & (column <= last)
        block = torch.where(fits, block, 0).flatten()
        row = torch.where(fits, position % self.block_size, 0).flatten()
        lengths = self.lengths + valid.sum(1).to(self.lengths.dtype)
        npu = block.device.type == "npu"
        slots = torch.stack([block, row], -1) if npu else block * self.block_size + row
        return Step(self, slots, lengths, tokens)

    def check_room(self, tokens: int) -> None:
        """Validates the room for ``tokens`` more per sequence, where that needs no device sync."""
        if torch.compiler.is_compiling() or self.seen.device.type != "cpu":
            return
        if self.seen + tokens > self.max_cache_len:
            raise ValueError(
                f"PagedCache: capacity exceeded: holds {self.seen} of {self.max_cache_len} tokens "
                f"per sequence, got {tokens} more; create it with a larger max_cache_len"
            )

    @torch.inference_mode(False)
    def reserve(self, max_cache_len: int) -> None:
        """Grows to at least ``max_cache_len`` tokens per sequence; cached tokens stay.

        Growth at least doubles the capacity, so that copying takes constant time per token. It
        creates new pools and a new block table, which compiled graphs do not see.

        Raises:
            torch.OutOfMemoryError: no memory; the cache stays usable.
        """
        if max_cache_len <= self.max_cache_len:
            return
        batch_size, blocks = self.block_table.shape
        more = max(-(-max_cache_len // self.block_size), 2 * blocks) - blocks
        used = self._pools()[0].size(0)
        for layer in self.layers:  # one at a time saves memory; the table stays valid
            for name in list(layer.pools()):
                pool = getattr(layer, name)
                try:
                    shape = used + batch_size * more, *pool.shape[1:]
                    larger = empty_pool(shape, pool.dtype, pool.device)
                except RuntimeError as error:
                    raise torch.OutOfMemoryError(
                        "PagedCache: out of memory: cannot grow from max_cache_len="
                        f"{self.max_cache_len} to {(blocks + more) * self.block_size} on "
                        f"{pool.device}; pass a models.PagedCache of the required size to the "
                        "first forward"
                    ) from error
                larger[: pool.size(0)] = pool
                torch._dynamo.mark_static_address(larger)
                setattr(layer, name, larger)
        self.block_table = torch.cat(
            [self.block_table, self._own_blocks(batch_size, more) + (used - 1)], 1
        )
        torch._dynamo.mark_static_address(self.block_table)

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last ``-tokens_to_remove`` tokens; negative, as in transformers."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"PagedCache.crop: tokens_to_remove must be negative or 0, got {tokens_to_remove}"
            )
        for length in (self.lengths, self.seen):
            length.add_(tokens_to_remove).clamp_(min=0)

    def reset(self) -> None:
        self.lengths.zero_()
        self.seen.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replaces each sequence ``b`` by a copy of sequence ``beam_idx[b]``, for beam search.

        Blocks are copied because two beams may continue one sequence with different tokens.
        """
        source = self.block_table[beam_idx]
        for pool in self._pools():
            pool[self.block_table] = pool[source]
        self.lengths.copy_(self.lengths[beam_idx])

    @torch.inference_mode(False)
    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps only these sequences, in this order, in new tensors; repeats are allowed."""
        source = self.block_table[indices]
        self.lengths = self.lengths[indices]
        self.block_table = self._own_blocks(*source.shape)
        kept = torch.cat([source.new_zeros(1), source.flatten()])
        for layer in self.layers:
            for name, pool in layer.pools().items():
                setattr(layer, name, pool[kept])

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
        """Bytes of the pools, all layers."""
        return sum(pool.nbytes for pool in self._pools())

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

    def _own_blocks(self, batch_size: int, blocks: int) -> Tensor:
        """A block table without shared blocks; block 0 belongs to no sequence."""
        device = self._pools()[0].device
        table = torch.arange(1, 1 + batch_size * blocks, dtype=torch.int32, device=device)
        return table.view(batch_size, blocks)


def check_block_size(caller: str, block_size: int) -> None:
    if block_size % 16 or not 16 <= block_size <= 1024:
        raise ValueError(
            f"{caller}: block_size must be a multiple of 16 from 16 to 1024, got {block_size}"
        )


def dimensions(model) -> dict:
    """The properties that a model and its cache must share."""
    pools = pools_of(model)
    widths = [pool.width for pool in pools.values() if isinstance(pool.width, str)]
    layers = [pool.where[0] for pool in pools.values() if pool.where is not None]
    names = ["num_hidden_layers", *widths, *layers]
    of_config = {name: getattr(model.config, name) for name in names}
    device = device_of([model.base_model.layers[0]])
    declared = {name: pool.dtype for name, pool in pools.items()}
    return of_config | {"dtype": model.dtype, "device": device, "pools": declared}
