"""Seeded inputs of the ops: each maker returns the keyword arguments of one call.

What an op may not read is poison: NaN in query and key rows past a sequence's length and in unused
blocks, and block ids from INT_MIN to INT_MAX past a sequence's last block.
"""

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from torch import Tensor

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
LAYOUTS = [("BSND", "PA_BSND"), ("TND", "PA_BSND"), ("BSND", "BSND"), ("TND", "TND")]
LAYOUT_IDS = ["-".join(layouts) for layouts in LAYOUTS]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def int32(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def prefix_sums(lengths: list[int]) -> Tensor:
    return int32(list(accumulate(lengths)))


def visible_keys(row: int, len_q: int, len_k: int, sparse_mode: int) -> int:
    """How many keys query ``row`` of a sequence sees."""
    return len_k if sparse_mode == 0 else min(max(len_k - len_q + row + 1, 0), len_k)


def place(rows: list[Tensor], layout: str, padding: int, fill: float = torch.nan) -> Tensor:
    """The rows of each sequence in ``BSND`` or ``TND``, then ``padding`` or more of ``fill``."""
    if layout == "TND":
        return torch.cat([*rows, rows[0].new_full((padding, *rows[0].shape[1:]), fill)])
    longest = max(len(r) for r in rows) + padding
    placed = rows[0].new_full((len(rows), longest, *rows[0].shape[1:]), fill)
    for sequence, r in zip(placed, rows, strict=True):
        sequence[: len(r)] = r
    return placed


def block_tables(lengths: list[int], block_size: int, g: torch.Generator) -> tuple[Tensor, int]:
    """Shuffled block ids, hostile past the end, and how many blocks the cache has (2 unused)."""
    blocks = [-(-n // block_size) for n in lengths]
    total = sum(blocks) + 2
    ids = torch.randperm(total, generator=g, dtype=torch.int32)
    hostile = int32([INT_MIN, -1, 0, total, INT_MAX])
    table = hostile[torch.randint(5, (len(lengths), max(blocks) + 1), generator=g)]
    for row, owned in zip(table, ids[: sum(blocks)].split(blocks), strict=True):
        row[: len(owned)] = owned
    return table, total


def slots(table: Tensor, length: int, block_size: int) -> Tensor:
    """Where positions 0 … length-1 of the sequence with this row of the block table are stored."""
    position = torch.arange(length)
    return table.long()[position // block_size] * block_size + position % block_size


def in_a_wider_row(x: Tensor) -> Tensor:
    """A view equal to ``x`` of which every stride but the last is larger than it need be."""
    wide = x.new_full((len(x), 2, *x.shape[1:-1], x.size(-1) + 16), torch.nan)
    wide[:, 1, ..., : x.size(-1)] = x
    return wide[:, 1, ..., : x.size(-1)]


def stored(rows: list[Tensor], layout: str, block_size: int, strided: bool, g: torch.Generator):
    """``(keys, lengths, block table or None)`` of the key rows ``[len, 1, W]`` of each sequence."""
    lengths = [len(r) for r in rows]
    table = None
    if layout == "PA_BSND":
        table, blocks = block_tables(lengths, block_size, g)
        keys = rows[0].new_full((blocks, block_size, 1, rows[0].size(-1)), torch.nan)
        for ids, r in zip(table, rows, strict=True):
            keys.view(-1, *r.shape[1:])[slots(ids, len(r), block_size)] = r
    else:
        keys = place(rows, layout, padding=2)
    if strided:
        keys = in_a_wider_row(keys)
    return keys, prefix_sums(lengths) if layout == "TND" else int32(lengths), table


def random(shape: tuple, dtype: torch.dtype, g: torch.Generator, integers: bool = False) -> Tensor:
    """Normal, or integers of -2 … 2, whose products and sums are exact, so that ties are many."""
    if integers:
        return torch.randint(-2, 3, shape, generator=g).to(dtype)
    return torch.randn(shape, generator=g).to(dtype)


def indexer_inputs(
    lengths_query: list[int],
    lengths_key: list[int],
    *,
    heads: int = 4,
    dim: int = 32,
    layout_query: str = "BSND",
    layout_key: str = "PA_BSND",
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    weights_dtype: torch.dtype | None = None,
    sparse_count: int = 8,
    sparse_mode: int = 3,
    integers: bool = False,
    strided: bool = False,
    seed: int = 0,
) -> dict:
    """Arguments of ``npu_lightning_indexer_pto``."""
    g = torch.Generator().manual_seed(seed)
    query = [random((n, heads, dim), dtype, g, integers) for n in lengths_query]
    weights = [random((n, heads), weights_dtype or dtype, g, integers) for n in lengths_query]
    keys = [random((n, 1, dim), dtype, g, integers) for n in lengths_key]
    key, actual_key, table = stored(keys, layout_key, block_size, strided, g)
    tnd = layout_query == "TND"
    return dict(
        query=place(query, layout_query, padding=1),
        key=key,
        weights=place(weights, layout_query, padding=1),
        actual_seq_lengths_query=prefix_sums(lengths_query) if tnd else int32(lengths_query),
        actual_seq_lengths_key=actual_key,
        block_table=table,
        layout_query=layout_query,
        layout_key=layout_key,
        sparse_count=sparse_count,
        sparse_mode=sparse_mode,
    )


def some_indices(
    len_q: int, len_k: int, count: int, sparse_mode: int, hostile: bool, g: torch.Generator
) -> Tensor:
    """``[len_q, 1, count]``: distinct visible positions, then -1, as the indexer returns them.

    Hostile: future and absent positions, duplicates, int32 extremes, and anything after a -1.
    """
    indices = torch.full((len_q, 1, count), -1, dtype=torch.int32)
    for i, row in enumerate(indices[:, 0]):
        if hostile:
            values = [*range(len_k), -1, -2, INT_MIN, len_k, INT_MAX]
            row[:] = int32(values)[torch.randint(len(values), (count,), generator=g)]
        else:
            chosen = torch.randperm(visible_keys(i, len_q, len_k, sparse_mode), generator=g)
            row[: len(chosen)] = chosen[:count]
    return indices


def attention_inputs(
    lengths_query: list[int],
    lengths_key: list[int],
    *,
    heads: int = 4,
    latent: int = 32,
    rope: int = 16,
    layout_query: str = "BSND",
    layout_kv: str = "PA_BSND",
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    sparse_count: int = 8,
    sparse_mode: int = 3,
    own_value: bool = False,
    hostile: bool = False,
    strided: bool = False,
    seed: int = 0,
) -> dict:
    """Arguments of ``npu_sparse_flash_attention_pto``.

    ``rope=0``: no rope arguments; ``strided``: key and key_rope are parts of one row.
    """
    g = torch.Generator().manual_seed(seed)
    width = latent + rope
    query = place(
        [random((n, heads, width), dtype, g) for n in lengths_query], layout_query, padding=1
    )
    keys = [random((n, 1, width), dtype, g) for n in lengths_key]
    kv, actual_kv, table = stored(keys, layout_kv, block_size, strided, g)
    key, key_rope = kv.split([latent, rope], -1)
    if not strided:
        key, key_rope = key.contiguous(), key_rope.contiguous()
    indices = [
        some_indices(len_q, len_k, sparse_count, sparse_mode, hostile, g)
        for len_q, len_k in zip(lengths_query, lengths_key, strict=True)
    ]
    tnd = layout_query == "TND"
    return dict(
        query=query[..., :latent].contiguous(),
        key=key,
        value=key.flip(-1) if own_value else None,
        sparse_indices=place(indices, layout_query, padding=1, fill=0),
        scale_value=3 * width**-0.5,
        block_table=table,
        actual_seq_lengths_query=prefix_sums(lengths_query) if tnd else int32(lengths_query),
        actual_seq_lengths_kv=actual_kv,
        query_rope=query[..., latent:].contiguous() if rope else None,
        key_rope=key_rope if rope else None,
        layout_query=layout_query,
        layout_kv=layout_kv,
        sparse_mode=sparse_mode,
    )


def fused_inputs(
    lengths: list[int],
    S1: int,
    *,
    hidden: int = 48,
    q_rank: int = 24,
    heads: int = 3,
    nope: int = 16,
    latent: int = 32,
    rope: int = 16,
    index_heads: int = 4,
    index_dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    strided: bool = False,
    seed: int = 0,
    **keywords,
) -> dict:
    """Arguments of ``npu_sparse_attention_pto``.

    The last ``S1`` of each sequence's ``lengths`` tokens are new, the caches hold the ones before;
    where a sequence is shorter than ``S1``, its first tokens are padding.
    """
    g = torch.Generator().manual_seed(seed)
    batch = len(lengths)

    def normal(*shape: int) -> Tensor:
        return random(shape, dtype, g)

    def weight(inputs: int, *outputs: int) -> Tensor:
        return (torch.randn(inputs, *outputs, generator=g) * inputs**-0.5).to(dtype)

    table, blocks = block_tables(lengths, block_size, g)
    position = int32(lengths)[:, None] - S1 + torch.arange(S1)
    cache_index = torch.full((batch, S1), -1)
    caches = torch.full((blocks, block_size, 1, latent + rope + index_dim), torch.nan, dtype=dtype)
    flat = caches.view(-1, caches.size(-1))
    for b, n in enumerate(lengths):
        slot = slots(table[b], n, block_size)
        cache_index[b, max(S1 - n, 0) :] = slot[max(n - S1, 0) :]
        flat[slot[: max(n - S1, 0)]] = normal(max(n - S1, 0), caches.size(-1))
    caches = caches.split([latent, rope, index_dim], -1)  # one row, as engines keep them
    if not strided:
        caches = [c.contiguous() for c in caches]
    kv_cache, kr_cache, index_k_cache = caches

    frequency = 10000.0 ** (-torch.arange(0, rope, 2) / rope)
    angle = (position[..., None] * frequency).repeat(1, 1, 2)
    return dict(
        x=normal(batch, S1, hidden),
        w_dq=weight(hidden, q_rank),
        w_uq_qr=weight(q_rank, heads * (nope + rope)),
        w_uk=(torch.randn(heads, nope, latent, generator=g) * nope**-0.5).to(dtype),
        w_dkv_kr=weight(hidden, latent + rope),
        gamma_cq=1 + normal(q_rank) / 8,
        gamma_ckv=1 + normal(latent) / 8,
        sin=angle.sin().to(dtype),
        cos=angle.cos().to(dtype),
        cache_index=cache_index.int(),
        kv_cache=kv_cache,
        kr_cache=kr_cache,
        block_table=table,
        act_seqs=int32(lengths),
        w_idx_qb=weight(q_rank, index_heads * index_dim),
        w_idx_k=weight(hidden, index_dim),
        w_idx_proj=weight(hidden, index_heads),
        in_gamma_k=1 + normal(index_dim) / 8,
        in_beta_k=normal(index_dim) / 8,
        index_k_cache=index_k_cache,
        **keywords,
    )


def add_inputs(
    lengths_query: list[int],
    lengths_key: list[int],
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> dict:
    """Arguments of ``add_custom``: a row for each query token."""
    g = torch.Generator().manual_seed(seed)
    shape = (sum(lengths_query), max(lengths_key))
    return dict(self=random(shape, dtype, g), other=random(shape, dtype, g))


# the maker of each op's arguments, and the sizes that an NPU takes
MAKERS = {
    "add_custom": (add_inputs, {}),
    "npu_lightning_indexer_pto": (indexer_inputs, dict(dim=128)),
    "npu_sparse_flash_attention_pto": (attention_inputs, {}),
    "npu_sparse_attention_pto": (
        lambda lengths_query, lengths_key, **keywords: fused_inputs(
            lengths_key, max(lengths_query), **keywords
        ),
        dict(hidden=64, q_rank=32, index_dim=128, sparse_count=8),
    ),
}


def inputs_of(
    op: str,
    lengths_query: tuple[int, ...] = (2,),
    lengths_key: tuple[int, ...] = (20,),
    *,
    on_npu: bool = False,
    **keywords,
) -> dict:
    """Arguments of any op, for tests of what all ops have in common."""
    maker, sizes = MAKERS[op]
    return maker([*lengths_query], [*lengths_key], **(sizes if on_npu else {}) | keywords)


def of_angles_and_slots(x: dict) -> dict:
    """Arguments of the fused op with angles in float32 and slots in int64."""
    return x | dict(sin=x["sin"].float(), cos=x["cos"].float(), cache_index=x["cache_index"].long())


HALF = dict(dtype=torch.float16, on_npu=True)
# of each op: every attribute that an NPU takes another value of has one, every input is given
NOT_DEFAULT = {
    "add_custom": lambda: inputs_of("add_custom", (3,), (5,)),
    "npu_lightning_indexer_pto": lambda: inputs_of(
        "npu_lightning_indexer_pto",
        (2, 3),
        (20, 30),
        weights_dtype=torch.float32,
        layout_query="TND",
        sparse_count=4,
        sparse_mode=0,
        **HALF,
    ),
    "npu_sparse_flash_attention_pto": lambda: inputs_of(
        "npu_sparse_flash_attention_pto",
        (4, 3),
        (5, 4),
        layout_query="TND",
        sparse_mode=0,
        own_value=True,
        **HALF,
    ),
    # the sizes make gammas and caches of one shape
    "npu_sparse_attention_pto": lambda: of_angles_and_slots(
        inputs_of(
            "npu_sparse_attention_pto",
            (2, 2),
            (20, 30),
            hidden=48,
            rope=32,
            softmax_scale=0.4,
            eps=0.5,
            sparse_count=4,
            **HALF,
        )
    ),
}


def copied(inputs: dict) -> dict:
    """The same values and strides in memory of their own."""

    def copy(x):
        if not isinstance(x, Tensor):
            return x
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype).copy_(x)

    return {name: copy(x) for name, x in inputs.items()}


def without_nan(inputs: dict) -> dict:
    """The same with 1 for each NaN."""

    def clean(x):
        return x.nan_to_num(1) if isinstance(x, Tensor) and x.is_floating_point() else x

    return {name: clean(x) for name, x in inputs.items()}


def on_meta(inputs: dict) -> dict:
    """The same shapes, strides and dtypes without data."""

    def meta(x):
        if not isinstance(x, Tensor):
            return x
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")

    return {name: meta(x) for name, x in inputs.items()}


def refusal(op: Callable, inputs: dict) -> str:
    """The message of the error with which ``op`` refuses ``inputs``: the same on CPU and Meta."""
    messages = []
    for given in (inputs, on_meta(inputs)):
        with pytest.raises(RuntimeError) as refused:
            op(**given)
        messages.append(str(refused.value))
    assert messages[0] == messages[1], "CPU and Meta refuse in different words"
    return messages[0]
