"""Every rule of the ops, broken one at a time: the exact words, the same from CPU and Meta, and
nothing written."""

from collections.abc import Callable, Iterable

import pytest
import torch
from cases import copied, int32, not_default, refusal
from cases.npu_lightning_indexer_pto import inputs as indexer_inputs
from cases.npu_sparse_attention_pto import CACHES, fused_inputs
from cases.npu_sparse_flash_attention_pto import inputs as attention_inputs
from torch import Tensor

import custom_pypto
from custom_pypto.descriptions import OPS

SUM = dict(self=torch.zeros(4, 5), other=torch.zeros(4, 5))
INDEX_PA = indexer_inputs([3, 2], [40, 33])
INDEX_BSND = indexer_inputs([3, 2], [40, 33], layout_key="BSND")
INDEX_TND = indexer_inputs([3, 2], [40, 33], layout_query="TND", layout_key="TND")
INDEX_TND_PA = indexer_inputs([3, 2], [40, 33], layout_query="TND")
ATTEND_PA = attention_inputs([3, 2], [40, 33])
ATTEND_BSND = attention_inputs([3, 2], [40, 33], layout_kv="BSND")
ATTEND_TND = attention_inputs([3, 2], [40, 33], layout_query="TND", layout_kv="TND")
ATTEND_TND_PA = attention_inputs([3, 2], [40, 33], layout_query="TND")
FUSED = fused_inputs([40, 33], 3, sparse_count=8)


def add(id: str, message: str, **change):
    return pytest.param("add_custom", SUM | change, message, id=f"add-{id}")


def index(id: str, inputs: dict, message: str, **change):
    return pytest.param("npu_lightning_indexer_pto", inputs | change, message, id=f"index-{id}")


def attend(id: str, inputs: dict, message: str, **change):
    op = "npu_sparse_flash_attention_pto"
    return pytest.param(op, inputs | change, message, id=f"attend-{id}")


def fuse(id: str, message: str, **change):
    return pytest.param("npu_sparse_attention_pto", FUSED | change, message, id=f"fused-{id}")


def each(inputs: dict, names: Iterable[str], change: Callable[[Tensor], Tensor]) -> dict:
    return {name: change(inputs[name]) for name in names}


def tensors(inputs: dict) -> list[str]:
    return [name for name, x in inputs.items() if isinstance(x, Tensor)]


FLOATING = [name for name in tensors(FUSED) if FUSED[name].is_floating_point()]


def grown(name: str, dim: int) -> Tensor:
    size = list(FUSED[name].shape)
    size[dim] += 16
    return FUSED[name].new_zeros(size)


def transposed(x: Tensor) -> Tensor:
    """Of the same shape, but its rows are not dense."""
    return x.transpose(1, 3).contiguous().transpose(1, 3)


# what follows where a tensor has as many dims as the other layout has
NEEDS_TND = (
    "; [T1, N1, D] needs layout_query 'TND', {} 'PA_BSND' or 'TND', and actual_seq_lengths_query: "
    "int32 inclusive prefix sums of query tokens [B]"
)
NEEDS_BSND = (
    "; [B, S1, N1, D] needs layout_query 'BSND', {} 'PA_BSND' or 'BSND', and "
    "actual_seq_lengths_query None or int32 query tokens of each sequence [B]"
)
KEYS_NEED_TND = (
    "; [T2, 1, D] needs layout_query and {} 'TND', and int32 inclusive prefix sums [B] in "
    "actual_seq_lengths_query and {}"
)
KEYS_NEED_FOUR_DIMS = (
    "; [blocks, block_size, 1, D] needs {0} 'PA_BSND' and block_table; [B, S2, 1, D] needs "
    "layout_query and {0} 'BSND'"
)
NEEDS_HEAD_DIM = "; [blocks, block_size, D] needs its head dim: key.unsqueeze(2)"


def layouts(row, layout: str, lengths: str, paged: dict, bsnd: dict, tnd: dict, tnd_paged: dict):
    """Tensors in the layout that is not named, of one op."""
    query, key = paged["query"], paged["key"]
    keys_need_tnd = KEYS_NEED_TND.format(layout, lengths)
    return [
        *(
            row(
                f"TND-query-named-BSND-{name}-keys",
                inputs,
                "query must be of shape [B, S1, N1, D] (layout_query 'BSND'), got [8, 4, 32]"
                + NEEDS_TND.format(layout),
                query=query.flatten(0, 1),
            )
            for name, inputs in (("PA_BSND", paged), ("BSND", bsnd))
        ),
        *(
            row(
                f"BSND-query-named-TND-{name}-keys",
                inputs,
                "query must be of shape [T1, N1, D] (layout_query 'TND'), got [2, 4, 4, 32]"
                + NEEDS_BSND.format(layout),
                query=query,
            )
            for name, inputs in (("PA_BSND", tnd_paged), ("TND", tnd))
        ),
        row(
            "query-of-2-dims",
            paged,
            "query must be of shape [B, S1, N1, D] (layout_query 'BSND'), got [32, 32]",
            query=query.flatten(0, 2),
        ),
        *(
            row(
                f"cache-without-head-dim-{name}-query",
                inputs,
                "key must be of shape [blocks, block_size, 1, D] (paged), got [8, 16, 32]"
                + NEEDS_HEAD_DIM
                + keys_need_tnd,
                key=key[:, :, 0],
            )
            for name, inputs in (("BSND", paged), ("TND", tnd_paged))
        ),
        row(
            "TND-keys-named-BSND",
            bsnd,
            "key must be of shape [B, S2, 1, D] (BSND), got [75, 1, 32]" + keys_need_tnd,
            key=tnd["key"],
        ),
        row(
            "PA_BSND-keys-named-TND",
            tnd,
            "key must be of shape [T2, 1, D] (TND), got [8, 16, 1, 32]"
            + KEYS_NEED_FOUR_DIMS.format(layout),
            key=key,
        ),
        row(
            "key-of-2-dims",
            tnd,
            "key must be of shape [T2, 1, D] (TND), got [75, 32]",
            key=tnd["key"][:, 0],
        ),
    ]


ADDITION = [
    add(
        "shape",
        "other must be of shape [4, 5] (that of self; no broadcast), got [4, 4]",
        other=torch.zeros(4, 4),
    ),
    add(
        "broadcast",
        "other must be of shape [4, 5] (that of self; no broadcast), got [5]",
        other=torch.zeros(5),
    ),
    add(
        "scalar",
        "other must be of shape [4, 5] (that of self; no broadcast), got []",
        other=torch.zeros(()),
    ),
    add(
        "dtype",
        "other.dtype must be float32 (dtype of self), got float64",
        other=torch.zeros(4, 5).double(),
    ),
    add(
        "integers",
        "self.dtype must be bfloat16, float16, float32 or float64, got int32",
        **each(SUM, SUM, Tensor.int),
    ),
    add(
        "complex",
        "self.dtype must be bfloat16, float16, float32 or float64, got complex64",
        **each(SUM, SUM, lambda x: x.to(torch.complex64)),
    ),
    add(
        "float8",
        "self.dtype must be bfloat16, float16, float32 or float64, got float8_e4m3fn",
        **each(SUM, SUM, lambda x: x.to(torch.float8_e4m3fn)),
    ),
]

INDEXER = [
    index(
        "layout_query",
        INDEX_PA,
        "layout_query must be 'BSND' or 'TND', got 'BNSD'",
        layout_query="BNSD",
    ),
    index(
        "layout_query-paged",
        INDEX_PA,
        "layout_query must be 'BSND' or 'TND', got 'PA_BSND'",
        layout_query="PA_BSND",
    ),
    index(
        "layout_key",
        INDEX_PA,
        "layout_key must be 'PA_BSND' or 'BSND' (layout_query), got 'SBND'",
        layout_key="SBND",
    ),
    index(
        "TND-keys-BSND-query",
        INDEX_TND,
        "layout_key must be 'PA_BSND' or 'BSND' (layout_query), got 'TND'",
        layout_query="BSND",
    ),
    index(
        "BSND-keys-TND-query",
        INDEX_TND,
        "layout_key must be 'PA_BSND' or 'TND' (layout_query), got 'BSND'",
        layout_key="BSND",
    ),
    index(
        "query-dtype",
        INDEX_PA,
        "query.dtype must be bfloat16, float16 or float32, got int32",
        query=INDEX_PA["query"].int(),
    ),
    index(
        "query-float64",
        INDEX_PA,
        "query.dtype must be bfloat16, float16 or float32, got float64",
        query=INDEX_PA["query"].double(),
    ),
    index(
        "no-heads",
        INDEX_PA,
        "query.size(2) must be at least 1 (N1), got 0",
        query=INDEX_PA["query"][:, :, :0],
        weights=INDEX_PA["weights"][..., :0],
    ),
    index(
        "D-not-16s",
        INDEX_PA,
        "query.size(3) must be a positive multiple of 16, got 24",
        query=INDEX_PA["query"][..., :24],
        key=INDEX_PA["key"][..., :24],
    ),
    index(
        "D-0",
        INDEX_PA,
        "query.size(3) must be a positive multiple of 16, got 0",
        query=INDEX_PA["query"][..., :0],
        key=INDEX_PA["key"][..., :0],
    ),
    index(
        "D-not-16s-TND",
        INDEX_TND,
        "query.size(2) must be a positive multiple of 16, got 24",
        query=INDEX_TND["query"][..., :24],
        key=INDEX_TND["key"][..., :24],
    ),
    index(
        "key-dtype",
        INDEX_PA,
        "key.dtype must be float32 (dtype of query), got bfloat16",
        key=INDEX_PA["key"].bfloat16(),
    ),
    index(
        "two-key-heads",
        INDEX_PA,
        "key.size(2) must be 1 (N2: one key head), got 2",
        key=INDEX_PA["key"].repeat(1, 1, 2, 1),
    ),
    index(
        "two-key-heads-TND",
        INDEX_TND,
        "key.size(1) must be 1 (N2: one key head), got 2",
        key=INDEX_TND["key"].repeat(1, 2, 1),
    ),
    index(
        "key-D",
        INDEX_PA,
        "key.size(3) must be 32 (D of query), got 16",
        key=INDEX_PA["key"][..., :16],
    ),
    index(
        "key-D-TND",
        INDEX_TND,
        "key.size(2) must be 32 (D of query), got 16",
        key=INDEX_TND["key"][..., :16],
    ),
    index(
        "key-last-stride",
        INDEX_PA,
        "key.stride(-1) must be 1 (rows are read as they lie; call .contiguous()), got 16",
        key=transposed(INDEX_PA["key"]),
    ),
    index(
        "block-size-24",
        INDEX_PA,
        "key.size(1) must be a multiple of 16 up to 1024 (block_size), got 24",
        key=torch.zeros(9, 24, 1, 32),
    ),
    index(
        "block-size-0",
        INDEX_PA,
        "key.size(1) must be a multiple of 16 up to 1024 (block_size), got 0",
        key=torch.zeros(9, 0, 1, 32),
    ),
    index(
        "block-size-1040",
        INDEX_PA,
        "key.size(1) must be a multiple of 16 up to 1024 (block_size), got 1040",
        key=torch.zeros(9, 1040, 1, 32),
    ),
    index(
        "key-batch",
        INDEX_BSND,
        "key.size(0) must be 2 (B of query), got 1",
        key=INDEX_BSND["key"][:1],
    ),
    index(
        "weights-rank",
        INDEX_PA,
        "weights must be of shape [B, S1, N1], got [2, 4, 4, 1]",
        weights=INDEX_PA["weights"][..., None],
    ),
    index(
        "weights-dtype",
        INDEX_PA,
        "weights.dtype must be float32 (dtype of query), got float16",
        weights=INDEX_PA["weights"].half(),
    ),
    index(
        "weights-float64",
        INDEX_PA,
        "weights.dtype must be float32 (dtype of query), got float64",
        weights=INDEX_PA["weights"].double(),
    ),
    index(
        "weights-dtype-of-bfloat16-query",
        INDEX_PA,
        "weights.dtype must be bfloat16 (dtype of query) or float32, got float16",
        **each(INDEX_PA, ["query", "key"], Tensor.bfloat16),
        weights=INDEX_PA["weights"].half(),
    ),
    index(
        "weights-batch",
        INDEX_PA,
        "weights.size(0) must be 2 (shape of query without D), got 1",
        weights=INDEX_PA["weights"][:1],
    ),
    index(
        "weights-tokens",
        INDEX_PA,
        "weights.size(1) must be 4 (shape of query without D), got 3",
        weights=INDEX_PA["weights"][:, :3],
    ),
    index(
        "weights-heads",
        INDEX_PA,
        "weights.size(2) must be 4 (shape of query without D), got 3",
        weights=INDEX_PA["weights"][..., :3],
    ),
    index(
        "weights-tokens-TND",
        INDEX_TND,
        "weights.size(0) must be 6 (shape of query without D), got 5",
        weights=INDEX_TND["weights"][:5],
    ),
    index(
        "weights-heads-TND",
        INDEX_TND,
        "weights.size(1) must be 4 (shape of query without D), got 3",
        weights=INDEX_TND["weights"][:, :3],
    ),
    index(
        "no-lengths-key",
        INDEX_PA,
        "actual_seq_lengths_key must be given: int32 keys of each sequence [B], for a "
        "paged cache, got None",
        actual_seq_lengths_key=None,
    ),
    index(
        "lengths-key-dtype",
        INDEX_PA,
        "actual_seq_lengths_key.dtype must be int32 (keys of each sequence [B], for a "
        "paged cache), got int64",
        actual_seq_lengths_key=torch.tensor([40, 33]),
    ),
    index(
        "lengths-key-rank",
        INDEX_PA,
        "actual_seq_lengths_key must be of shape [B], got [1, 2]",
        actual_seq_lengths_key=int32([[40, 33]]),
    ),
    index(
        "lengths-key-batch",
        INDEX_PA,
        "actual_seq_lengths_key.size(0) must be 2 (B), got 3",
        actual_seq_lengths_key=int32([40, 33, 1]),
    ),
    index(
        "lengths-key-batch-BSND",
        INDEX_BSND,
        "actual_seq_lengths_key.size(0) must be 2 (B), got 1",
        actual_seq_lengths_key=int32([40]),
    ),
    index(
        "lengths-key-batch-TND",
        INDEX_TND,
        "actual_seq_lengths_key.size(0) must be 2 (B), got 1",
        actual_seq_lengths_key=int32([40]),
    ),
    index(
        "no-lengths-key-TND",
        INDEX_TND,
        "actual_seq_lengths_key must be given: int32 inclusive prefix sums of keys [B], "
        "for 'TND', got None",
        actual_seq_lengths_key=None,
    ),
    index(
        "no-lengths-query-TND",
        INDEX_TND_PA,
        "actual_seq_lengths_query must be given: int32 inclusive prefix sums of query "
        "tokens [B], for 'TND', got None",
        actual_seq_lengths_query=None,
    ),
    index(
        "lengths-query-dtype",
        INDEX_PA,
        "actual_seq_lengths_query.dtype must be int32 (query tokens of each sequence "
        "[B]), got int64",
        actual_seq_lengths_query=torch.tensor([3, 2]),
    ),
    index(
        "lengths-query-rank",
        INDEX_PA,
        "actual_seq_lengths_query must be of shape [B], got []",
        actual_seq_lengths_query=int32(3),
    ),
    index(
        "lengths-query-batch",
        INDEX_PA,
        "actual_seq_lengths_query.size(0) must be 2 (B), got 1",
        actual_seq_lengths_query=int32([3]),
    ),
    index(
        "no-block-table",
        INDEX_PA,
        "block_table must be given: int32 [B, blocks of a sequence], for a paged cache, got None",
        block_table=None,
    ),
    index(
        "block-table-dtype",
        INDEX_PA,
        "block_table.dtype must be int32 (block ids), got int64",
        block_table=INDEX_PA["block_table"].long(),
    ),
    index(
        "block-table-rank",
        INDEX_PA,
        "block_table must be of shape [B, blocks of a sequence], got [4]",
        block_table=INDEX_PA["block_table"][0],
    ),
    index(
        "block-table-batch",
        INDEX_PA,
        "block_table.size(0) must be 2 (B), got 1",
        block_table=INDEX_PA["block_table"][:1],
    ),
    index(
        "block-table-batch-TND",
        INDEX_TND_PA,
        "block_table.size(0) must be 2 (B), got 1",
        block_table=INDEX_PA["block_table"][:1],
    ),
    index(
        "block-table-BSND",
        INDEX_BSND,
        "block_table must be None (layout_key is 'BSND', not 'PA_BSND'), got a tensor",
        block_table=INDEX_PA["block_table"],
    ),
    index(
        "block-table-TND",
        INDEX_TND,
        "block_table must be None (layout_key is 'TND', not 'PA_BSND'), got a tensor",
        block_table=INDEX_PA["block_table"],
    ),
]

ATTENTION = [
    attend(
        "layout_query",
        ATTEND_PA,
        "layout_query must be 'BSND' or 'TND', got 'BNSD'",
        layout_query="BNSD",
    ),
    attend(
        "layout_kv",
        ATTEND_PA,
        "layout_kv must be 'PA_BSND' or 'BSND' (layout_query), got 'SBND'",
        layout_kv="SBND",
    ),
    attend(
        "TND-keys-BSND-query",
        ATTEND_TND,
        "layout_kv must be 'PA_BSND' or 'BSND' (layout_query), got 'TND'",
        layout_query="BSND",
    ),
    attend(
        "BSND-keys-TND-query",
        ATTEND_TND,
        "layout_kv must be 'PA_BSND' or 'TND' (layout_query), got 'BSND'",
        layout_kv="BSND",
    ),
    attend(
        "query-dtype",
        ATTEND_PA,
        "query.dtype must be bfloat16, float16 or float32, got int32",
        query=ATTEND_PA["query"].int(),
    ),
    attend(
        "query-float64",
        ATTEND_PA,
        "query.dtype must be bfloat16, float16 or float32, got float64",
        query=ATTEND_PA["query"].double(),
    ),
    attend(
        "no-heads",
        ATTEND_PA,
        "query.size(2) must be at least 1 (N1), got 0",
        **each(ATTEND_PA, ["query", "query_rope"], lambda t: t[:, :, :0]),
    ),
    attend(
        "L-not-16s",
        ATTEND_PA,
        "query.size(3) must be a positive multiple of 16, got 24",
        **each(ATTEND_PA, ["query", "key"], lambda t: t[..., :24]),
    ),
    attend(
        "key-dtype",
        ATTEND_PA,
        "key.dtype must be float32 (dtype of query), got bfloat16",
        key=ATTEND_PA["key"].bfloat16(),
    ),
    attend(
        "two-key-heads",
        ATTEND_PA,
        "key.size(2) must be 1 (N2: one key head), got 2",
        key=ATTEND_PA["key"].repeat(1, 1, 2, 1),
    ),
    attend(
        "two-key-heads-TND",
        ATTEND_TND,
        "key.size(1) must be 1 (N2: one key head), got 2",
        key=ATTEND_TND["key"].repeat(1, 2, 1),
    ),
    attend(
        "key-L",
        ATTEND_PA,
        "key.size(3) must be 32 (L of query), got 16",
        key=ATTEND_PA["key"][..., :16],
    ),
    attend(
        "key-last-stride",
        ATTEND_PA,
        "key.stride(-1) must be 1 (rows are read as they lie; call .contiguous()), got 16",
        key=transposed(ATTEND_PA["key"]),
    ),
    attend(
        "block-size-24",
        ATTEND_PA,
        "key.size(1) must be a multiple of 16 up to 1024 (block_size), got 24",
        key=torch.zeros(9, 24, 1, 32),
    ),
    attend(
        "block-size-0",
        ATTEND_PA,
        "key.size(1) must be a multiple of 16 up to 1024 (block_size), got 0",
        key=torch.zeros(9, 0, 1, 32),
    ),
    attend(
        "block-size-1040",
        ATTEND_PA,
        "key.size(1) must be a multiple of 16 up to 1024 (block_size), got 1040",
        key=torch.zeros(9, 1040, 1, 32),
    ),
    attend(
        "key-batch",
        ATTEND_BSND,
        "key.size(0) must be 2 (B of query), got 1",
        key=ATTEND_BSND["key"][:1],
    ),
    attend(
        "value-rank",
        ATTEND_PA,
        "value must be of shape as key, got [16, 1, 32]",
        value=ATTEND_PA["key"][0],
    ),
    attend(
        "value-L",
        ATTEND_PA,
        "value.size(3) must be 32 (as key), got 16",
        value=ATTEND_PA["key"][..., :16],
    ),
    attend(
        "value-blocks",
        ATTEND_PA,
        "value.size(0) must be 8 (as key), got 2",
        value=ATTEND_PA["key"][:2],
    ),
    attend(
        "value-dtype",
        ATTEND_PA,
        "value.dtype must be float32 (as key), got float16",
        value=ATTEND_PA["key"].half(),
    ),
    attend(
        "value-last-stride",
        ATTEND_PA,
        "value.stride(-1) must be 1 (rows are read as they lie; call .contiguous()), got 16",
        value=transposed(ATTEND_PA["key"]),
    ),
    attend(
        "indices-rank",
        ATTEND_PA,
        "sparse_indices must be of shape [B, S1, 1, K], got [4, 1, 8]",
        sparse_indices=ATTEND_PA["sparse_indices"][0],
    ),
    attend(
        "indices-dtype",
        ATTEND_PA,
        "sparse_indices.dtype must be int32 (positions), got int64",
        sparse_indices=ATTEND_PA["sparse_indices"].long(),
    ),
    attend(
        "indices-batch",
        ATTEND_PA,
        "sparse_indices.size(0) must be 2 (as query), got 1",
        sparse_indices=ATTEND_PA["sparse_indices"][:1],
    ),
    attend(
        "indices-tokens",
        ATTEND_PA,
        "sparse_indices.size(1) must be 4 (as query), got 2",
        sparse_indices=ATTEND_PA["sparse_indices"][:, :2],
    ),
    attend(
        "indices-heads",
        ATTEND_PA,
        "sparse_indices.size(2) must be 1 (N2: one key head), got 2",
        sparse_indices=ATTEND_PA["sparse_indices"].repeat(1, 1, 2, 1),
    ),
    attend(
        "indices-tokens-TND",
        ATTEND_TND,
        "sparse_indices.size(0) must be 6 (as query), got 5",
        sparse_indices=ATTEND_TND["sparse_indices"][:5],
    ),
    attend(
        "indices-heads-TND",
        ATTEND_TND,
        "sparse_indices.size(1) must be 1 (N2: one key head), got 2",
        sparse_indices=ATTEND_TND["sparse_indices"].repeat(1, 2, 1),
    ),
    attend(
        "query_rope-alone",
        ATTEND_PA,
        "key_rope must be given, as query_rope is, got None",
        key_rope=None,
    ),
    attend(
        "key_rope-alone",
        ATTEND_PA,
        "key_rope must be None, as query_rope is, got a tensor",
        query_rope=None,
    ),
    attend(
        "query_rope-rank",
        ATTEND_PA,
        "query_rope must be of shape as query, but for R, got [4, 4, 16]",
        query_rope=ATTEND_PA["query_rope"][0],
    ),
    attend(
        "query_rope-heads",
        ATTEND_PA,
        "query_rope.size(2) must be 4 (as query, but for R), got 3",
        query_rope=ATTEND_PA["query_rope"][:, :, :3],
    ),
    attend(
        "query_rope-tokens",
        ATTEND_PA,
        "query_rope.size(1) must be 4 (as query, but for R), got 2",
        query_rope=ATTEND_PA["query_rope"][:, :2],
    ),
    attend(
        "query_rope-dtype",
        ATTEND_PA,
        "query_rope.dtype must be float32 (as query, but for R), got float16",
        query_rope=ATTEND_PA["query_rope"].half(),
    ),
    attend(
        "R-not-16s",
        ATTEND_PA,
        "query_rope.size(3) must be a positive multiple of 16, got 8",
        **each(ATTEND_PA, ["query_rope", "key_rope"], lambda t: t[..., :8]),
    ),
    attend(
        "key_rope-R",
        ATTEND_PA,
        "key_rope.size(3) must be 16 (R of query_rope), got 32",
        key_rope=ATTEND_PA["key_rope"].repeat(1, 1, 1, 2),
    ),
    attend(
        "key_rope-rank",
        ATTEND_PA,
        "key_rope must be of shape as key, but for R, got [16, 1, 16]",
        key_rope=ATTEND_PA["key_rope"][0],
    ),
    attend(
        "key_rope-blocks",
        ATTEND_PA,
        "key_rope.size(0) must be 8 (as key, but for R), got 2",
        key_rope=ATTEND_PA["key_rope"][:2],
    ),
    attend(
        "key_rope-heads",
        ATTEND_PA,
        "key_rope.size(2) must be 1 (as key, but for R), got 2",
        key_rope=ATTEND_PA["key_rope"].repeat(1, 1, 2, 1),
    ),
    attend(
        "key_rope-dtype",
        ATTEND_PA,
        "key_rope.dtype must be float32 (as key, but for R), got float16",
        key_rope=ATTEND_PA["key_rope"].half(),
    ),
    attend(
        "key_rope-last-stride",
        ATTEND_PA,
        "key_rope.stride(-1) must be 1 (rows are read as they lie; call .contiguous()), got 16",
        key_rope=transposed(ATTEND_PA["key_rope"]),
    ),
    attend(
        "no-lengths-kv",
        ATTEND_PA,
        "actual_seq_lengths_kv must be given: int32 keys of each sequence [B], for a paged "
        "cache, got None",
        actual_seq_lengths_kv=None,
    ),
    attend(
        "lengths-kv-dtype",
        ATTEND_PA,
        "actual_seq_lengths_kv.dtype must be int32 (keys of each sequence [B], for a "
        "paged cache), got int64",
        actual_seq_lengths_kv=torch.tensor([40, 33]),
    ),
    attend(
        "lengths-kv-rank",
        ATTEND_PA,
        "actual_seq_lengths_kv must be of shape [B], got [1, 2]",
        actual_seq_lengths_kv=int32([[40, 33]]),
    ),
    attend(
        "lengths-kv-batch",
        ATTEND_PA,
        "actual_seq_lengths_kv.size(0) must be 2 (B), got 3",
        actual_seq_lengths_kv=int32([40, 33, 1]),
    ),
    attend(
        "lengths-kv-batch-TND",
        ATTEND_TND,
        "actual_seq_lengths_kv.size(0) must be 2 (B), got 1",
        actual_seq_lengths_kv=int32([40]),
    ),
    attend(
        "no-lengths-kv-TND",
        ATTEND_TND,
        "actual_seq_lengths_kv must be given: int32 inclusive prefix sums of keys [B], for "
        "'TND', got None",
        actual_seq_lengths_kv=None,
    ),
    attend(
        "no-lengths-query-TND",
        ATTEND_TND_PA,
        "actual_seq_lengths_query must be given: int32 inclusive prefix sums of query "
        "tokens [B], for 'TND', got None",
        actual_seq_lengths_query=None,
    ),
    attend(
        "lengths-query-dtype",
        ATTEND_PA,
        "actual_seq_lengths_query.dtype must be int32 (query tokens of each sequence "
        "[B]), got int64",
        actual_seq_lengths_query=torch.tensor([3, 2]),
    ),
    attend(
        "lengths-query-batch",
        ATTEND_PA,
        "actual_seq_lengths_query.size(0) must be 2 (B), got 1",
        actual_seq_lengths_query=int32([3]),
    ),
    attend(
        "no-block-table",
        ATTEND_PA,
        "block_table must be given: int32 [B, blocks of a sequence], for a paged cache, got None",
        block_table=None,
    ),
    attend(
        "block-table-dtype",
        ATTEND_PA,
        "block_table.dtype must be int32 (block ids), got int64",
        block_table=ATTEND_PA["block_table"].long(),
    ),
    attend(
        "block-table-rank",
        ATTEND_PA,
        "block_table must be of shape [B, blocks of a sequence], got [4]",
        block_table=ATTEND_PA["block_table"][0],
    ),
    attend(
        "block-table-batch",
        ATTEND_PA,
        "block_table.size(0) must be 2 (B), got 1",
        block_table=ATTEND_PA["block_table"][:1],
    ),
    attend(
        "block-table-batch-TND",
        ATTEND_TND_PA,
        "block_table.size(0) must be 2 (B), got 1",
        block_table=ATTEND_PA["block_table"][:1],
    ),
    attend(
        "block-table-BSND",
        ATTEND_BSND,
        "block_table must be None (layout_kv is 'BSND', not 'PA_BSND'), got a tensor",
        block_table=ATTEND_PA["block_table"],
    ),
    attend(
        "block-table-TND",
        ATTEND_TND,
        "block_table must be None (layout_kv is 'TND', not 'PA_BSND'), got a tensor",
        block_table=ATTEND_PA["block_table"],
    ),
]

LAYOUTS = [
    *layouts(
        index,
        "layout_key",
        "actual_seq_lengths_key",
        INDEX_PA,
        INDEX_BSND,
        INDEX_TND,
        INDEX_TND_PA,
    ),
    *layouts(
        attend,
        "layout_kv",
        "actual_seq_lengths_kv",
        ATTEND_PA,
        ATTEND_BSND,
        ATTEND_TND,
        ATTEND_TND_PA,
    ),
]

FUSED_ARGUMENTS = [
    fuse(
        "no-heads",
        "w_uk.size(0) must be at least 1 (N1), got 0",
        w_uk=FUSED["w_uk"][:0],
        w_uq_qr=FUSED["w_uq_qr"][:, :0],
    ),
    fuse(
        "no-index-heads",
        "w_idx_proj.size(1) must be at least 1 (index heads), got 0",
        w_idx_proj=FUSED["w_idx_proj"][:, :0],
        w_idx_qb=FUSED["w_idx_qb"][:, :0],
    ),
    fuse(
        "L-not-16s",
        "w_uk.size(2) must be a positive multiple of 16, got 24",
        w_uk=FUSED["w_uk"][..., :24],
        w_dkv_kr=FUSED["w_dkv_kr"][:, :40],
        gamma_ckv=FUSED["gamma_ckv"][:24],
    ),
    fuse(
        "R-not-16s",
        "kr_cache.size(3) must be a positive multiple of 16, got 8",
        kr_cache=FUSED["kr_cache"][..., :8],
        w_uq_qr=FUSED["w_uq_qr"][:, :72],
        w_dkv_kr=FUSED["w_dkv_kr"][:, :40],
    ),
    fuse(
        "D-not-16s",
        "w_idx_k.size(1) must be a positive multiple of 16, got 24",
        w_idx_qb=FUSED["w_idx_qb"][:, :96],
        **each(FUSED, ["w_idx_k", "in_gamma_k", "in_beta_k"], lambda x: x[..., :24]),
    ),
    fuse(
        "R-above-D",
        "kr_cache.size(3) must be at most 32 "
        "(the indexer rotates the first R of its D dims), got 48",
        kr_cache=torch.zeros(8, 16, 1, 48),
        w_uq_qr=torch.zeros(24, 192),
        w_dkv_kr=torch.zeros(48, 80),
    ),
    fuse(
        "slots-int16",
        "cache_index.dtype must be int32 or int64 (flat slots of the caches), got int16",
        cache_index=FUSED["cache_index"].short(),
    ),
    fuse("x.size(0)", "sin.size(0) must be 18 (B of x), got 2", x=grown("x", 0)),
    fuse("x.size(1)", "sin.size(1) must be 19 (S1 of x), got 3", x=grown("x", 1)),
    fuse("x.size(2)", "w_dq.size(0) must be 64 (H of x), got 48", x=grown("x", 2)),
    fuse("w_dq.size(0)", "w_dq.size(0) must be 48 (H of x), got 64", w_dq=grown("w_dq", 0)),
    fuse("w_dq.size(1)", "w_uq_qr.size(0) must be 40 (Q of w_dq), got 24", w_dq=grown("w_dq", 1)),
    fuse(
        "w_uq_qr.size(0)",
        "w_uq_qr.size(0) must be 24 (Q of w_dq), got 40",
        w_uq_qr=grown("w_uq_qr", 0),
    ),
    fuse(
        "w_uq_qr.size(1)",
        "w_uq_qr.size(1) must be 96 (N1 * (P + R) of w_uk and kr_cache), got 112",
        w_uq_qr=grown("w_uq_qr", 1),
    ),
    fuse(
        "w_uk.size(0)",
        "w_uq_qr.size(1) must be 608 (N1 * (P + R) of w_uk and kr_cache), got 96",
        w_uk=grown("w_uk", 0),
    ),
    fuse(
        "w_uk.size(1)",
        "w_uq_qr.size(1) must be 144 (N1 * (P + R) of w_uk and kr_cache), got 96",
        w_uk=grown("w_uk", 1),
    ),
    fuse(
        "w_uk.size(2)",
        "w_dkv_kr.size(1) must be 64 (L + R of w_uk and kr_cache), got 48",
        w_uk=grown("w_uk", 2),
    ),
    fuse(
        "w_dkv_kr.size(0)",
        "w_dkv_kr.size(0) must be 48 (H of x), got 64",
        w_dkv_kr=grown("w_dkv_kr", 0),
    ),
    fuse(
        "w_dkv_kr.size(1)",
        "w_dkv_kr.size(1) must be 48 (L + R of w_uk and kr_cache), got 64",
        w_dkv_kr=grown("w_dkv_kr", 1),
    ),
    fuse(
        "gamma_cq.size(0)",
        "gamma_cq.size(0) must be 24 (Q of w_dq), got 40",
        gamma_cq=grown("gamma_cq", 0),
    ),
    fuse(
        "gamma_ckv.size(0)",
        "gamma_ckv.size(0) must be 32 (L of w_uk), got 48",
        gamma_ckv=grown("gamma_ckv", 0),
    ),
    fuse("sin.size(0)", "sin.size(0) must be 2 (B of x), got 18", sin=grown("sin", 0)),
    fuse("sin.size(1)", "sin.size(1) must be 3 (S1 of x), got 19", sin=grown("sin", 1)),
    fuse("sin.size(2)", "sin.size(2) must be 16 (R of kr_cache), got 32", sin=grown("sin", 2)),
    fuse("cos.size(0)", "cos.size(0) must be 2 (B of x), got 18", cos=grown("cos", 0)),
    fuse("cos.size(1)", "cos.size(1) must be 3 (S1 of x), got 19", cos=grown("cos", 1)),
    fuse("cos.size(2)", "cos.size(2) must be 16 (R of kr_cache), got 32", cos=grown("cos", 2)),
    fuse(
        "cache_index.size(0)",
        "cache_index.size(0) must be 2 (B of x), got 18",
        cache_index=grown("cache_index", 0),
    ),
    fuse(
        "cache_index.size(1)",
        "cache_index.size(1) must be 3 (S1 of x), got 19",
        cache_index=grown("cache_index", 1),
    ),
    fuse(
        "kv_cache.size(0)",
        "kr_cache.size(0) must be 24 (blocks of kv_cache), got 8",
        kv_cache=grown("kv_cache", 0),
    ),
    fuse(
        "kv_cache.size(1)",
        "kr_cache.size(1) must be 32 (block_size of kv_cache), got 16",
        kv_cache=grown("kv_cache", 1),
    ),
    fuse(
        "kv_cache.size(2)",
        "kv_cache.size(2) must be 1 (N2: one key head), got 17",
        kv_cache=grown("kv_cache", 2),
    ),
    fuse(
        "kv_cache.size(3)",
        "kv_cache.size(3) must be 32 (L of w_uk), got 48",
        kv_cache=grown("kv_cache", 3),
    ),
    fuse(
        "kr_cache.size(0)",
        "kr_cache.size(0) must be 8 (blocks of kv_cache), got 24",
        kr_cache=grown("kr_cache", 0),
    ),
    fuse(
        "kr_cache.size(1)",
        "kr_cache.size(1) must be 16 (block_size of kv_cache), got 32",
        kr_cache=grown("kr_cache", 1),
    ),
    fuse(
        "kr_cache.size(2)",
        "kr_cache.size(2) must be 1 (N2: one key head), got 17",
        kr_cache=grown("kr_cache", 2),
    ),
    fuse(
        "kr_cache.size(3)",
        "w_uq_qr.size(1) must be 144 (N1 * (P + R) of w_uk and kr_cache), got 96",
        kr_cache=grown("kr_cache", 3),
    ),
    fuse(
        "block_table.size(0)",
        "block_table.size(0) must be 2 (B of x), got 18",
        block_table=grown("block_table", 0),
    ),
    fuse(
        "act_seqs.size(0)",
        "act_seqs.size(0) must be 2 (B of x), got 18",
        act_seqs=grown("act_seqs", 0),
    ),
    fuse(
        "w_idx_qb.size(0)",
        "w_idx_qb.size(0) must be 24 (Q of w_dq), got 40",
        w_idx_qb=grown("w_idx_qb", 0),
    ),
    fuse(
        "w_idx_qb.size(1)",
        "w_idx_qb.size(1) must be 128 (index heads of w_idx_proj * D of w_idx_k), got 144",
        w_idx_qb=grown("w_idx_qb", 1),
    ),
    fuse(
        "w_idx_k.size(0)",
        "w_idx_k.size(0) must be 48 (H of x), got 64",
        w_idx_k=grown("w_idx_k", 0),
    ),
    fuse(
        "w_idx_k.size(1)",
        "w_idx_qb.size(1) must be 192 (index heads of w_idx_proj * D of w_idx_k), got 128",
        w_idx_k=grown("w_idx_k", 1),
    ),
    fuse(
        "w_idx_proj.size(0)",
        "w_idx_proj.size(0) must be 48 (H of x), got 64",
        w_idx_proj=grown("w_idx_proj", 0),
    ),
    fuse(
        "w_idx_proj.size(1)",
        "w_idx_qb.size(1) must be 640 (index heads of w_idx_proj * D of w_idx_k), got 128",
        w_idx_proj=grown("w_idx_proj", 1),
    ),
    fuse(
        "in_gamma_k.size(0)",
        "in_gamma_k.size(0) must be 32 (D of w_idx_k), got 48",
        in_gamma_k=grown("in_gamma_k", 0),
    ),
    fuse(
        "in_beta_k.size(0)",
        "in_beta_k.size(0) must be 32 (D of w_idx_k), got 48",
        in_beta_k=grown("in_beta_k", 0),
    ),
    fuse(
        "index_k_cache.size(0)",
        "index_k_cache.size(0) must be 8 (blocks of kv_cache), got 24",
        index_k_cache=grown("index_k_cache", 0),
    ),
    fuse(
        "index_k_cache.size(1)",
        "index_k_cache.size(1) must be 16 (block_size of kv_cache), got 32",
        index_k_cache=grown("index_k_cache", 1),
    ),
    fuse(
        "index_k_cache.size(2)",
        "index_k_cache.size(2) must be 1 (N2: one key head), got 17",
        index_k_cache=grown("index_k_cache", 2),
    ),
    fuse(
        "index_k_cache.size(3)",
        "index_k_cache.size(3) must be 32 (D of w_idx_k), got 48",
        index_k_cache=grown("index_k_cache", 3),
    ),
    fuse("x-rank", "x must be of shape [B, S1, H], got [1, 2, 3, 48]", x=FUSED["x"].unsqueeze(0)),
    fuse(
        "w_dq-rank",
        "w_dq must be of shape [H, Q], got [1, 48, 24]",
        w_dq=FUSED["w_dq"].unsqueeze(0),
    ),
    fuse(
        "w_uq_qr-rank",
        "w_uq_qr must be of shape [Q, N1 * (P + R)], got [1, 24, 96]",
        w_uq_qr=FUSED["w_uq_qr"].unsqueeze(0),
    ),
    fuse(
        "w_uk-rank",
        "w_uk must be of shape [N1, P, L], got [1, 3, 16, 32]",
        w_uk=FUSED["w_uk"].unsqueeze(0),
    ),
    fuse(
        "w_dkv_kr-rank",
        "w_dkv_kr must be of shape [H, L + R], got [1, 48, 48]",
        w_dkv_kr=FUSED["w_dkv_kr"].unsqueeze(0),
    ),
    fuse(
        "gamma_cq-rank",
        "gamma_cq must be of shape [Q], got [1, 24]",
        gamma_cq=FUSED["gamma_cq"].unsqueeze(0),
    ),
    fuse(
        "gamma_ckv-rank",
        "gamma_ckv must be of shape [L], got [1, 32]",
        gamma_ckv=FUSED["gamma_ckv"].unsqueeze(0),
    ),
    fuse(
        "sin-rank",
        "sin must be of shape [B, S1, R], got [1, 2, 3, 16]",
        sin=FUSED["sin"].unsqueeze(0),
    ),
    fuse(
        "cos-rank",
        "cos must be of shape [B, S1, R], got [1, 2, 3, 16]",
        cos=FUSED["cos"].unsqueeze(0),
    ),
    fuse(
        "cache_index-rank",
        "cache_index must be of shape [B, S1], got [1, 2, 3]",
        cache_index=FUSED["cache_index"].unsqueeze(0),
    ),
    fuse(
        "kv_cache-rank",
        "kv_cache must be of shape [blocks, block_size, 1, L], got [1, 8, 16, 1, 32]",
        kv_cache=FUSED["kv_cache"].unsqueeze(0),
    ),
    fuse(
        "kr_cache-rank",
        "kr_cache must be of shape [blocks, block_size, 1, R], got [1, 8, 16, 1, 16]",
        kr_cache=FUSED["kr_cache"].unsqueeze(0),
    ),
    fuse(
        "block_table-rank",
        "block_table must be of shape [B, blocks of a sequence], got [1, 2, 4]",
        block_table=FUSED["block_table"].unsqueeze(0),
    ),
    fuse(
        "act_seqs-rank",
        "act_seqs must be of shape [B], got [1, 2]",
        act_seqs=FUSED["act_seqs"].unsqueeze(0),
    ),
    fuse(
        "w_idx_qb-rank",
        "w_idx_qb must be of shape [Q, index heads * D], got [1, 24, 128]",
        w_idx_qb=FUSED["w_idx_qb"].unsqueeze(0),
    ),
    fuse(
        "w_idx_k-rank",
        "w_idx_k must be of shape [H, D], got [1, 48, 32]",
        w_idx_k=FUSED["w_idx_k"].unsqueeze(0),
    ),
    fuse(
        "w_idx_proj-rank",
        "w_idx_proj must be of shape [H, index heads], got [1, 48, 4]",
        w_idx_proj=FUSED["w_idx_proj"].unsqueeze(0),
    ),
    fuse(
        "in_gamma_k-rank",
        "in_gamma_k must be of shape [D], got [1, 32]",
        in_gamma_k=FUSED["in_gamma_k"].unsqueeze(0),
    ),
    fuse(
        "in_beta_k-rank",
        "in_beta_k must be of shape [D], got [1, 32]",
        in_beta_k=FUSED["in_beta_k"].unsqueeze(0),
    ),
    fuse(
        "index_k_cache-rank",
        "index_k_cache must be of shape [blocks, block_size, 1, D], got [1, 8, 16, 1, 32]",
        index_k_cache=FUSED["index_k_cache"].unsqueeze(0),
    ),
    fuse(
        "x-float64",
        "x.dtype must be bfloat16, float16 or float32, got float64",
        x=FUSED["x"].double(),
    ),
    fuse(
        "w_dq-float64",
        "w_dq.dtype must be float32 (dtype of x), got float64",
        w_dq=FUSED["w_dq"].double(),
    ),
    fuse(
        "w_uq_qr-float64",
        "w_uq_qr.dtype must be float32 (dtype of x), got float64",
        w_uq_qr=FUSED["w_uq_qr"].double(),
    ),
    fuse(
        "w_uk-float64",
        "w_uk.dtype must be float32 (dtype of x), got float64",
        w_uk=FUSED["w_uk"].double(),
    ),
    fuse(
        "w_dkv_kr-float64",
        "w_dkv_kr.dtype must be float32 (dtype of x), got float64",
        w_dkv_kr=FUSED["w_dkv_kr"].double(),
    ),
    fuse(
        "gamma_cq-float64",
        "gamma_cq.dtype must be float32 (dtype of x), got float64",
        gamma_cq=FUSED["gamma_cq"].double(),
    ),
    fuse(
        "gamma_ckv-float64",
        "gamma_ckv.dtype must be float32 (dtype of x), got float64",
        gamma_ckv=FUSED["gamma_ckv"].double(),
    ),
    fuse(
        "sin-float64",
        "sin.dtype must be float32 (dtype of x), got float64",
        sin=FUSED["sin"].double(),
    ),
    fuse(
        "cos-float64",
        "cos.dtype must be float32 (dtype of x), got float64",
        cos=FUSED["cos"].double(),
    ),
    fuse(
        "cache_index-float64",
        "cache_index.dtype must be int32 or int64 (flat slots of the caches), got float64",
        cache_index=FUSED["cache_index"].double(),
    ),
    fuse(
        "kv_cache-float64",
        "kv_cache.dtype must be float32 (dtype of x), got float64",
        kv_cache=FUSED["kv_cache"].double(),
    ),
    fuse(
        "kr_cache-float64",
        "kr_cache.dtype must be float32 (dtype of x), got float64",
        kr_cache=FUSED["kr_cache"].double(),
    ),
    fuse(
        "block_table-float64",
        "block_table.dtype must be int32 (block ids), got float64",
        block_table=FUSED["block_table"].double(),
    ),
    fuse(
        "act_seqs-float64",
        "act_seqs.dtype must be int32 (keys of each sequence), got float64",
        act_seqs=FUSED["act_seqs"].double(),
    ),
    fuse(
        "w_idx_qb-float64",
        "w_idx_qb.dtype must be float32 (dtype of x), got float64",
        w_idx_qb=FUSED["w_idx_qb"].double(),
    ),
    fuse(
        "w_idx_k-float64",
        "w_idx_k.dtype must be float32 (dtype of x), got float64",
        w_idx_k=FUSED["w_idx_k"].double(),
    ),
    fuse(
        "w_idx_proj-float64",
        "w_idx_proj.dtype must be float32 (dtype of x), got float64",
        w_idx_proj=FUSED["w_idx_proj"].double(),
    ),
    fuse(
        "in_gamma_k-float64",
        "in_gamma_k.dtype must be float32 (dtype of x), got float64",
        in_gamma_k=FUSED["in_gamma_k"].double(),
    ),
    fuse(
        "in_beta_k-float64",
        "in_beta_k.dtype must be float32 (dtype of x), got float64",
        in_beta_k=FUSED["in_beta_k"].double(),
    ),
    fuse(
        "index_k_cache-float64",
        "index_k_cache.dtype must be float32 (dtype of x), got float64",
        index_k_cache=FUSED["index_k_cache"].double(),
    ),
    fuse(
        "x-bfloat16",
        "w_dq.dtype must be bfloat16 (dtype of x), got float32",
        x=FUSED["x"].bfloat16(),
    ),
    fuse(
        "w_dq-bfloat16",
        "w_dq.dtype must be float32 (dtype of x), got bfloat16",
        w_dq=FUSED["w_dq"].bfloat16(),
    ),
    fuse(
        "w_uq_qr-bfloat16",
        "w_uq_qr.dtype must be float32 (dtype of x), got bfloat16",
        w_uq_qr=FUSED["w_uq_qr"].bfloat16(),
    ),
    fuse(
        "w_uk-bfloat16",
        "w_uk.dtype must be float32 (dtype of x), got bfloat16",
        w_uk=FUSED["w_uk"].bfloat16(),
    ),
    fuse(
        "w_dkv_kr-bfloat16",
        "w_dkv_kr.dtype must be float32 (dtype of x), got bfloat16",
        w_dkv_kr=FUSED["w_dkv_kr"].bfloat16(),
    ),
    fuse(
        "gamma_cq-bfloat16",
        "gamma_cq.dtype must be float32 (dtype of x), got bfloat16",
        gamma_cq=FUSED["gamma_cq"].bfloat16(),
    ),
    fuse(
        "gamma_ckv-bfloat16",
        "gamma_ckv.dtype must be float32 (dtype of x), got bfloat16",
        gamma_ckv=FUSED["gamma_ckv"].bfloat16(),
    ),
    fuse(
        "sin-bfloat16",
        "sin.dtype must be float32 (dtype of x), got bfloat16",
        sin=FUSED["sin"].bfloat16(),
    ),
    fuse(
        "cos-bfloat16",
        "cos.dtype must be float32 (dtype of x), got bfloat16",
        cos=FUSED["cos"].bfloat16(),
    ),
    *(
        fuse(
            f"{name}-float64-of-float16-x",
            f"{name}.dtype must be float16 (dtype of x) or float32, got float64",
            **each(FUSED, [n for n in FLOATING if n not in ("sin", "cos")], Tensor.half),
            **{name: FUSED[name].double()},
        )
        for name in ("sin", "cos")
    ),
    fuse(
        "kv_cache-bfloat16",
        "kv_cache.dtype must be float32 (dtype of x), got bfloat16",
        kv_cache=FUSED["kv_cache"].bfloat16(),
    ),
    fuse(
        "kr_cache-bfloat16",
        "kr_cache.dtype must be float32 (dtype of x), got bfloat16",
        kr_cache=FUSED["kr_cache"].bfloat16(),
    ),
    fuse(
        "w_idx_qb-bfloat16",
        "w_idx_qb.dtype must be float32 (dtype of x), got bfloat16",
        w_idx_qb=FUSED["w_idx_qb"].bfloat16(),
    ),
    fuse(
        "w_idx_k-bfloat16",
        "w_idx_k.dtype must be float32 (dtype of x), got bfloat16",
        w_idx_k=FUSED["w_idx_k"].bfloat16(),
    ),
    fuse(
        "w_idx_proj-bfloat16",
        "w_idx_proj.dtype must be float32 (dtype of x), got bfloat16",
        w_idx_proj=FUSED["w_idx_proj"].bfloat16(),
    ),
    fuse(
        "in_gamma_k-bfloat16",
        "in_gamma_k.dtype must be float32 (dtype of x), got bfloat16",
        in_gamma_k=FUSED["in_gamma_k"].bfloat16(),
    ),
    fuse(
        "in_beta_k-bfloat16",
        "in_beta_k.dtype must be float32 (dtype of x), got bfloat16",
        in_beta_k=FUSED["in_beta_k"].bfloat16(),
    ),
    fuse(
        "index_k_cache-bfloat16",
        "index_k_cache.dtype must be float32 (dtype of x), got bfloat16",
        index_k_cache=FUSED["index_k_cache"].bfloat16(),
    ),
    fuse(
        "block_table-int64",
        "block_table.dtype must be int32 (block ids), got int64",
        block_table=FUSED["block_table"].long(),
    ),
    fuse(
        "act_seqs-int64",
        "act_seqs.dtype must be int32 (keys of each sequence), got int64",
        act_seqs=FUSED["act_seqs"].long(),
    ),
    fuse(
        "kv_cache-stride",
        "kv_cache.stride(-1) must be 1 (rows are read as they lie; call .contiguous()), got 16",
        kv_cache=transposed(FUSED["kv_cache"]),
    ),
    fuse(
        "kr_cache-stride",
        "kr_cache.stride(-1) must be 1 (rows are read as they lie; call .contiguous()), got 16",
        kr_cache=transposed(FUSED["kr_cache"]),
    ),
    fuse(
        "index_k_cache-stride",
        "index_k_cache.stride(-1) must be 1 (rows are read as they lie; call "
        ".contiguous()), got 16",
        index_k_cache=transposed(FUSED["index_k_cache"]),
    ),
    fuse(
        "two-key-heads",
        "kv_cache.size(2) must be 1 (N2: one key head), got 2",
        **each(FUSED, CACHES, lambda x: x.repeat(1, 1, 2, 1)),
    ),
    fuse(
        "block-size-8",
        "kv_cache.size(1) must be a multiple of 16 up to 1024 (block_size), got 8",
        **each(FUSED, CACHES, lambda x: x[:, :8]),
    ),
    fuse(
        "block-size-0",
        "kv_cache.size(1) must be a multiple of 16 up to 1024 (block_size), got 0",
        **each(FUSED, CACHES, lambda x: x[:, :0]),
    ),
    fuse(
        "block-size-1040",
        "kv_cache.size(1) must be a multiple of 16 up to 1024 (block_size), got 1040",
        **each(FUSED, CACHES, lambda x: x.repeat(1, 65, 1, 1)),
    ),
]

COUNT = "sparse_count must be 1 to 2048, or 3072 to 8192 in steps of 1024, got "
MODE = "sparse_mode must be 0 (every key) or 3 (causal, right-aligned), got "
SCALE = "from 1e-38 to 2e38 (finite and positive in float32), got "

NUMBERS = [
    *(
        index(f"sparse_count-{n}", INDEX_PA, f"{COUNT}{n}", sparse_count=n)
        for n in (0, -1, 2049, 2560, 3071, 4095, 8193, 9216, 2**40)
    ),
    *(
        fuse(f"sparse_count-{n}", f"{COUNT}{n}", sparse_count=n)
        for n in (0, -1, 2049, 2560, 8193, 2**40)
    ),
    *(
        row(f"sparse_mode-{n}", inputs, f"{MODE}{n}", sparse_mode=n)
        for row, inputs in ((index, INDEX_PA), (attend, ATTEND_PA))
        for n in (-1, 1, 2, 4, 2**32 + 3)
    ),
    *(
        attend(
            f"sparse_block_size-{n}",
            ATTEND_PA,
            f"sparse_block_size must be 1 (an index names one key), got {n}",
            sparse_block_size=n,
        )
        for n in (0, 2, 64)
    ),
    # the last ones: subnormal, 0 and infinite in float32
    *(
        row
        for x in (0.0, -1.0, torch.inf, torch.nan, 1e-40, 1e-300, 1e300, 3e38)
        for row in (
            attend(f"scale-{x}", ATTEND_PA, f"scale_value must be {SCALE}{x:g}", scale_value=x),
            fuse(f"scale-{x}", f"softmax_scale must be None, or {SCALE}{x:g}", softmax_scale=x),
        )
    ),
    *(
        fuse(f"eps-{x}", f"eps must be finite and not negative, got {x:g}", eps=x)
        for x in (-1.0, torch.inf, torch.nan)
    ),
]

WINDOW = "9223372036854775807 (2**63 - 1: no window)"
WINDOW_REMEDY = "leave it out; what a token sees follows from sparse_mode and the lengths"

# of torch_npu's standard ops
KEYWORDS = [
    *(
        row(
            f"{name}-{n}", inputs, f"{name} must be {WINDOW}, got {n}; {WINDOW_REMEDY}", **{name: n}
        )
        for row, inputs in ((index, INDEX_PA), (attend, ATTEND_PA))
        for name in ("pre_tokens", "next_tokens")
        for n in (0, -1, 128, 2**63 - 2)
    ),
    index(
        "return_value",
        INDEX_PA,
        "return_value must be False (positions alone are returned), got True; compute the scores "
        "of the returned positions in torch, or call torch_npu.npu_lightning_indexer",
        return_value=True,
    ),
    *(
        attend(
            f"attention_mode-{mode}",
            ATTEND_PA,
            f"attention_mode must be 2 (MLA, absorbed), got {mode}; pass 2 or leave it out; the "
            "RoPE dims go into query_rope and key_rope",
            attention_mode=mode,
        )
        for mode in (0, 1, None)
    ),
    attend(
        "return_softmax_lse",
        ATTEND_PA,
        "return_softmax_lse must be False (the output alone is returned), got True; select all "
        "keys of a token in one call, or call torch_npu.npu_sparse_flash_attention",
        return_softmax_lse=True,
    ),
    attend(
        "sinks",
        ATTEND_PA,
        "sinks must be None (there are no attention sinks), got a tensor; leave it out, or call "
        "torch_npu.npu_sparse_flash_attention",
        sinks=torch.zeros(4),
    ),
    attend(
        "sinks-number",
        ATTEND_PA,
        "sinks must be None (there are no attention sinks), got 0.0; leave it out, or call "
        "torch_npu.npu_sparse_flash_attention",
        sinks=0.0,
    ),
]

OPTIONAL = ["block_table", "actual_seq_lengths_key", "actual_seq_lengths_kv"]
OPTIONAL += ["actual_seq_lengths_query", "query_rope", "key_rope"]

NONE = [
    row(f"{name}-None", *inputs, f"{name} must be a tensor, got None", **{name: None})
    for row, inputs in ((add, ()), (index, (INDEX_PA,)), (attend, (ATTEND_PA,)), (fuse, ()))
    for name in tensors(*inputs or [SUM if row is add else FUSED])
    if row is fuse or name not in OPTIONAL
]


@pytest.mark.parametrize(
    "op, inputs, message",
    [
        *(*ADDITION, *INDEXER, *ATTENTION, *LAYOUTS, *FUSED_ARGUMENTS),
        *(*NUMBERS, *KEYWORDS, *NONE),
    ],
)
def test_refuses_in_these_words_and_writes_nothing(op, inputs, message):
    given = copied(inputs)
    assert refusal(getattr(custom_pypto, op), given) == f"{op}: {message}"
    for name in tensors(inputs):
        torch.testing.assert_close(given[name], inputs[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "op, inputs, name",
    [
        pytest.param(op, inputs, name, id=f"{op}-{name}")
        for op in OPS
        for inputs in [not_default(op)]
        for name in tensors(inputs)[1:]
    ],
)
def test_refuses_tensors_on_two_devices(op, inputs, name):
    given = copied(inputs)
    with pytest.raises(RuntimeError) as refused:
        getattr(custom_pypto, op)(**given | {name: given[name].to("meta")})
    assert str(refused.value) == (
        f"{op}: {name}.device must be cpu (that of the first argument), got meta"
    )
    for name in tensors(inputs):
        torch.testing.assert_close(given[name], inputs[name], rtol=0, atol=0, equal_nan=True)
