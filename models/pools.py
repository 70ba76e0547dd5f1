"""Pools of cache rows: what an architecture declares, and their memory."""

import bisect
import ctypes
import mmap
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionLayer

from .loading import free_memory
from .projection import device_of


class Space(NamedTuple):
    """Rows of a sequence in a pool: a ring for its last tokens, then one row per ``ratio`` tokens.

    Token ``p`` is row ``p % ring``. Tokens ``w * ratio`` to ``w * ratio + ratio - 1`` share row
    ``ring + w``.
    """

    #: rows of the ring; the cache rounds it up to whole blocks
    ring: int = 0
    #: tokens per row behind the ring; 0: no such rows
    ratio: int = 1
    #: rows per block; 0: the block size of the cache
    block: int = 0
    #: last tokens that a sequence can forget: rows of the ring that the next token does not need
    spare: int = 0

    def in_blocks(self, block_size: int) -> "Space":
        """This space in a cache with ``block_size``."""
        block = self.block or block_size
        ring = -(-self.ring // block) * block
        return self._replace(ring=ring, block=block, spare=self.spare + ring - self.ring)

    def blocks(self, tokens: int) -> int:
        """Blocks of a sequence of ``tokens`` tokens, at least one, so that a table has a column."""
        rows = tokens // self.ratio if self.ratio else 0
        return max(1, self.ring // self.block - (-rows // self.block))


EVERY_TOKEN = Space()
TILE = 128  # elements of an int8 latent that share a scale


class Row(NamedTuple):
    """Elements and dtype of a row in a pool of one layer, and the rows of a sequence."""

    width: int
    dtype: torch.dtype
    space: Space


class Pool(NamedTuple):
    """One kind of cache row; an architecture declares a dict of pools by name."""

    #: elements per row, or the config attribute with their number
    width: str | int
    #: None: the dtype of the model
    dtype: torch.dtype | None = None
    #: a list in the config, and its value for the layers that have this pool; None: all have it
    where: tuple[str, str] | None = None
    #: vectors of ``width`` elements per row
    vectors: int = 1
    #: the rows of a sequence, from the config and the layer
    space: Callable[..., Space] = lambda config, layer: EVERY_TOKEN
    #: config attributes that determine ``space``
    sizes: tuple[str, ...] = ()

    def row(self, config, layer: int, dtype: torch.dtype) -> Row | None:
        """The row in this layer of a model in ``dtype``, or None, also for a width of 0."""
        if self.where is not None and getattr(config, self.where[0])[layer] != self.where[1]:
            return None
        width = self.width
        if isinstance(width, str):  # layers of one model may differ in it
            width = getattr(config.per_layer_config[layer], width)
        if not width:
            return None
        return Row(width * self.vectors, self.dtype or dtype, self.space(config, layer))


# pools of multi-head latent attention, and of a lightning indexer in every layer
MLA_POOLS = {"latent": Pool("kv_lora_rank"), "rope": Pool("qk_rope_head_dim")}
INDEX_POOLS = {"index": Pool("index_head_dim")}


def text_model(model):
    """The decoder of ``model``, which of a multimodal model is its language model."""
    return getattr(model.base_model, "language_model", model.base_model)


def patched_layers(model) -> dict[int, nn.Module]:
    """The layers of a patched model whose attention is on the ops, by their number.

    Raises:
        TypeError: the model is not patched.
    """
    layers = text_model(model).layers
    found = {i: layer for i, layer in enumerate(layers) if hasattr(layer.self_attn, "pools")}
    if not found:
        raise TypeError(
            "PagedCache: model must be patched by models.use_custom_pypto first, "
            f"got one with a {type(layers[0].self_attn).__name__}"
        )
    return found


def pools_of(model) -> dict[str, Pool]:
    """The pools that the architecture of a patched model declares."""
    return next(iter(patched_layers(model).values())).self_attn.pools


def declared_rows(model, index_dtype=None, kv_dtype=None) -> list[dict[str, Row | None]]:
    """For each layer the :meth:`Pool.row` of each pool, by name, in a cache of these dtypes;
    nothing for an upstream layer."""
    text, pools, patched = text_model(model), pools_of(model).items(), patched_layers(model)
    return [
        in_int8(
            {name: pool.row(text.config, layer, model.dtype) for name, pool in pools},
            index_dtype,
            kv_dtype,
        )
        if layer in patched
        else {}
        for layer in range(text.config.num_hidden_layers)
    ]


def check_block_size(caller: str, block_size: int) -> None:
    if block_size % 16 or not 16 <= block_size <= 1024:
        raise ValueError(
            f"{caller}: block_size must be a multiple of 16 from 16 to 1024, got {block_size}"
        )


def check_cache_dtypes(
    caller: str, model, attention, index_dtype: torch.dtype | None, kv_dtype: torch.dtype | None
) -> None:
    """Rejects dtypes that the cache of a model with this patched ``attention`` cannot have.

    Raises:
        ValueError: names the argument, what is supported, and what came.
    """
    for name, dtype in (("index_dtype", index_dtype), ("kv_dtype", kv_dtype)):
        if dtype not in (None, model.dtype, torch.int8):
            raise ValueError(
                f"{caller}: {name} must be torch.int8 or None (dtype of the model), got {dtype}; "
                "Atlas A2 and A3 compute in no other"
            )
        why = not_in_int8(name, model, attention) if dtype == torch.int8 else None
        if why is not None:
            raise ValueError(f"{caller}: {name} must be None for {why}, got torch.int8")


def not_in_int8(name: str, model, attention) -> str | None:
    """Why this model has no such cache in int8, if it has none."""
    config = text_model(model).config
    if not attention.int8:
        return f"model_type {config.model_type}, which has no caches in int8"
    if name == "index_dtype":
        size = config.index_head_dim
        return None if size.bit_count() == 1 else f"index_head_dim {size}, no power of two"
    if model.dtype not in (torch.bfloat16, torch.float16):
        return f"a model in {model.dtype} (rows have RoPE keys of 2 bytes; load it in bfloat16)"
    return (
        f"kv_lora_rank {config.kv_lora_rank}, no multiple of {TILE}"
        if (config.kv_lora_rank % TILE)
        else None
    )


def in_int8(
    rows: dict[str, Row | None], index_dtype: torch.dtype | None, kv_dtype: torch.dtype | None
) -> dict[str, Row | None]:
    """The rows of a layer's pools in a cache of these dtypes."""
    if kv_dtype == torch.int8:
        latent, rope = rows["latent"], rows["rope"]
        width = latent.width + 2 * rope.width + 4 * latent.width // TILE
        rows = rows | {"latent": Row(width, torch.int8, latent.space), "rope": None}
    index = rows.get("index")
    if index_dtype == torch.int8 and index is not None:
        scale = Row(1, torch.float16, index.space)
        rows = rows | {"index": index._replace(dtype=torch.int8), "index_scale": scale}
    return rows


def hadamard(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Sylvester's orthogonal ``[dim, dim]`` matrix: entries 1 and -1 over the root of ``dim``."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < dim:
        upper = torch.cat([matrix, matrix], 1)
        matrix = torch.cat([upper, torch.cat([matrix, -matrix], 1)])
    return (matrix * dim**-0.5).to(dtype)


def dimensions(model) -> dict:
    """The properties that a model and its cache must share."""
    pools = pools_of(model)
    widths = [pool.width for pool in pools.values() if isinstance(pool.width, str)]
    layers = [pool.where[0] for pool in pools.values() if pool.where is not None]
    sizes = [name for pool in pools.values() for name in pool.sizes]
    names = ["num_hidden_layers", *widths, *layers, *sizes]
    config = text_model(model).config
    differing = config.per_layer_attributes or ()
    of_config = {
        # every forward asks: transformers copies the config for a layer of per_layer_config
        name: [getattr(layer.self_attn, name) for layer in patched_layers(model).values()]
        if name in differing
        else getattr(config, name)
        for name in names
    }
    device = device_of(dict([next(iter(patched_layers(model).items()))]))
    declared = {name: pool.dtype for name, pool in pools.items()}
    return of_config | {"dtype": model.dtype, "device": device, "pools": declared}


class PagedLayer:
    """Pools of one layer: a tensor ``[nblk, rows per block, 1, width]`` per pool that the
    architecture declares, or None if this layer has no such pool."""

    def __init__(self, pools: dict[str, Tensor | None], spaces: dict[str, Space]):
        vars(self).update(pools)
        self.spaces = spaces

    def pools(self) -> dict[str, Tensor]:
        """The pools of this layer, by name."""
        return {name: getattr(self, name) for name in self.spaces}


class RecurrentLayer(LinearAttentionLayer):
    """The state of an upstream layer of linear attention: upstream's own, of constant size."""

    spaces: dict[str, Space] = {}

    def pools(self) -> dict[str, Tensor]:
        return {}

    def states(self) -> list[Tensor]:
        both = *self.conv_states.values(), *self.recurrent_states.values()
        return [state for state in both if state is not None]

    def select(self, indices: Tensor) -> None:
        """Keeps only these sequences, in this order."""
        for states in self.conv_states, self.recurrent_states:
            states.update({i: x[indices] for i, x in states.items() if x is not None})


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


def own_blocks(batch_size: int, blocks: int, device: torch.device) -> Tensor:
    """A block table without shared blocks; block 0 belongs to no sequence."""
    table = torch.arange(1, 1 + batch_size * blocks, dtype=torch.int32, device=device)
    return table.view(batch_size, blocks)


def out_of_memory(
    rows: list[Row], batch_size: int, max_cache_len: int, block_size: int, device: torch.device
) -> torch.OutOfMemoryError:
    """The error of a cache with these rows, which says how many tokens would fit."""

    def size(blocks: int) -> int:
        return sum(
            (1 + batch_size * space.blocks(blocks * block_size)) * space.block * bytes_
            for row in rows
            for space in [row.space.in_blocks(block_size)]
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
