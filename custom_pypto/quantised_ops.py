"""The ops on int8 caches. :mod:`custom_pypto.ops` exports them and explains letters and layouts."""

from typing import Any

from torch import Tensor

from .schemas import public_function

__all__ = [
    "npu_quant_index_update_pto",
    "npu_quant_lightning_indexer_pto",
    "npu_quant_rows_pto",
]


@public_function
def npu_quant_lightning_indexer_pto(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    query_dequant_scale: Tensor,
    key_dequant_scale: Tensor,
    query_quant_mode: int,
    key_quant_mode: int,
    *,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "PA_BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    **standard: Any,
) -> Tensor:
    r""":func:`npu_lightning_indexer_pto` over int8 rows, each with a scale.

    The score of key ``j`` for query token ``i`` is
    :math:`s^K_j \sum_h w_{i,h}\,s^Q_{i,h}\,\mathrm{ReLU}(q_{i,h} \cdot k_j)`. The integer products
    are exact, sums over heads in float32. The scales stay outside of the ReLU; where they are not
    negative, this is the indexer of the dequantised rows. Arguments, order of axes and names are
    those of ``torch_npu.npu_quant_lightning_indexer``.

    Args:
        query: ``[B, S1, N1, D]`` or ``[T1, N1, D]`` by ``layout_query``; int8, any byte; D a
            multiple of 16 up to 1024.
        key: by ``layout_key``; int8; one head; last dim contiguous, other strides arbitrary.
        weights: ``[B, S1, N1]`` or ``[T1, N1]``; bfloat16, float16 or float32.
        query_dequant_scale: of the shape of ``weights``; float16 or float32.
        key_dequant_scale: of the shape of ``key`` without D, as ``[blocks, block_size, 1]``; dtype
            of ``query_dequant_scale``; any strides.
        query_quant_mode: must be 0: int8, one scale per row; key_quant_mode likewise.
        actual_seq_lengths_query: as for :func:`npu_lightning_indexer_pto`, and so are
            ``actual_seq_lengths_key``, ``block_table``, ``sparse_count`` and ``sparse_mode``.
        standard: the remaining keywords of ``torch_npu.npu_quant_lightning_indexer``, each with its
            only supported value: ``pre_tokens`` and ``next_tokens`` 2**63 - 1, ``query_dtype`` and
            ``key_dtype`` None.
    Returns:
        int32 positions as :func:`npu_lightning_indexer_pto` returns them. They differ from those of
        the rows before quantisation where scores nearly tie.
    Raises:
        RuntimeError: a constraint above is violated; the message names the argument.

    Example:
        >>> import torch
        >>> keys = torch.arange(16.0).repeat(16, 1).T.contiguous()  # key j holds j
        >>> key, key_scale = npu_quant_rows_pto(keys[None, :, None])
        >>> query, query_scale = npu_quant_rows_pto(torch.ones(1, 2, 1, 16))
        >>> npu_quant_lightning_indexer_pto(
        ...     query,
        ...     key,
        ...     torch.ones(1, 2, 1),
        ...     query_scale,
        ...     key_scale,
        ...     0,
        ...     0,
        ...     actual_seq_lengths_key=torch.tensor([4], dtype=torch.int32),
        ...     block_table=torch.tensor([[0]], dtype=torch.int32),
        ...     sparse_count=4,
        ... )[0, :, 0]
        tensor([[ 2,  1,  0, -1],
                [ 3,  2,  1,  0]], dtype=torch.int32)
    """


@public_function
def npu_quant_rows_pto(x: Tensor, *, hadamard: Tensor | None = None) -> tuple[Tensor, Tensor]:
    r"""Rows in int8, each with a scale: queries of :func:`npu_quant_lightning_indexer_pto`.

    With :math:`a = \max(\max_d |x_d|, 10^{-4})` of a row of ``x``, or of ``x @ hadamard``:

    .. math:: q_d = \mathrm{round}(x_d \cdot (127 / a)), \quad s = a / 127

    in float32, ties to even. The minimum is that of ``act_quant`` in the inference code of
    DeepSeek-V3.2; a row of zeros has zeros and a positive scale. Queries and keys must be rotated
    both or not at all, by the same orthogonal matrix, which leaves their products alone.

    Args:
        x: ``[.., D]``; bfloat16, float16 or (CPU only) float32; D a multiple of 16 up to 1024.
        hadamard: ``[D, D]`` of the dtype of ``x``, or None; sums in float32, rounded to that dtype.
    Returns:
        int8 ``[.., D]`` and float16 ``[..]``. An infinity or NaN makes the scale of its row
        infinite or NaN, and values without a quotient 0.
    Raises:
        RuntimeError: a constraint above is violated; the message names the argument.

    Example:
        >>> import torch
        >>> rows, scales = npu_quant_rows_pto(torch.arange(16.0)[None])
        >>> rows[0, :4], scales
        (tensor([ 0,  8, 17, 25], dtype=torch.int8), tensor([0.1181], dtype=torch.float16))
    """


@public_function
def npu_quant_index_update_pto(
    x: Tensor,
    slots: Tensor,
    cache: Tensor,
    scale_cache: Tensor,
    *,
    hadamard: Tensor | None = None,
) -> None:
    r"""Quantises index keys as :func:`npu_quant_rows_pto` and writes them into a paged cache.

    Args:
        x: ``[.., D]``; bfloat16, float16 or (CPU only) float32; D a multiple of 16 up to 1024.
        slots: ``[..]`` int32 or int64: slot ``block * block_size + row`` of each row of ``x``; a
            row whose slot is outside the cache (-1: padding) is not written. Of two rows with one
            slot, the later one stays on the CPU, either one on an NPU.
        cache: ``[blocks, block_size, 1, D]`` int8, written in place; last dim contiguous, other
            strides arbitrary on the CPU.
        scale_cache: ``[blocks, block_size, 1]`` float16, written in place.
        hadamard: as for :func:`npu_quant_rows_pto`.
    Raises:
        RuntimeError: a constraint above is violated; the message names the argument and the caches
            are unchanged.

    Example:
        >>> import torch
        >>> cache = torch.zeros(1, 16, 1, 16, dtype=torch.int8)
        >>> scale_cache = torch.zeros(1, 16, 1, dtype=torch.float16)
        >>> slots = torch.tensor([3, -1])
        >>> npu_quant_index_update_pto(torch.ones(2, 16), slots, cache, scale_cache)
        >>> cache[0, 2:5, 0, 0], scale_cache[0, 3]
        (tensor([  0, 127,   0], dtype=torch.int8), tensor([0.0079], dtype=torch.float16))
    """
