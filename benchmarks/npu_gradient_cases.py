"""Calls of the NPU programs of gradients to estimate, a part of :mod:`npu_cases`.

All are of the last tokens of a sequence, with the sizes of DeepSeek-V3.2 and K 2048.
"""

import torch

HEADS, LATENT, ROPE = 128, 512, 64
INDEX_HEADS, DIM = 64, 128
COUNT = 2048


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def indices_of(tokens: int) -> torch.Tensor:
    row = torch.arange(COUNT, dtype=torch.int32)
    return row.expand(1, tokens, 1, COUNT).contiguous()


def attention_gradient(tokens: int, rows: int, floor: float | None = None) -> dict:
    """The fields of a case, of ``rows`` keys."""
    query = zeros(1, tokens, HEADS, LATENT)
    statistic = zeros(1, 1, tokens, HEADS, dtype=torch.float32)

    def call(ops):
        ops["npu_sparse_flash_attention_grad_pto"](
            query,
            zeros(1, rows, 1, LATENT),
            None,
            indices_of(tokens),
            query,
            query,
            statistic,
            statistic + COUNT,
            192**-0.5,
            query_rope=zeros(1, tokens, HEADS, ROPE),
            key_rope=zeros(1, rows, 1, ROPE),
            actual_seq_kvlen=torch.tensor([rows], dtype=torch.int32),
        )

    width = LATENT + ROPE
    return dict(
        op="gradient of sparse attention",
        shape=f"1,{tokens},{rows}",
        call=call,
        # rows are read in half precision and added in float32; the keys' gradient is written once
        bytes=tokens * (6 * COUNT * width + 2 * HEADS * (2 * width + LATENT)) + 2 * rows * width,
        flop=2 * tokens * HEADS * COUNT * (3 * width + 2 * LATENT),
        floor=floor,
    )


def _of_index(tokens: int, rows: int) -> tuple[int, int]:
    """Bytes and operations of an indexer's gradients."""
    of_token = 6 * COUNT * DIM + 2 * INDEX_HEADS * (2 * DIM + 2)
    return tokens * of_token + 2 * rows * DIM, 2 * tokens * INDEX_HEADS * COUNT * 3 * DIM


def index_gradient(tokens: int, rows: int, floor: float | None = None) -> dict:
    """The fields of a case, of ``rows`` keys."""

    def call(ops):
        ops["npu_lightning_indexer_grad_pto"](
            zeros(1, tokens, INDEX_HEADS, DIM),
            zeros(1, rows, 1, DIM),
            zeros(1, tokens, 1, COUNT),
            indices_of(tokens),
            zeros(1, tokens, INDEX_HEADS),
            actual_seq_lengths_key=torch.tensor([rows], dtype=torch.int32),
        )

    bytes, flop = _of_index(tokens, rows)
    return dict(
        op="gradient of the indexer",
        shape=f"1,{tokens},{rows}",
        call=call,
        bytes=bytes,
        flop=flop,
        floor=floor,
    )


def index_loss(tokens: int, rows: int, floor: float | None = None) -> dict:
    """The fields of a case, of ``rows`` keys."""
    statistic = zeros(1, 1, tokens, HEADS, dtype=torch.float32)

    def call(ops):
        ops["npu_sparse_lightning_indexer_grad_kl_loss_pto"](
            zeros(1, tokens, HEADS, LATENT),
            zeros(1, rows, 1, LATENT),
            zeros(1, tokens, INDEX_HEADS, DIM),
            zeros(1, rows, 1, DIM),
            zeros(1, tokens, INDEX_HEADS),
            indices_of(tokens),
            statistic,
            statistic + COUNT,
            192**-0.5,
            query_rope=zeros(1, tokens, HEADS, ROPE),
            key_rope=zeros(1, rows, 1, ROPE),
            actual_seq_klen=[rows],
        )

    bytes, flop = _of_index(tokens, rows)
    width = LATENT + ROPE
    return dict(
        op="loss of the indexer",
        shape=f"1,{tokens},{rows}",
        call=call,
        bytes=bytes + tokens * 2 * width * (COUNT + HEADS),
        flop=flop + 2 * tokens * HEADS * COUNT * width,
        floor=floor,
    )
