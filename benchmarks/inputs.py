"""Calls with the sizes of DeepSeek-V3.2, of the inputs that the tests make, without padding, and
their comparison with the reference, without which nothing is timed."""

from collections.abc import Callable
from typing import Any

import torch
from cases import of

import custom_pypto
from custom_pypto import reference

BLOCK, K, D, L, R, INDEX_HEADS = 128, 2048, 128, 512, 64, 64
SCALE = 192**-0.5
INDEXER = dict(heads=INDEX_HEADS, dim=D, block_size=BLOCK, sparse_count=K)
ATTENTION = dict(heads=128, latent=L, rope=R, block_size=BLOCK, sparse_count=K)
SIZES = {
    "npu_lightning_indexer_pto": INDEXER | dict(weights_dtype=torch.float32),
    "npu_quant_lightning_indexer_pto": INDEXER,
    "npu_sparse_flash_attention_pto": ATTENTION,
    "npu_kv_quant_sparse_flash_attention_pto": ATTENTION,
    "npu_sparse_attention_pto": dict(
        hidden=7168,
        q_rank=1536,
        heads=128,
        nope=128,
        latent=L,
        rope=R,
        index_heads=INDEX_HEADS,
        index_dim=D,
        block_size=BLOCK,
        sparse_count=K,
    ),
}
OF_TOKENS = ("query", "query_rope", "weights", "query_dequant_scale", "sparse_indices")
OF_KEYS = ("key", "key_rope")


def as_loaded(x: torch.Tensor, beside: int = 0) -> torch.Tensor:
    """A copy in the memory that the models give weights and caches."""
    from custom_pypto.models.memory import empty  # needs transformers, the NPU's inputs do not

    return empty(x.shape, x.dtype, beside=beside).copy_(x)


def call(op: str, S1: int, lengths: list[int], dtype: torch.dtype, **sizes) -> dict:
    """A call of ``S1`` tokens of each sequence, whose key ``lengths`` may differ."""
    x = of(op).inputs([S1] * len(lengths), lengths, dtype=dtype, **SIZES[op] | sizes)
    if x["block_table"] is None:
        x |= first(x, OF_KEYS, max(lengths))
    else:  # NPU kernels choose tiles by its width
        x["block_table"] = x["block_table"][:, :-1].contiguous()
    if "scale_value" in x:
        x["scale_value"] = SCALE
    return x | first(x, OF_TOKENS, S1) | dict(actual_seq_lengths_query=None)


def first(x: dict, names: tuple[str, ...], count: int) -> dict:
    """The first tokens or keys of each sequence, without what pads them."""
    return {name: x[name][:, :count].contiguous() for name in names if x.get(name) is not None}


def in_a_cache(x: dict) -> dict:
    return x | {name: as_loaded(x[name]) for name in OF_KEYS if x.get(name) is not None}


def indexer(S1: int, S2: int, dtype: torch.dtype = torch.bfloat16, **sizes) -> dict:
    return in_a_cache(call("npu_lightning_indexer_pto", S1, [S2], dtype, **sizes))


def attention(S1: int, N1: int, S2: int, dtype: torch.dtype = torch.bfloat16, **sizes) -> dict:
    return in_a_cache(call("npu_sparse_flash_attention_pto", S1, [S2], dtype, heads=N1, **sizes))


def gathering(rows: list[torch.Tensor], selections: list[torch.Tensor]) -> Callable[[], None]:
    """What reads the rows of each of the selections, which are of one length, by torch."""
    outs = [row.new_empty(len(selections[0]), row.size(1)) for row in rows]

    def read() -> None:
        for selected in selections:
            for row, out in zip(rows, outs, strict=True):
                torch.index_select(row, 0, selected, out=out)

    return read


def last_token(x: dict) -> dict:
    """The same call of the last token, which sees the same keys alone."""
    return x | {name: x[name][:, -1:] for name in OF_TOKENS if x.get(name) is not None}


def compare(op: str, call: dict, got: Any = None) -> None:
    """Compares a result, by default that of ``call``, with the reference's.

    Raises:
        SystemExit: its error is larger than rounding allows.
    """
    got = getattr(custom_pypto, op)(**call) if got is None else got
    error, bound = reference.MODULES[op].error(got, getattr(reference, op)(**call), call, call)
    if not error <= bound:
        raise SystemExit(f"{op}: error {error:.1e}, allowed {bound:.1e}; not timed")
