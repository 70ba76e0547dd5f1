"""The rows of a cache: declared by an architecture, resolved for each layer and its formats."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from custom_pypto.rows import INDEX_FORMATS, LATENT_FORMATS, IndexRows, LatentRows


class RowLayout(NamedTuple):
    """The rows of a sequence in a pool: a ring for its last tokens, then one row per ``ratio``
    tokens.

    Token ``p`` is row ``p % ring``. Tokens ``g * ratio`` to ``g * ratio + ratio - 1`` share row
    ``ring + g``.
    """

    #: rows of the ring; the cache rounds it up to whole blocks
    ring: int = 0
    #: tokens per row behind the ring; 0: no such rows
    ratio: int = 1
    #: rows per block; 0: the block size of the cache
    block: int = 0
    #: last tokens that a sequence can forget: rows of the ring that the next token does not need
    spare: int = 0

    def in_blocks(self, block_size: int) -> "RowLayout":
        """This layout in a cache with ``block_size``."""
        block = self.block or block_size
        ring = -(-self.ring // block) * block
        return self._replace(ring=ring, block=block, spare=self.spare + ring - self.ring)

    def for_whole(self, tokens: int) -> "RowLayout":
        """This layout with a ring, if it has one, of at least ``tokens`` rows. Layouts with blocks
        of their own stay: within one forward nobody reads them."""
        return self if self.block else self._replace(ring=max(self.ring, tokens) * bool(self.ring))

    def blocks(self, tokens: int) -> int:
        """Blocks of a sequence of ``tokens`` tokens, at least one, so that a table has a column."""
        rows = tokens // self.ratio if self.ratio else 0
        return max(1, self.ring // self.block - (-rows // self.block))


EVERY_TOKEN = RowLayout()
COMPUTED = (torch.bfloat16, torch.float16, torch.float32)  # dtypes of the ops
CacheDtype = torch.dtype | Literal["int8", "bfloat16", "float16", "float32"]
OWN_NUMBER = -1  # in Pool.where: the number of the layer


class Row(NamedTuple):
    """Elements and dtype of a row in a pool of one layer, and the rows of a sequence."""

    width: int
    dtype: torch.dtype
    layout: RowLayout


class Pool(NamedTuple):
    """One kind of cache row; an architecture declares a dict of pools by name."""

    #: elements per row, or the config attribute with their number
    width: str | int
    #: None: the dtype of the model
    dtype: torch.dtype | None = None
    #: lists in the config, by layer, and their values for layers with this pool, or OWN_NUMBER
    where: dict[str, str | int] = {}
    #: vectors of ``width`` elements per row
    vectors: int = 1
    #: the rows of a sequence, from the config and the layer
    layout: Callable[..., RowLayout] = lambda config, layer: EVERY_TOKEN
    #: config attributes that determine ``layout``
    sizes: tuple[str, ...] = ()

    def row(self, config, layer: int, dtype: torch.dtype) -> Row | None:
        """The row in this layer of a model in ``dtype``; None without this pool or with width 0."""
        for name, value in self.where.items():
            if getattr(config, name)[layer] != (layer if value == OWN_NUMBER else value):
                return None
        width = self.width
        if isinstance(width, str):  # layers of one model may differ in width
            width = getattr(config.per_layer_config[layer], width)
        if not width:
            return None
        return Row(width * self.vectors, self.dtype or dtype, self.layout(config, layer))

    @property
    def attributes(self) -> list[str]:
        """The config attributes that determine the rows."""
        width = [self.width] if isinstance(self.width, str) else []
        return [*width, *self.where, *self.sizes]


# which layers that share a selection lack, whatever the config says
INDEXER_POOLS = ("index", "index_state")
# pools of multi-head latent attention, and of a lightning indexer in every layer
MLA_POOLS = {"latent": Pool("kv_lora_rank"), "rope": Pool("qk_rope_head_dim")}
INDEX_POOLS = {"index": Pool("index_head_dim")}


def in_formats(
    declared: dict[str, Row | None], latents: LatentRows, index_keys: IndexRows
) -> dict[str, Row | None]:
    """The rows of a layer's pools, from those that its architecture declares."""
    found = dict(declared)
    for rows, names in ((latents, ("latent", "rope")), (index_keys, ("index",))):
        own = [found.pop(name, None) for name in names]
        if own[0] is not None:
            parts = rows.parts(*(row.width if row else 0 for row in own))
            found |= {name: Row(*part, own[0].layout) for name, part in parts.items() if part.width}
    return found


def check_cache_dtypes(
    caller: str,
    text,
    attention,
    index_dtype: CacheDtype | None,
    kv_dtype: CacheDtype | None,
) -> dict[str, torch.dtype | None]:
    """The two dtypes, by their names as arguments; rejects those that the cache of a text model
    with this patched ``attention`` cannot have.

    Raises:
        ValueError: names the argument, the supported and the given dtype.
    """
    if text.dtype not in COMPUTED:
        raise ValueError(
            f"{caller}: model must be {' or '.join(map(str, COMPUTED))}, got "
            f"{text.dtype}, which the ops do not compute in; call model.float() first"
        )
    wanted = {}
    for name, given, formats in (
        ("index_dtype", index_dtype, INDEX_FORMATS),
        ("kv_dtype", kv_dtype, LATENT_FORMATS),
    ):
        dtype = getattr(torch, given, given) if isinstance(given, str) else given
        wanted[name] = dtype
        if dtype in (None, text.dtype):
            continue
        if dtype not in formats:
            raise ValueError(
                f"{caller}: {name} must be {' or '.join(map(str, formats))} or None (dtype of the "
                f"model), got {given!r}; the ops compute in no other, as Atlas A2 and A3"
            )
        if attention.int8:
            why = formats[dtype].lacking(text.config, text.dtype)
        else:
            why = f"model_type {text.config.model_type}, which has no caches in int8"
        if why is not None:
            raise ValueError(f"{caller}: {name} must be None for {why}, got {dtype}")
    return wanted


def check_int(what: str, value) -> None:
    if not hasattr(value, "__index__"):  # as ints of Python, numpy and graphs have
        raise TypeError(f"{what} must be an int, got {type(value).__name__} {value!r}")


def check_block_size(caller: str, block_size: int) -> None:
    check_int(f"{caller}: block_size", block_size)
    if block_size % 16 or not 16 <= block_size <= 1024:
        raise ValueError(
            f"{caller}: block_size must be a multiple of 16 from 16 to 1024, got {block_size}"
        )
