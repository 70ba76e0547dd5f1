"""Formats of index keys, and what the indexer scores them with.

Shapes: T new tokens, N index heads, D ``index_head_dim``, K selected positions; queries are
``[B, S, N, D]``, or packed ``[T, N, D]``.
"""

import torch
from torch import Tensor

import custom_pypto

from .parts import Part, Pools, flat, write


class IndexRows:
    """Index keys in the dtype of the model.

    Args:
        dim: D.
    """

    def __init__(self, dtype: torch.dtype, dim: int, device: torch.device):
        self.dtype = dtype

    @staticmethod
    def lacking(config, dtype: torch.dtype) -> str | None:
        """Why a model of this config and dtype cannot have the format; None if it can."""
        return None

    def parts(self, dim: int) -> dict[str, Part]:
        """Of a row, from D."""
        return {"index": Part(dim, self.dtype)}

    def write(self, pools: Pools, slots: Tensor, key: Tensor) -> None:
        """Writes keys ``[.., D]`` of T tokens."""
        write(pools["index"], slots, key)

    def select(
        self,
        pools: Pools,
        query: Tensor,
        weights: Tensor,
        count: int,
        *,
        lengths: Tensor,
        **others,
    ) -> Tensor:
        """The ``count`` rows with the best scores, best first, -1 behind the last: ``[.., 1,
        count]`` int32.

        Args:
            weights: ``[.., N]`` float32 of :func:`score_weights`.
            others: keywords of the op.
        """
        return custom_pypto.npu_lightning_indexer_pto(
            query.to(self.dtype),
            pools["index"],
            weights,
            actual_seq_lengths_key=lengths,
            sparse_count=count,
            **others,
        )


class Int8IndexRows(IndexRows):
    """Quantized index keys and their float16 scales.

    A Hadamard matrix rotates keys and queries, as in DeepSeek-V3.2's own inference code: outliers
    spread over all dims, products stay equal. All keys of a cache must be rotated, or none; their
    bytes do not tell.
    """

    def __init__(self, dtype, dim, device):
        super().__init__(dtype, dim, device)
        self.rotation = hadamard_matrix(dim).to(device, dtype)

    @staticmethod
    def lacking(config, dtype):
        size = config.index_head_dim
        return None if size.bit_count() == 1 else f"index_head_dim {size}, no power of two"

    def parts(self, dim):
        return {"index": Part(dim, torch.int8), "index_scale": Part(1, torch.float16)}

    def write(self, pools, slots, key):
        custom_pypto.npu_quant_index_update_pto(
            key.flatten(0, -2).to(self.dtype),
            flat(slots, pools["index"]),
            pools["index"],
            pools["index_scale"].squeeze(-1),
            hadamard=self.rotation,
        )

    def select(self, pools, query, weights, count, *, lengths, **others):
        rows, scales = custom_pypto.npu_quant_rows_pto(query.to(self.dtype), hadamard=self.rotation)
        return custom_pypto.npu_quant_lightning_indexer_pto(
            rows,
            pools["index"],
            weights,
            scales,
            pools["index_scale"].squeeze(-1),
            query_quant_mode=0,
            key_quant_mode=0,
            actual_seq_lengths_key=lengths,
            sparse_count=count,
            **others,
        )


def by_position(count: int, seen: Tensor) -> Tensor:
    """What a token that sees no more than ``count`` rows selects: all of them, by position, ``[..,
    count]`` int32 with -1 behind the last. Of a token that sees more, the first ``count``.

    Args:
        seen: rows that each token sees, ``[.., 1]``.
    """
    rows = torch.arange(count, device=seen.device)
    return torch.where(rows < seen, rows, -1).int()


def score_weights(weights: Tensor, dim: int) -> Tensor:
    """The weights ``[.., N]`` of the heads, in float32, times both scales of a score, which are
    positive and so may move out of its ReLU."""
    return weights.float() * (weights.size(-1) ** -0.5 * dim**-0.5)


def hadamard_matrix(dim: int) -> Tensor:
    """``[dim, dim]`` float32, of a power of two."""
    signs = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float32, device="cpu")
    matrix = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    for _ in range(dim.bit_length() - 1):
        matrix = torch.kron(signs, matrix)
    return matrix * dim**-0.5
