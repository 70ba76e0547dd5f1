"""Calls of the NPU programs of gradients to estimate, a part of :mod:`npu_cases`."""

import torch


def attention_gradient(tokens: int, rows: int, floor: float | None = None) -> dict:
    """The fields of a case: the last tokens of a sequence of ``rows`` keys, 128 heads, K 2048."""
    heads, count, latent, rope = 128, 2048, 512, 64

    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    query = zeros(1, tokens, heads, latent)
    statistic = zeros(1, 1, tokens, heads, dtype=torch.float32)
    indices = torch.arange(count, dtype=torch.int32).expand(1, tokens, 1, count).contiguous()

    def call(ops):
        ops["npu_sparse_flash_attention_grad_pto"](
            query,
            zeros(1, rows, 1, latent),
            None,
            indices,
            query,
            query,
            statistic,
            statistic + count,
            192**-0.5,
            query_rope=zeros(1, tokens, heads, rope),
            key_rope=zeros(1, rows, 1, rope),
            actual_seq_kvlen=torch.tensor([rows], dtype=torch.int32),
        )

    width = latent + rope
    return dict(
        op="gradient of sparse attention",
        shape=f"1,{tokens},{rows}",
        call=call,
        # rows are read in half precision and added in float32; the keys' gradient is written once
        bytes=tokens * (6 * count * width + 2 * heads * (2 * width + latent)) + 2 * rows * width,
        flop=2 * tokens * heads * count * (3 * width + 2 * latent),
        floor=floor,
    )
