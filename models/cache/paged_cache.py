"""The paged cache of a patched model: pools of blocks per layer, one block table per layout of
rows."""

import os
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from custom_pypto.rows import index_format, latent_format

from ..memory import is_readable
from ..patched import (
    device_of,
    differences,
    dimensions,
    mtp_attention,
    patched_attentions,
    text_model,
)
from . import saved
from .layout import CacheDtype, check_block_size, check_cache_dtypes, check_int, in_formats
from .sequence import Sequences
from .step import Step, Tokens
from .store import PagedLayer, Store, slots


class PagedCache(Cache):
    """The cache of a model patched by :func:`models.use_custom_pypto`; ``model.generate()`` creates
    one by default. Create it yourself to keep it between calls or for a custom decode loop::

        cache = models.PagedCache(model, batch_size=1, max_cache_len=4096)
        model(prompt_ids, cache=cache)
        model.generate(all_ids, cache=cache, max_new_tokens=100)

    Before transformers 5.24 the argument is ``past_key_values``; patched models take both names,
    and upstream's outputs have the field of the installed version.

    Padding is not stored: sequence ``b`` has ``lengths[b]`` tokens from position 0 on, regardless
    of left padding, and position ``p`` is row ``p % block_size`` of block ``block_table[b, p //
    block_size]``. Block 0 belongs to no sequence; padding is written there. Some architectures keep
    fewer rows than tokens (:class:`models.cache.layout.RowLayout`), with a block table for each
    layout in ``tables``.
    Left padding needs nothing else: the ops align queries and keys at the last token, so padding,
    left of every real token, sees no key.

    Everything that changes from step to step is tensor data updated in place, never a shape or a
    Python number, so that one compiled graph serves every position.

    New tokens count only when their forward completes: after an exception or Ctrl-C the cache is
    unchanged and usable, unless more tokens were overwritten than the slack of its rings; the next
    forward then raises. An interrupted ``generate()`` leaves cached tokens unknown to its caller:
    ``crop`` the cache to the known ones. An interrupted beam search may leave sequences half
    exchanged: the next forward says so; :meth:`reset` the cache.

    A cache keeps its size and its addresses, which compiled graphs need. Only a cache that a
    forward created by default grows (:meth:`reserve`); every step then reads its length, which
    stalls an accelerator and breaks a graph.

    Args:
        model: the model, for its dimensions, dtype (under autocast too) and device.
        batch_size: number of sequences, times the beams or returned sequences of each.
        max_cache_len: capacity of a sequence in tokens, including padding; rounded up to whole
            blocks.
        block_size: tokens per block, a multiple of 16 up to 1024.
        index_dtype: ``torch.int8`` or ``"int8"`` for index keys of a byte per value, or the dtype
            of the model; None: as :func:`models.use_custom_pypto` was told.
        kv_dtype: the same for latents. The same memory holds 1.1 times as many tokens with int8
            index keys, 1.5 with latents, 1.8 with both; selections differ where scores nearly tie.

    Raises:
        torch.OutOfMemoryError: no memory for this many tokens; the message says how many fit. A CPU
            overcommits memory up to a limit: see :attr:`nbytes`.
        ValueError: layers on several devices; or, from a forward that has not written yet, no room
            for its tokens or an overwritten window. That check reads the length, which would stall
            an accelerator: it runs on CPU only and not inside ``torch.compile``. ``generate()``
            checks its ``max_length`` everywhere. Unchecked tokens without room go to block 0.
    """

    # Cache derives these properties from its layers; here they hold for the whole cache
    is_compileable = True
    is_croppable = True
    is_initialized = True
    batch_size = property(lambda self: self.sequences.lengths.size(0))
    max_cache_len = property(lambda self: self.store.max_cache_len)
    lengths = property(lambda self: self.sequences.lengths)
    seen = property(lambda self: self.sequences.seen)
    tables = property(lambda self: self.store.tables)
    grows = False

    @torch.inference_mode(False)  # inference tensors are read-only outside the mode
    def __init__(
        self,
        model: PreTrainedModel,
        batch_size: int,
        max_cache_len: int,
        *,
        block_size: int = 128,
        index_dtype: CacheDtype | None = None,
        kv_dtype: CacheDtype | None = None,
    ):
        check_block_size("PagedCache", block_size)
        text = text_model(model)
        attentions, options = patched_attentions(text), text._custom_pypto.cache
        attention = next(iter(attentions.values()))
        asked = {"index_dtype": index_dtype, "kv_dtype": kv_dtype}
        asked = {name: dtype or options[name] or text.dtype for name, dtype in asked.items()}
        self.dtypes = check_cache_dtypes("PagedCache", text, attention, **asked)
        for name, value in (("batch_size", batch_size), ("max_cache_len", max_cache_len)):
            check_int(f"PagedCache: {name}", value)
            if value < 1:
                raise ValueError(f"PagedCache: {name} must be at least 1, got {value}")
        self.made_for, device = dimensions(text, attentions), device_of(text, attentions)
        latents = latent_format(self.dtypes["kv_dtype"])(text.dtype)
        index_keys = index_format(self.dtypes["index_dtype"])
        formats = latents, index_keys(text.dtype, text.config.index_head_dim, device)
        rows: list[dict | None] = [None] * text.config.num_hidden_layers
        for layer in attentions.keys() & range(len(rows)):  # generate() may draft with the first
            rows[layer] = in_formats(attentions[layer].rows(text.config, text.dtype), *formats)
        if (mtp := mtp_attention(text)) is not None and mtp.layer_idx == len(rows):
            rows.append(in_formats(mtp.rows(mtp.config, text.dtype), *formats))
        self.store = Store(rows, *formats, batch_size, max_cache_len, block_size, device)
        for layer in attentions.keys() & range(len(rows)):
            if (source := attentions[layer].source) is not None:
                self.store.layers[layer].source = self.store.layers[source]
        super().__init__(layers=self.store.layers)
        self.sequences = Sequences(batch_size, self.store.spare, device)
        if len(rows) > text.config.num_hidden_layers:
            streams = [text.config.hc_mult] if mtp.mtp.streams else []
            size = batch_size, *streams, text.config.hidden_size
            self.sequences.hidden = torch.zeros(size, dtype=text.dtype, device=device)
            torch._dynamo.mark_static_address(self.sequences.hidden)
        #: mtp.layer.Drafting while generate() drafts; else each forward feeds the MTP layer
        self.drafting = None
        #: a change of sequences that has begun, and the remedy if it was interrupted; from the
        #: beginning an attribute of the object, as graphs guard on where it is found
        self.half_done: str | None = None

    @property
    def block_size(self) -> int:
        return self.store.block_size

    @property
    def block_table(self) -> Tensor:
        """``[B, blocks]`` int32 block ids of the pools with a row for every token."""
        return self.store.tables[self.store.every_token]

    @block_table.setter
    def block_table(self, table: Tensor) -> None:
        self.store.tables[self.store.every_token] = table
        self.store.max_cache_len = table.size(1) * self.block_size

    def place(
        self,
        batch_size: int,
        tokens: int,
        valid: Tensor | None,
        position_ids: Tensor | None = None,
    ) -> Step:
        """The positions of new tokens, and the resulting sequence lengths.

        The tokens count after :meth:`finish`. Until then a forward has only written rows that
        are never read, and spare rows of rings.

        Args:
            valid: ``[batch_size, tokens]`` bool, False for padding; None: no padding.
            position_ids: of the caller; None: from the number of cached tokens on.
        """
        self.check_room(tokens)
        store, sequences = self.store, self.sequences
        if store.recurrent and is_readable(sequences.seen) and sequences.seen == 0:
            store.reset_recurrent()  # an interrupted forward may have left a state
        sequences.announce(tokens)
        start, new = sequences.lengths.clone(), torch.arange(tokens, device=sequences.seen.device)
        if valid is None:
            valid = torch.ones(batch_size, tokens, dtype=torch.bool, device=start.device)
            positions = start[:, None] + new
            lengths = start + tokens
        else:
            positions = start[:, None] + valid.cumsum(1) - 1
            lengths = start + valid.sum(1).to(start.dtype)
        if position_ids is None:
            position_ids = sequences.seen + new
        position_ids = position_ids.expand(batch_size, -1)
        new_slots, layout = None, store.every_token
        if layout in store.tables:
            new_slots = slots(store.tables[layout], layout, positions, valid)
        own = Tokens(start, lengths, valid, positions, position_ids, slice(0, tokens))
        return Step(self, sequences, own, own, new_slots)

    def layer_of(self, attention: nn.Module) -> PagedLayer:
        """The rows of this layer, as :class:`.step.Rows` has them."""
        return self.store.layers[attention.layer_idx]

    def finish(self, step: Step, states: Tensor) -> None:
        """Counts the new tokens as cached, after every layer has written them."""
        self.store.selection.indices = None
        self.sequences.commit(step.whole.lengths, step.whole.count())
        if (hidden := self.sequences.hidden) is not None:
            # a sequence may have padding alone in a forward
            real = step.own.valid[:, -1].view(-1, *[1] * (hidden.dim() - 1))
            hidden.copy_(torch.where(real, states[:, -1], hidden))

    def check_batch(self, batch_size: int) -> None:
        if batch_size != self.batch_size:
            raise ValueError(
                f"PagedCache: the batch must be {self.batch_size} (batch_size), got {batch_size}"
            )

    def check_room(self, tokens: int) -> None:
        """Validates the room for ``tokens`` more per sequence, where that needs no device sync.

        Raises:
            ValueError: no room; or a change of sequences was interrupted.
        """
        if self.half_done is not None:
            raise ValueError(f"PagedCache: an interruption has left half done {self.half_done}")
        if is_readable(self.seen):
            self.sequences.check_room(tokens, self.max_cache_len)

    @torch.inference_mode(False)
    def reserve(self, max_cache_len: int) -> None:
        """Grows to at least ``max_cache_len`` tokens per sequence; cached tokens stay.

        Growth at least doubles the capacity, so that copying takes constant time per token. It
        creates new pools and new block tables, which compiled graphs do not see.

        Raises:
            torch.OutOfMemoryError: no memory; the cache stays usable.
        """
        if max_cache_len > self.max_cache_len:
            size = self.block_size
            blocks = max(-(-max_cache_len // size), 2 * self.max_cache_len // size)
            self.store.grow(blocks * size, self.batch_size)

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last ``-tokens_to_remove`` tokens; negative, as in transformers.

        Raises:
            ValueError: more tokens than the rings can spare, but not all: their window is
                overwritten.
        """
        removed = -tokens_to_remove
        restores = removed > 0 and self.store.can_take_back(removed)
        self.sequences.crop(tokens_to_remove, restores)
        if restores:
            for layer in self.store.recurrent:
                layer.take_back(removed)
        elif self.store.recurrent and self.seen == 0:
            self.store.reset_recurrent()

    def reset(self) -> None:
        if self.half_done is not None and "reset()" not in self.half_done:
            raise ValueError(f"PagedCache: an interruption has left half done {self.half_done}")
        self.half_done = None
        self.sequences.reset()
        self.store.reset_recurrent()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replaces each sequence ``b`` by a copy of sequence ``beam_idx[b]``, for beam search."""
        self.half_done = "an exchange of sequences; reset() the cache and feed them again"
        self.store.reorder(beam_idx)
        self.sequences.reorder(beam_idx)
        self.half_done = None

    @torch.inference_mode(False)
    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps only these sequences, in this order, in new tensors; repeats are allowed."""
        self.half_done = "a selection of sequences; create another cache and feed them again"
        self.store.select(indices)
        self.sequences.select(indices)
        self.half_done = None

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

    def save(self, path: str | os.PathLike) -> None:
        """Writes the cached tokens into a file of safetensors, for :meth:`load` in another process.

        The header names the properties of the model and the formats of the rows. The file has the
        rows of cached tokens alone, and this takes as much memory again. A reader sees the file
        that was there or the new one, never a part, whoever else saves to the same path.

        Raises:
            OSError: the file cannot be written: ``FileNotFoundError`` without its folder,
                ``PermissionError``, ``IsADirectoryError``, or by its ``errno``, such as ``ENOSPC``.
                A file that was there stays.
            ValueError: an interrupted forward has overwritten the window of the last token.
        """
        self.check_room(0)
        names = ("batch_size", "max_cache_len", "block_size")
        options = {name: getattr(self, name) for name in names} | self.dtypes
        saved.write_file(Path(path), self.made_for, options, self.store, self.sequences)

    @classmethod
    def load(
        cls, path: str | os.PathLike, model: PreTrainedModel, *, max_cache_len: int | None = None
    ) -> "PagedCache":
        """The cache of a file that :meth:`save` wrote; a model with the weights of then continues
        to the bit. The weights are not compared.

        Args:
            path: the file.
            model: a patched model, on any device; ranks of tensor parallel load the same file.
            max_cache_len: capacity of a sequence in tokens; None: as saved.

        Raises:
            OSError: the file cannot be read: ``FileNotFoundError``, ``IsADirectoryError`` or
                ``PermissionError``.
            TypeError: a model that is not patched.
            ValueError: a model of other dimensions or dtype, fewer tokens than the cache has, or a
                damaged or foreign file.
        """
        text, path = text_model(model), Path(path)
        wanted = saved.portable(dimensions(text, patched_attentions(text)))
        with saved.opened(path) as file:
            header = saved.read_header(path, file)
            if header.made_for != wanted:
                made, wanted = differences(header.made_for, wanted)
                raise ValueError(
                    f"PagedCache.load: {path} is of a model with {made}, got one with {wanted}; "
                    "load it into the model that it is of"
                )
            cache = cls(model, **header.arguments(max_cache_len))
            saved.read_file(path, file, header, cache.store, cache.sequences)
        return cache

    @property
    def nbytes(self) -> int:
        """Bytes of the pools and recurrent states, all layers."""
        return self.store.nbytes

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
