"""Calls of the NPU programs to estimate: arguments, and their minimal bytes and operations."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from npu_dense_cases import dense_loss, dense_statistics
from npu_gradient_cases import attention_gradient, index_gradient, index_loss

from custom_pypto import npu
from custom_pypto.cache_rows import int8_row_bytes

if TYPE_CHECKING:  # else imported where a case is estimated: the calls run on an NPU, too
    from custom_pypto import simulation

HBM_BYTES_PER_US = 24 * 1850 * 32  # ddr_rate of PyPTO's A2A3.ini
CUBE_FLOP_PER_US = 24 * 1850 * 4096 * 2
BLOCK, K, D, L, R, N1, INDEX_HEADS = 128, 2048, 128, 512, 64, 128, 64
HIDDEN, Q_RANK, NOPE, DTYPE = 7168, 1536, 128, torch.bfloat16


@dataclass
class Case:
    """One call and its minimal cost.

    ``floor`` is the highest accepted estimate in µs, by the model of PyPTO 0.2.0.
    """

    op: str
    shape: str
    call: Callable
    bytes: int
    flop: int
    floor: float | None = None

    def estimate(self, trace: Path | None = None) -> "simulation.Estimate":
        from custom_pypto import simulation

        found = []

        def launch(kernel, tensors, written):
            found.append(simulation.estimate(kernel, *tensors.values(), trace=trace))

        self.call(npu.implementations(launch))
        (estimate,) = found
        return estimate


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def paged(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Lengths, block table, number of blocks."""
    blocks = [math.ceil(n / BLOCK) for n in lengths]
    ids, first = torch.zeros(len(lengths), max(blocks), dtype=torch.int32), 0
    for row, n in zip(ids, blocks, strict=True):
        row[:n] = torch.arange(first, first + n)
        first += n
    return int32(lengths), ids, first


def shape(B: int, S1: int, lengths: list[int]) -> str:
    keys = f"{lengths[0]}" if len(set(lengths)) == 1 else str(lengths)
    return f"{B},{S1},{keys}"


def indexer(
    B: int,
    S1: int,
    S2: int | list[int],
    floor: float | None = None,
    *,
    count: int = K,
    cmp_ratio: int = 1,
) -> Case:
    """``S2``: tokens, of which ``cmp_ratio`` share a key."""
    tokens = [S2] * B if isinstance(S2, int) else S2
    rows, block_table, blocks = paged([n // cmp_ratio for n in tokens])
    query = torch.zeros(B, S1, INDEX_HEADS, D, dtype=DTYPE)
    key = torch.zeros(blocks, BLOCK, 1, D, dtype=DTYPE)
    weights = torch.zeros(B, S1, INDEX_HEADS)

    def call(ops):
        ops["npu_lightning_indexer_pto"](
            query,
            key,
            weights,
            actual_seq_lengths_key=int32(tokens),
            block_table=block_table,
            sparse_count=count,
            cmp_ratio=cmp_ratio,
        )

    keys = int(rows.sum())
    name = "lightning indexer"
    if cmp_ratio > 1:
        name += f", cmp_ratio {cmp_ratio}, K {count}"
    return Case(
        name,
        shape(B, S1, tokens),
        call,
        bytes=2 * keys * D + 2 * query.numel() + 4 * B * S1 * count,
        flop=2 * S1 * keys * INDEX_HEADS * D,
        floor=floor,
    )


def attention(B: int, S1: int, S2: int, heads: int = N1, floor: float | None = None) -> Case:
    query_rope = torch.zeros(B, S1, heads, R, dtype=DTYPE)
    name = "sparse attention" + ("" if heads == N1 else f", {heads} heads")
    return _attention(name, B, S1, S2, heads, K, floor, query_rope=query_rope)


def attention_with_sinks(
    B: int, S1: int, S2: int, count: int, heads: int = 64, floor: float | None = None
) -> Case:
    """A layer of DeepSeek-V4, without rope: ``count`` of ``S2`` rows, window and compressed."""
    name = f"sparse attention, {heads} heads, sinks, K {count}"
    facts = dict(sinks=torch.zeros(heads), sparse_mode=0)
    return _attention(name, B, S1, S2, heads, count, floor, **facts)


def _attention(name, B, S1, S2, heads, count, floor, query_rope=None, **facts) -> Case:
    lengths, block_table, blocks = paged([S2] * B)
    query = torch.zeros(B, S1, heads, L, dtype=DTYPE)
    key = torch.zeros(blocks, BLOCK, 1, L, dtype=DTYPE)
    rope = 0 if query_rope is None else query_rope.size(-1)
    indices = torch.arange(count, dtype=torch.int32).expand(B, S1, 1, count).contiguous()

    def call(ops):
        ops["npu_sparse_flash_attention_pto"](
            query,
            key,
            None,
            indices,
            192**-0.5,
            query_rope=query_rope,
            key_rope=torch.zeros(blocks, BLOCK, 1, rope, dtype=DTYPE) if rope else None,
            block_table=block_table,
            actual_seq_lengths_kv=lengths,
            **facts,
        )

    tokens = B * S1
    return Case(
        name,
        shape(B, S1, [S2]),
        call,
        bytes=2 * tokens * (count * (L + rope) + heads * (2 * L + rope)),
        flop=2 * tokens * heads * count * (2 * L + rope),
        floor=floor,
    )


def int8_indexer(B: int, S1: int, S2: int, floor: float | None = None) -> Case:
    lengths, block_table, blocks = paged([S2] * B)
    query = torch.zeros(B, S1, INDEX_HEADS, D, dtype=torch.int8)
    key = torch.zeros(blocks, BLOCK, 1, D, dtype=torch.int8)
    weights, scale = torch.zeros(B, S1, INDEX_HEADS), torch.ones(blocks, BLOCK, 1).half()

    def call(ops):
        ops["npu_quant_lightning_indexer_pto"](
            query,
            key,
            weights,
            weights.half(),
            scale,
            0,
            0,
            actual_seq_lengths_key=lengths,
            block_table=block_table,
            sparse_count=K,
        )

    keys = B * S2
    return Case(
        "lightning indexer, int8",
        shape(B, S1, [S2]),
        call,
        bytes=keys * (D + 2) + query.numel() + 4 * B * S1 * K,
        flop=2 * S1 * keys * INDEX_HEADS * D,
        floor=floor,
    )


def int8_attention(B: int, S1: int, S2: int, floor: float | None = None) -> Case:
    lengths, block_table, blocks = paged([S2] * B)
    query = torch.zeros(B, S1, N1, L + R, dtype=DTYPE)
    width = int8_row_bytes(L, R)
    key = torch.zeros(blocks, BLOCK, 1, width, dtype=torch.int8)
    indices = torch.arange(K, dtype=torch.int32).expand(B, S1, 1, K).contiguous()

    def call(ops):
        ops["npu_kv_quant_sparse_flash_attention_pto"](
            query,
            key,
            None,
            indices,
            192**-0.5,
            2,
            2,
            actual_seq_lengths_kv=lengths,
            block_table=block_table,
        )

    tokens = B * S1
    return Case(
        "sparse attention, int8",
        shape(B, S1, [S2]),
        call,
        bytes=tokens * (K * width + 2 * N1 * (2 * L + R)),
        flop=2 * tokens * N1 * K * (2 * L + R),
        floor=floor,
    )


def fused_arguments(B: int, S1: int, S2: int) -> dict:
    lengths, block_table, blocks = paged([S2] * B)

    def zeros(*shape, dtype=DTYPE):
        return torch.zeros(shape, dtype=dtype)

    last = (lengths[:, None] - S1 + torch.arange(S1)).int()
    return dict(
        x=zeros(B, S1, HIDDEN),
        w_dq=zeros(HIDDEN, Q_RANK),
        w_uq_qr=zeros(Q_RANK, N1 * (NOPE + R)),
        w_uk=zeros(N1, NOPE, L),
        w_dkv_kr=zeros(HIDDEN, L + R),
        gamma_cq=zeros(Q_RANK),
        gamma_ckv=zeros(L),
        sin=zeros(B, S1, R),
        cos=zeros(B, S1, R),
        cache_index=block_table.gather(1, last.long() // BLOCK) * BLOCK + last % BLOCK,
        kv_cache=zeros(blocks, BLOCK, 1, L),
        kr_cache=zeros(blocks, BLOCK, 1, R),
        block_table=block_table,
        act_seqs=lengths,
        w_idx_qb=zeros(Q_RANK, INDEX_HEADS * D),
        w_idx_k=zeros(HIDDEN, D),
        w_idx_proj=zeros(HIDDEN, INDEX_HEADS),
        in_gamma_k=zeros(D),
        in_beta_k=zeros(D),
        index_k_cache=zeros(blocks, BLOCK, 1, D),
    )


WEIGHTS = ("w_dq", "w_uq_qr", "w_uk", "w_dkv_kr", "w_idx_qb", "w_idx_k", "w_idx_proj")


def fused(B: int, S1: int, S2: int, floor: float | None = None) -> Case:
    arguments = fused_arguments(B, S1, S2)
    weights = sum(arguments[name].numel() for name in WEIGHTS)
    select, attend = indexer(B, S1, S2), attention(B, S1, S2)
    return Case(
        "fused attention",
        shape(B, S1, [S2]),
        lambda ops: ops["npu_sparse_attention_pto"](**arguments),
        bytes=2 * weights + select.bytes + attend.bytes,
        flop=2 * B * S1 * weights + select.flop + attend.flop,
        floor=floor,
    )


def int8_prolog(tokens: int, floor: float | None = None) -> Case:
    def int8(*shape):
        return torch.zeros(shape, dtype=torch.int8)

    def zeros(*shape):
        return torch.zeros(shape, dtype=DTYPE)

    wq_b = int8(Q_RANK, INDEX_HEADS * D)
    wk, weights_proj = zeros(HIDDEN, D), zeros(HIDDEN, INDEX_HEADS)

    def call(ops):
        ops["npu_lightning_indexer_prolog_pto"](
            zeros(tokens, HIDDEN),
            int8(tokens, Q_RANK),
            torch.zeros(tokens),
            wq_b,
            torch.zeros(INDEX_HEADS * D),
            wk,
            weights_proj,
            zeros(D),
            zeros(D),
            zeros(tokens, R),
            zeros(tokens, R),
            zeros(D, D),
            zeros(D, D),
            int8(64, BLOCK, 1, D),
            torch.ones(64, BLOCK, 1).half(),
            torch.arange(tokens),
            1e-6,
        )

    return Case(
        "indexer prolog, int8",
        f"{tokens} token" + "s" * (tokens > 1),
        call,
        bytes=wq_b.nbytes + wk.nbytes + weights_proj.nbytes,
        flop=2 * tokens * (wq_b.numel() + wk.numel() + weights_proj.numel()),
        floor=floor,
    )


def cases() -> Iterator[Case]:
    """Made one by one: together they are 1.7 GB."""
    # with the indices of parts of rows that the PyPTO of CANN 9.1 needs
    yield attention(1, 1, 4096, floor=30)
    yield attention(4, 1, 8192, floor=40)
    yield attention(4, 2, 8192, floor=49)
    yield attention(16, 1, 16384, floor=66)
    yield attention(1, 1, 131072)
    yield attention(4, 2, 8192, heads=64)
    yield attention(4, 2, 8192, heads=16)
    yield attention(1, 256, 8192, floor=515)
    # V4 at 8192 tokens: window, selected, and heavily compressed rows
    yield attention_with_sinks(64, 2, 128, count=128, floor=91)
    yield attention_with_sinks(1, 1, 128 + 2048, count=128 + 512, floor=23.5)
    yield attention_with_sinks(4, 1, 128 + 2048, count=128 + 512, floor=33)
    yield attention_with_sinks(64, 2, 128 + 2048, count=128 + 512, floor=117)
    yield attention_with_sinks(64, 2, 128 + 64, count=128 + 64, floor=104)
    yield Case(**attention_gradient(64, 8192, floor=690))
    yield Case(**attention_gradient(256, 8192, floor=2320))
    yield Case(**index_gradient(64, 8192, floor=437))
    yield Case(**index_gradient(256, 8192, floor=1665))
    yield Case(**index_loss(64, 8192, floor=560))
    yield Case(**index_loss(256, 8192, floor=2185))
    yield Case(**dense_statistics(64, 8192, floor=300))
    yield Case(**dense_statistics(256, 8192, floor=1180))
    yield Case(**dense_loss(64, 8192, floor=1600))
    yield Case(**dense_loss(256, 8192, floor=6280))
    yield indexer(1, 1, 8192, floor=25)
    yield indexer(4, 1, 8192)
    yield indexer(4, 2, 8192, floor=42)
    yield indexer(16, 1, 16384)
    yield indexer(1, 1, 65536, floor=85)
    yield indexer(1, 1, 131072, floor=135)
    yield indexer(4, 2, [65536, 971, 32869, 16383], floor=105)
    yield indexer(1, 256, 8192, floor=400)
    yield indexer(1, 1, 8192, count=512, cmp_ratio=4, floor=18)
    yield indexer(64, 2, 8192, count=512, cmp_ratio=4, floor=99)
    yield indexer(1, 1, 65536, count=512, cmp_ratio=4, floor=34)
    # against 21.5, 40.1 and 64.9 in bfloat16
    yield int8_indexer(1, 1, 8192, floor=27)
    yield int8_indexer(4, 2, 8192, floor=42)
    yield int8_indexer(1, 1, 65536, floor=66)
    # the published kernel for such rows: 70.7, 118.4 and 207.7
    yield int8_attention(1, 1, 4096, floor=65)
    yield int8_attention(4, 2, 8192, floor=110)
    yield int8_attention(16, 1, 16384, floor=145)
    yield int8_prolog(1, floor=46)
    yield int8_prolog(8, floor=60)  # the published kernel: 54.5
    yield int8_prolog(64, floor=195)
    yield fused(4, 1, 8192, floor=170)
