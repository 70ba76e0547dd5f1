"""The public gradient ops, a part of :mod:`custom_pypto.ops`, whose words they use.

``backward()`` through the differentiable ops calls them; they are public for callers with an
autograd function of their own.
"""

from typing import Any

from torch import Tensor

from .schemas import public_function

__all__ = ["npu_sparse_flash_attention_grad_pto"]


@public_function
def npu_sparse_flash_attention_grad_pto(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    d_out: Tensor,
    out: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    scale_value: float,
    sparse_block_size: int = 1,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    actual_seq_qlen: Tensor | None = None,
    actual_seq_kvlen: Tensor | None = None,
    layout: str = "BSND",
    sparse_mode: int = 3,
    *,
    layout_kv: str | None = None,
    block_table: Tensor | None = None,
    sinks: Tensor | None = None,
    **standard: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # type: ignore[empty-body]
    r"""Gradients of :func:`npu_sparse_flash_attention_pto`, from the statistics of its softmax.

    .. math:: P_{hj} &= \exp(s\,(q_h \cdot c_j + q^R_h \cdot k^R_j) - \max_h) / \mathrm{sum}_h

        dP_{hj} &= dO_h \cdot v_j, \quad D_h = \sum_j P_{hj}\,dP_{hj}

        dS_{hj} &= s\,P_{hj}\,(dP_{hj} - D_h), \quad dq_h = \sum_j dS_{hj}\,c_j, \quad
        dc_j = \sum_{t,h} dS_{hj}\,q_h + P_{hj}\,dO_h

    with the keys j that a token attends to, as often as its indices name them; the second term of
    :math:`dc_j` is :math:`dv_j` if there is a value. Sums are float32, of one order each: the bits
    do not depend on the number of threads. D comes from P and dP, not from the rounded ``out``,
    whose error would reach dq (docs/npu_sparse_flash_attention_grad_pto.md).

    Args:
        query: as for the forward, like ``key``, ``value``, ``sparse_indices``, ``scale_value``,
            ``sparse_block_size``, ``query_rope``, ``key_rope``, ``sparse_mode``, ``block_table``
            and ``sinks``.
        d_out: gradient of the forward's output; shape and dtype of ``query``.
        out: that output. Not read; torch_npu's op has it, too.
        softmax_max: statistics of the forward with ``return_softmax_lse``; float32
            ``[B, 1, S1, N1]`` or ``[1, T1, N1]``.
        softmax_sum: likewise.
        actual_seq_qlen: ``actual_seq_lengths_query`` of the forward.
        actual_seq_kvlen: ``actual_seq_lengths_kv`` of the forward.
        layout: ``layout_query`` of the forward.
        layout_kv: that of the forward; None: as ``layout``.
        standard: the remaining keywords of ``torch_npu.npu_sparse_flash_attention_grad``, each with
            its only supported value: ``attention_mode`` 2, ``pre_tokens`` and ``next_tokens``
            2**63 - 1.
    Returns:
        ``d_query``, ``d_key``, ``d_value``, ``d_query_rope``, ``d_key_rope`` and ``d_sinks``, of
        the shape and dtype of their tensor; without elements for an absent one. Padding, tokens
        without a valid index, and rows that no token selects get zeros. Rows of a paged cache get
        the sum over all sequences that share them.
    Raises:
        RuntimeError: a constraint above is violated; the message names the argument. On an NPU: it
            has no program of this op yet.

    Example:
        >>> import torch
        >>> from custom_pypto import npu_sparse_flash_attention_pto
        >>> rows = torch.eye(16)[None, :, None]
        >>> indices = torch.tensor([[[[1, 3, -1]]]], dtype=torch.int32)
        >>> call = dict(layout_kv="BSND", sparse_mode=0, return_softmax_lse=True)
        >>> query = torch.zeros(1, 1, 1, 16)
        >>> result = npu_sparse_flash_attention_pto(query, rows, None, indices, 1.0, **call)
        >>> d_query, *_ = npu_sparse_flash_attention_grad_pto(
        ...     query, rows, None, indices, rows[:, 1:2], *result, 1.0, sparse_mode=0
        ... )
        >>> d_query[0, 0, 0, :5]
        tensor([ 0.0000,  0.2500,  0.0000, -0.2500,  0.0000])
    """
