"""Calls of the NPU programs over every visible key to estimate, a part of :mod:`npu_cases`.

All are of the last tokens of a sequence, with the sizes of DeepSeek-V3.2.
"""

import torch
from npu_gradient_cases import DIM, HEADS, INDEX_HEADS, LATENT, ROPE, zeros


def statistic(*shape: int) -> torch.Tensor:
    return zeros(*shape, dtype=torch.float32)


def of_indexer(tokens: int, keys: int) -> dict:
    return dict(
        query_index=zeros(1, tokens, INDEX_HEADS, DIM),
        key_index=zeros(1, keys, 1, DIM),
        weights=statistic(1, tokens, INDEX_HEADS),
    )


def dense_statistics(tokens: int, keys: int, floor: float | None = None) -> dict:
    """The fields of a case."""
    return dict(
        op="statistics of the indexer over every key",
        shape=f"1,{tokens},{keys}",
        call=lambda ops: ops["npu_dense_lightning_indexer_softmax_lse_pto"](
            **of_indexer(tokens, keys)
        ),
        bytes=2 * DIM * (tokens * INDEX_HEADS + keys) + 4 * tokens * (INDEX_HEADS + 2),
        flop=2 * tokens * keys * INDEX_HEADS * DIM,
        floor=floor,
    )


def dense_loss(tokens: int, keys: int, floor: float | None = None) -> dict:
    """Likewise."""
    of_attention, of_index = statistic(1, 1, tokens, HEADS), statistic(1, 1, tokens)

    def call(ops):
        ops["npu_dense_lightning_indexer_grad_kl_loss_pto"](
            query=zeros(1, tokens, HEADS, LATENT),
            key=zeros(1, keys, 1, LATENT),
            **of_indexer(tokens, keys),
            softmax_max=of_attention,
            softmax_sum=of_attention + keys,
            softmax_max_index=of_index,
            softmax_sum_index=of_index + keys,
            scale_value=192**-0.5,
            query_rope=zeros(1, tokens, HEADS, ROPE),
            key_rope=zeros(1, keys, 1, ROPE),
        )

    width = LATENT + ROPE
    return dict(
        op="loss of the indexer over every key",
        shape=f"1,{tokens},{keys}",
        call=call,
        # each is read once; the indexer's have a gradient
        bytes=2 * (tokens * (HEADS * width + 2 * INDEX_HEADS * DIM) + keys * (width + 2 * DIM)),
        flop=2 * tokens * keys * (HEADS * width + 3 * INDEX_HEADS * DIM),
        floor=floor,
    )
