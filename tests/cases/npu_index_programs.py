"""Calls of the ops that train an indexer which the NPU programs take."""

import torch

from .npu_lightning_indexer_grad_pto import inputs as gradient_inputs
from .npu_sparse_lightning_indexer_grad_kl_loss_pto import inputs as loss_inputs

INDEX_GRADIENT = {
    "one-key": dict(lengths_query=[1], lengths_key=[1], sparse_count=16),
    "ragged-and-empty": dict(lengths_query=[1, 1, 1], lengths_key=[300, 0, 1000], sparse_count=128),
    # more tokens than destinations of the sums, some of them without keys
    "padded-and-shorter-than-the-query": dict(
        lengths_query=[6, 3, 2, 1], lengths_key=[131, 3, 1, 700], sparse_count=16
    ),
    "packed-query": dict(
        lengths_query=[4, 0, 3], lengths_key=[140, 9, 300], sparse_count=64, layout_query="TND"
    ),
    "packed": dict(
        lengths_query=[4, 0, 3],
        lengths_key=[140, 9, 300],
        sparse_count=64,
        layout_query="TND",
        layout_key="TND",
    ),
    "keys-by-sequence": dict(
        lengths_query=[3, 2], lengths_key=[140, 30], sparse_count=64, layout_key="BSND"
    ),
    "every-key": dict(lengths_query=[3, 2], lengths_key=[140, 30], sparse_count=16, sparse_mode=0),
    "prefill": dict(lengths_query=[20, 9], lengths_key=[50, 9], sparse_count=16),
    "blocks-of-48": dict(lengths_query=[2, 1], lengths_key=[700, 40], block_size=48),
    "weights-and-dy-of-float32": dict(
        lengths_query=[2],
        lengths_key=[300],
        sparse_count=100,
        weights_dtype=torch.float32,
        dy_dtype=torch.float32,
    ),
    # lengths around a multiple of the ratio, and below it
    "compressed": dict(
        lengths_query=[1, 4, 2, 3], lengths_key=[399, 800, 4, 2], sparse_count=64, cmp_ratio=4
    ),
    "compressed-packed": dict(
        lengths_query=[9, 0, 6],
        lengths_key=[410, 9, 7],
        sparse_count=64,
        cmp_ratio=4,
        layout_query="TND",
        layout_key="TND",
    ),
    "compressed-by-sequence": dict(
        lengths_query=[3, 2], lengths_key=[141, 30], sparse_count=16, cmp_ratio=4, layout_key="BSND"
    ),
    # heads and dims that fill no tile
    "5-heads": dict(lengths_query=[2, 1], lengths_key=[300, 40], heads=5, dim=48),
    "512-dims": dict(lengths_query=[2], lengths_key=[300], heads=64, dim=512, sparse_count=256),
}

INDEX_LOSS = {
    "one-key": dict(lengths_query=[1], lengths_key=[1], sparse_count=16),
    "ragged-and-empty": dict(
        lengths_query=[2, 1, 0, 1], lengths_key=[300, 0, 5, 1000], sparse_count=128
    ),
    # more tokens than destinations of the sums, some of them without keys
    "shorter-than-the-query": dict(
        lengths_query=[6, 3, 2, 1], lengths_key=[131, 2, 1, 300], sparse_count=16
    ),
    "by-sequence": dict(lengths_query=[4, 3], lengths_key=[140, 2], sparse_count=64, layout="BSND"),
    "every-key": dict(lengths_query=[3, 2], lengths_key=[140, 30], sparse_count=16, sparse_mode=0),
    "prefill": dict(lengths_query=[20, 9], lengths_key=[50, 9], sparse_count=16),
    "no-rope": dict(lengths_query=[2], lengths_key=[300], rope=0, sparse_count=100),
    "weights-of-float32": dict(
        lengths_query=[2], lengths_key=[300], sparse_count=64, weights_dtype=torch.float32
    ),
    "compressed": dict(
        lengths_query=[1, 4, 2, 3], lengths_key=[399, 600, 4, 2], sparse_count=64, cmp_ratio=4
    ),
    "compressed-by-sequence": dict(
        lengths_query=[3, 2], lengths_key=[141, 30], sparse_count=16, cmp_ratio=4, layout="BSND"
    ),
    # heads and dims that fill no tile
    "5-heads": dict(
        lengths_query=[2, 1], lengths_key=[300, 40], heads=5, index_heads=3, latent=48, dim=48
    ),
}


def index_gradient_case(lengths_query, lengths_key, **arguments):
    defaults = dict(heads=16, dim=128, block_size=128, dtype=torch.bfloat16)
    return gradient_inputs(lengths_query, lengths_key, **defaults | arguments)


def index_loss_case(lengths_query, lengths_key, **arguments):
    defaults = dict(heads=16, latent=512, rope=64, index_heads=16, dim=128, dtype=torch.bfloat16)
    return loss_inputs(lengths_query, lengths_key, **defaults | arguments)
