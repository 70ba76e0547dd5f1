"""The memory of a cache: the pools of each layer, and the block tables of their rows."""

import bisect
import functools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from custom_pypto import layer_ops
from custom_pypto.rows import IndexRows, LatentRows
from custom_pypto.rows.expanded import FEWEST_TOKENS, Heads, attend_expanded
from custom_pypto.rows.index import by_position

from ..absorbed import absorbed_query, constant_keys, of_heads
from ..memory import empty, free_memory, is_readable, is_transformed
from .layout import EVERY_TOKEN, Row, RowLayout
from .recurrent import RecurrentLayer
from .sequence import Tokens


class Selection:
    """What the last layer selected whose selection others share, until the forward ends."""

    def __init__(self):
        #: ``[B, S, 1, K]``; from the beginning an attribute of the object, as graphs guard on where
        #: it is found
        self.indices: Tensor | None = None


class PagedLayer:
    """Pools of one layer by name, tensors ``[blocks, rows per block, 1, width]``, with the layout
    of their rows.

    Args:
        tables: block tables of all layouts.
        latents: the format of latents; index_keys: of index keys.
        selection: one for all layers of a cache.
    """

    #: the layer whose latents this one attends to; None: its own
    source: "PagedLayer | None" = None
    #: whether index keys, and the queries and weights of :meth:`select`, have gradients
    learns = False
    #: whether a call reads the tokens in slices, or all at once
    in_slices = True

    def __init__(
        self,
        pools: dict[str, Tensor],
        layouts: dict[str, RowLayout],
        tables: dict[RowLayout, Tensor],
        latents: LatentRows | None,
        index_keys: IndexRows,
        selection: Selection,
    ):
        self.pools, self.layouts, self.tables = pools, layouts, tables
        self.latents, self.index_keys, self.selection = latents, index_keys, selection

    def write_latents(self, slots: Tensor | None, latent: Tensor, rope: Tensor | None) -> None:
        """Writes latents ``[B, S, L]`` and rotated RoPE keys ``[B, S, 1, R]`` of new tokens."""
        self.latents.write(self.pools, slots, latent, rope)

    def write_keys(self, slots: Tensor | None, key: Tensor) -> None:
        """Writes the index keys ``[B, S, 1, D]`` of new tokens."""
        self.index_keys.write(self.pools, slots, key)

    def every_row(self, count: int, tokens: Tokens) -> Tensor | None:
        """What :meth:`select` gives, where that needs no scores; else None."""
        if self.learns or not is_readable(tokens.lengths):
            return None
        if tokens.lengths.max().item() // self.ratio > count:
            return None
        return first_rows(count, tokens, self.ratio)[0]

    def select(self, query: Tensor, weights: Tensor, count: int, tokens: Tokens) -> Tensor:
        """Rows of index keys, ``[B, S, 1, count]`` int32, -1 behind the last: of a token that sees
        at most ``count`` all, on a CPU by position; else those with the best scores, best first.

        Args:
            query: ``[B, S, N, D]``.
            weights: ``[B, S, N]`` float32.
        """
        layout = self.layouts["index"]
        others = {"block_table": self.tables[layout]}
        if layout.ratio > 1:
            others["cmp_ratio"] = layout.ratio
        indices = self.index_keys.select(
            self.pools, query, weights, count, lengths=tokens.lengths, **others
        )
        return in_place_of_all(indices, tokens, layout.ratio)

    @property
    def ratio(self) -> int:
        """Tokens of a row of index keys."""
        return self.layouts["index"].ratio if "index" in self.layouts else 1

    def attend(self, heads: Heads, indices: Tensor, lengths: Tensor) -> Tensor:
        """The outputs ``[B, S, H, v]`` of the heads over the latents at ``indices``."""
        attended = self.source or self
        pools, table = attended.pools, self.tables[attended.layouts["latent"]]
        if indices.size(1) >= FEWEST_TOKENS and is_readable(lengths):
            first = functools.partial(self.latents.first, pools, table, latent=heads.weight.size(2))
            if (output := attend_expanded(heads, indices, lengths, first)) is not None:
                return output
        others = {} if heads.sinks is None else {"sinks": heads.sinks}  # of some architectures
        query = absorbed_query(heads.q_nope, heads.weight)
        output = self.latents.attend(
            constant_keys(pools, query, heads.q_rope, heads.sinks),
            query,
            heads.q_rope,
            indices,
            heads.scaling,
            lengths=lengths,
            block_table=table,
            **others,
        )
        return of_heads(output, heads.weight[:, heads.q_nope.size(-1) :])


class Store:
    """Pools and recurrent states of all layers, and a block table ``[B, blocks]`` int32 per
    :class:`RowLayout`. Block 0 belongs to no sequence.

    Args:
        rows: of each layer, by pool; None for an upstream layer.
        latents: the format of latents in every :class:`PagedLayer`; index_keys: of index keys.
    Raises:
        torch.OutOfMemoryError: the message says how many tokens fit.
    """

    def __init__(
        self,
        rows: list[dict[str, Row | None] | None],
        latents: LatentRows | None,
        index_keys: IndexRows,
        batch_size: int,
        max_cache_len: int,
        block_size: int,
        device: torch.device,
    ):
        self.block_size = block_size
        self.max_cache_len = -(-max_cache_len // block_size) * block_size
        present = [row for layer in rows if layer for row in layer.values() if row is not None]
        sizes = batch_size, self.max_cache_len, block_size, device
        try:
            memory = [allocated(layer or {}, *sizes) for layer in rows]
        except torch.OutOfMemoryError as error:
            raise out_of_memory(present, batch_size, max_cache_len, block_size, device) from error
        layouts = [layout for _, of_layer in memory for layout in of_layer.values()]
        self.tables = tables_of(layouts, batch_size, self.max_cache_len, device)
        # one object of equal ones: graphs guard on which of the tables it is
        same = {layout: layout for layout in self.tables}
        for _, of_layer in memory:
            of_layer.update({name: same[layout] for name, layout in of_layer.items()})
        self.selection = Selection()
        formats = self.tables, latents, index_keys, self.selection
        self.layers = [
            RecurrentLayer() if upstream is None else PagedLayer(*of_layer, *formats)
            for upstream, of_layer in zip(rows, memory, strict=True)
        ]
        self.recurrent = [layer for layer in self.layers if isinstance(layer, RecurrentLayer)]
        # layout of the pools with a row for every token
        self.every_token = EVERY_TOKEN.in_blocks(block_size)
        for tensor in (*self.pools(), *self.tables.values()):
            torch._dynamo.mark_static_address(tensor)

    @property
    def spare(self) -> int | None:
        """Last tokens that rings and recurrent states can forget; None: all of them."""
        return 0 if self.recurrent else self.spare_of_rings

    @property
    def spare_of_rings(self) -> int | None:
        """Last tokens that rings can forget; None: all of them."""
        return min((layout.spare for layout in self.tables if layout.ring), default=None)

    def keep_states(self, keeps: bool) -> None:
        """Whether recurrent layers keep their states after each token of a forward, from now on."""
        for layer in self.recurrent:
            layer.kept = [] if keeps else None

    def can_take_back(self, tokens: int) -> bool:
        """Whether all recurrent layers, if there are any, have kept the states before the last
        ``tokens``."""
        kept = [layer.kept for layer in self.recurrent]
        return bool(kept) and all(states and tokens < len(states) for states in kept)

    @property
    def nbytes(self) -> int:
        states = [state for layer in self.recurrent for state in layer.states()]
        return sum(tensor.nbytes for tensor in [*self.pools(), *states])

    def pools(self) -> Iterator[Tensor]:
        return (pool for layer in self.layers for pool in layer.pools.values())

    def grow(self, tokens: int, batch_size: int) -> None:
        """Grows to ``tokens`` tokens per sequence, a multiple of the block size, in new pools and
        new tables.

        Raises:
            torch.OutOfMemoryError: no memory; the store stays usable.
        """
        more = {layout: layout.blocks(tokens) - old.size(1) for layout, old in self.tables.items()}
        used = {layout: 1 + table.numel() for layout, table in self.tables.items()}
        for layer in self.layers:  # one at a time saves memory; the tables stay valid
            larger = {}
            for name, layout in layer.layouts.items():
                pool, kept = layer.pools[name], used[layout]
                shape = kept + batch_size * more[layout], *pool.shape[1:]
                if shape == pool.shape:
                    continue  # of constant size, or grown before memory ran out
                try:
                    larger[name] = empty(shape, pool.dtype, pool.device)
                except torch.OutOfMemoryError as error:
                    raise torch.OutOfMemoryError(
                        "PagedCache: out of memory: cannot grow from max_cache_len="
                        f"{self.max_cache_len} to {tokens} on {pool.device}; pass a "
                        "models.PagedCache of the required size to the first forward"
                    ) from error
                larger[name][:kept] = pool[:kept]
                torch._dynamo.mark_static_address(larger[name])
            layer.pools.update(larger)  # at once: an op takes all pools of a layer in one size
        for layout, table in self.tables.items():
            new = own_blocks(batch_size, more[layout], table.device) + (used[layout] - 1)
            self.tables[layout] = torch.cat([table, new], 1)
            torch._dynamo.mark_static_address(self.tables[layout])
        self.max_cache_len = tokens

    def reorder(self, sources: Tensor) -> None:
        """Replaces each sequence ``b`` by a copy of sequence ``sources[b]``.

        Blocks are copied because two beams may continue one sequence with different tokens.
        """
        for layer in self.layers:
            for name, pool in layer.pools.items():
                table = self.tables[layer.layouts[name]]
                pool[table] = pool[table[sources]]
        for layer in self.recurrent:
            layer.reorder_cache(sources)

    def select(self, indices: Tensor) -> None:
        """Keeps only these sequences, in this order, in new tensors; repeats are allowed."""
        for layout, table in self.tables.items():
            source = table[indices]
            self.tables[layout] = own_blocks(*source.shape, source.device)
            kept = torch.cat([source.new_zeros(1), source.flatten()])
            for layer in self.layers:
                for name, pool in layer.pools.items():
                    if layer.layouts[name] == layout:
                        layer.pools[name] = pool[kept]
        for layer in self.recurrent:
            layer.select(indices)

    def reset_recurrent(self) -> None:
        for layer in self.recurrent:
            layer.reset()


def first_rows(count: int, tokens: Tokens, ratio: int) -> tuple[Tensor, Tensor]:
    """The first ``count`` rows of ``ratio`` tokens that each token sees, by position, ``[B, S, 1,
    count]`` int32 with -1 behind the last; and how many it sees, ``[B, S, 1, 1]``."""
    seen = torch.where(tokens.valid, (tokens.positions + 1) // ratio, 0)[..., None, None]
    return by_position(count, seen), seen


def in_place_of_all(indices: Tensor, tokens: Tokens, ratio: int) -> Tensor:
    """Selected ``indices`` by position where a token sees no more than it selects: attention adds
    in their order, which must not depend on whether :meth:`PagedLayer.every_row` could be asked."""
    count = indices.size(-1)
    if not indices.is_cpu:  # of an accelerator every call selects
        return indices
    if is_readable(tokens.start) and (tokens.start.min().item() + 1) // ratio > count:
        return indices
    rows, seen = first_rows(count, tokens, ratio)
    return torch.where(tokens.valid[..., None, None] & (seen <= count), rows, indices)


def allocated(
    rows: dict[str, Row | None],
    batch_size: int,
    tokens: int,
    block_size: int,
    device: torch.device,
) -> tuple[dict[str, Tensor], dict[str, RowLayout]]:
    """The pools of a layer with these rows, for ``tokens`` tokens a sequence, and their layouts."""
    pools, layouts = {}, {}
    for name, row in rows.items():
        if row is not None:
            layouts[name] = layout = row.layout.in_blocks(block_size)
            shape = (1 + batch_size * layout.blocks(tokens), layout.block, 1)
            # never read past a length, and pages without a token cost nothing
            pools[name] = empty((*shape, row.width), row.dtype, device)
    return pools, layouts


def tables_of(
    layouts: Iterable[RowLayout], batch_size: int, tokens: int, device: torch.device
) -> dict[RowLayout, Tensor]:
    return {x: own_blocks(batch_size, x.blocks(tokens), device) for x in dict.fromkeys(layouts)}


def own_blocks(batch_size: int, blocks: int, device: torch.device) -> Tensor:
    """A block table without shared blocks; block 0 belongs to no sequence."""
    table = torch.arange(1, 1 + batch_size * blocks, dtype=torch.int32, device=device)
    return table.view(batch_size, blocks)


def out_of_memory(
    rows: list[Row], batch_size: int, max_cache_len: int, block_size: int, device: torch.device
) -> torch.OutOfMemoryError:
    """The error of a cache with these rows; its message says how many tokens would fit."""

    def size(blocks: int) -> int:
        return sum(
            (1 + batch_size * layout.blocks(blocks * block_size)) * layout.block * bytes_
            for row in rows
            for layout in [row.layout.in_blocks(block_size)]
            for bytes_ in [row.width * row.dtype.itemsize]
        )

    blocks = -(-max_cache_len // block_size)
    # a sixteenth is left for the rest of the process
    room = free_memory(device) * 15 // 16
    fits = max(0, bisect.bisect_right(range(blocks), room, key=size) - 1) * block_size
    return torch.OutOfMemoryError(
        f"PagedCache: out of memory: batch_size={batch_size}, max_cache_len={max_cache_len} "
        f"needs {size(blocks) / 2**30:.1f} GiB on {device}; {fits} tokens per sequence would "
        "fit, pass a smaller max_cache_len (to generate(): fewer new tokens) or batch_size"
    )


def slots(table: Tensor, layout: RowLayout, rows: Tensor, valid: Tensor) -> Tensor:
    """Slots of ``rows [B, n]`` of each sequence in the flattened pools with this block table; on
    an NPU, block and row. Rows that are not ``valid`` or do not fit get slots of block 0."""
    if table.is_cpu and not is_transformed():
        return layer_ops.cache_slots(table, rows, valid, layout.block)
    column, row = rows // layout.block, rows % layout.block
    last = table.size(1) - 1
    block = table.gather(1, column.clamp(0, last)).long()
    fits = valid & (column <= last)
    if table.device.type == "npu":
        both = torch.stack([block, row], -1)
        return torch.where(fits[..., None], both, 0).flatten(0, 1)
    return torch.where(fits, block * layout.block + row, 0).flatten()
