"""The public ops for training, a part of :mod:`custom_pypto.ops`, whose words they use.

``backward()`` through the differentiable ops calls their gradients, which are public for callers
with an autograd function of their own. The divergences that train an indexer return their gradients
beside the loss.
"""

from torch import Tensor
from typing_extensions import Unpack  # torch brings it

from .schemas import op_function
from .standard import AbsorbedWindow, KeyLayout, Layout, NoSinksWindow, Window

__all__ = [
    "npu_dense_lightning_indexer_grad_kl_loss_pto",
    "npu_dense_lightning_indexer_softmax_lse_pto",
    "npu_lightning_indexer_grad_pto",
    "npu_sparse_flash_attention_grad_pto",
    "npu_sparse_lightning_indexer_grad_kl_loss_pto",
]


@op_function
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
    layout: Layout = "BSND",
    sparse_mode: int = 3,
    *,
    layout_kv: KeyLayout | None = None,
    block_table: Tensor | None = None,
    sinks: Tensor | None = None,
    **standard: Unpack[AbsorbedWindow],
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
        query: ``[B, S1, N1, L]`` or ``[T1, N1, L]`` by ``layout``; of the forward, as all that has
            a name there.
        key: ``[B, S2, 1, L]``, ``[T2, 1, L]`` or ``[blocks, block_size, 1, L]`` by ``layout_kv``.
        value: None, or of the shape of ``key``.
        sparse_indices: ``[B, S1, 1, K]`` or ``[T1, 1, K]`` int32.
        d_out: gradient of the forward's output; shape and dtype of ``query``.
        out: that output. Not read; torch_npu's op has it, too.
        softmax_max: statistics of the forward with ``return_softmax_lse``; float32
            ``[B, 1, S1, N1]`` or ``[1, T1, N1]``.
        softmax_sum: of shape and dtype of ``softmax_max``, from the same forward.
        scale_value: s; ``sparse_block_size``: must be 1; ``sparse_mode``: 3 or 0.
        query_rope: None, or ``[.., N1, R]``; ``key_rope``: of the shape of ``key`` with R for L.
        actual_seq_qlen: ``[B]`` int32, ``actual_seq_lengths_query`` of the forward.
        actual_seq_kvlen: ``[B]`` int32, ``actual_seq_lengths_kv`` of the forward.
        layout: ``layout_query`` of the forward.
        layout_kv: that of the forward; None: as ``layout``.
        block_table: ``[B, blocks per sequence]`` int32, for a paged cache only.
        sinks: None, or ``[N1]`` float32.
        standard: the remaining keywords of ``torch_npu.npu_sparse_flash_attention_grad``, each with
            its only supported value: ``attention_mode`` 2, ``pre_tokens`` and ``next_tokens``
            2**63 - 1.
    Returns:
        ``d_query``, ``d_key``, ``d_value``, ``d_query_rope``, ``d_key_rope`` and ``d_sinks``, of
        the shape and dtype of their tensor; without elements for an absent one. Padding, tokens
        without a valid index, and rows that no token selects get zeros. Rows of a paged cache get
        the sum over all sequences that share them.
    Raises:
        RuntimeError: a constraint above is violated, or on an NPU a limit of its program; the
            message names the argument.

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


@op_function
def npu_lightning_indexer_grad_pto(
    query: Tensor,
    key: Tensor,
    dy: Tensor,
    sparse_indices: Tensor,
    weights: Tensor,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    layout: Layout = "BSND",
    sparse_mode: int = 3,
    *,
    layout_key: KeyLayout | None = None,
    block_table: Tensor | None = None,
    cmp_ratio: int = 1,
    **standard: Unpack[Window],
) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[empty-body]
    r"""Gradients of :func:`npu_lightning_indexer_pto`, from those of the selected scores.

    .. math:: a_{hj} &= q_h \cdot k_j, \quad I_j = \sum_h w_h\,\mathrm{ReLU}(a_{hj})

        dw_h &= \sum_j dI_j\,\mathrm{ReLU}(a_{hj}), \quad da_{hj} = dI_j\,w_h\,[a_{hj} > 0]

        dq_h &= \sum_j da_{hj}\,k_j, \quad dk_j = \sum_{t,h} da_{hj}\,q_h

    with the keys j that the indices of a token name, as often as they do. Sums are float32, of one
    order each: the bits do not depend on the number of threads.

    Args:
        query: ``[B, S1, N1, D]`` or ``[T1, N1, D]`` by ``layout``; of the forward, as all that has
            a name there.
        key: ``[B, S2, 1, D]``, ``[T2, 1, D]`` or ``[blocks, block_size, 1, D]`` by ``layout_key``.
        dy: gradients of the scores; shape of ``sparse_indices``, dtype of ``query`` or float32. One
            beside an index without a key is not read.
        sparse_indices: ``[B, S1, 1, K]`` or ``[T1, 1, K]`` int32, of the forward, or any others,
            read as :func:`npu_sparse_flash_attention_pto` does.
        weights: ``[B, S1, N1]`` or ``[T1, N1]``; dtype of ``query`` or float32.
        actual_seq_lengths_query: ``[B]`` int32 query tokens of each sequence; ``TND``: prefix sums.
        actual_seq_lengths_key: ``[B]`` int32 keys of each sequence; ``TND``: prefix sums.
        layout: ``layout_query`` of the forward.
        sparse_mode: 3 or 0, of the forward, as is ``cmp_ratio``.
        layout_key: that of the forward; None: as ``layout``.
        block_table: ``[B, blocks per sequence]`` int32, for a paged cache only.
        standard: the remaining keywords of ``torch_npu.npu_lightning_indexer_grad``, each with its
            only supported value: ``pre_tokens`` and ``next_tokens`` 2**63 - 1.
    Returns:
        ``d_query``, ``d_key`` and ``d_weights``, of the shape and dtype of their tensor. Padding,
        tokens without a valid index, and keys that no token selects get zeros.
    Raises:
        RuntimeError: a constraint above is violated, or on an NPU a limit of its program; the
            message names the argument.

    Example:
        >>> import torch
        >>> rows = torch.eye(16)[None, :, None]
        >>> indices = torch.tensor([[[[1, 3, -1]]]], dtype=torch.int32)
        >>> dy = torch.tensor([[[[1.0, 2.0, 0.0]]]])
        >>> query, weights = torch.ones(1, 1, 1, 16), torch.full((1, 1, 1), 0.5)
        >>> d_query, _, d_weights = npu_lightning_indexer_grad_pto(
        ...     query, rows, dy, indices, weights, sparse_mode=0
        ... )
        >>> d_query[0, 0, 0, :5], d_weights.item()
        (tensor([0.0000, 0.5000, 0.0000, 1.0000, 0.0000]), 3.0)
    """


@op_function
def npu_sparse_lightning_indexer_grad_kl_loss_pto(
    query: Tensor,
    key: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    sparse_indices: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    scale_value: float,
    *,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_klen: list[int] | None = None,
    layout: Layout = "BSND",
    sparse_mode: int = 3,
    cmp_ratio: int = 1,
    **standard: Unpack[NoSinksWindow],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # type: ignore[empty-body]
    r"""Loss of an indexer over its selection, and the loss's gradients: the divergence from the
    sparse attention (DeepSeek-V3.2, arXiv:2512.02556, section 2.1).

    .. math:: P_{hj} &= \exp(s\,(q_h \cdot c_j + q^R_h \cdot k^R_j) - \max_h) / \mathrm{sum}_h,
        \quad p_j = \sum_h P_{hj} \Big/ \sum_{h,i} P_{hi}

        L &= \sum_t \sum_j p_j\,(\log p_j - \log \mathrm{softmax}_j(I)), \quad
        dI_j = \mathrm{softmax}_j(I) - p_j

    with the scores I of :func:`npu_lightning_indexer_pto` and both softmaxes over the keys that the
    indices of a token name. p is a constant. From dI the gradients are those of
    :func:`npu_lightning_indexer_grad_pto`. Loss and gradients are sums over tokens, not means.

    Args:
        query: of the attention, ``[B, S1, N1, L]`` or ``[T1, N1, L]`` by ``layout``.
        key: of the attention, ``[B, S2, 1, L]`` or ``[T2, 1, L]``; dtype of ``query``.
        query_index: of the indexer, ``[B, S1, N, D]`` or ``[T1, N, D]``; dtype of ``query``.
        key_index: of the indexer, ``[B, S2, 1, D]`` or ``[T2, 1, D]``; dtype of ``query``.
        weights: of the indexer, ``[B, S1, N]`` or ``[T1, N]``; dtype of ``query`` or float32.
        sparse_indices: ``[B, S1, 1, K]`` or ``[T1, 1, K]`` int32.
        softmax_max: statistics of the attention with ``return_softmax_lse``; float32
            ``[B, 1, S1, N1]`` or ``[1, T1, N1]``. They may be of more keys than the indices name,
            and hold the sinks.
        softmax_sum: of shape and dtype of ``softmax_max``, from the same attention.
        scale_value: s of the attention.
        query_rope: None, or ``[.., N1, R]``; ``key_rope``: of the shape of ``key`` with R for L.
        actual_seq_qlen: query tokens of each sequence, integers on the host; ``TND``: prefix sums.
        actual_seq_klen: keys of each sequence, in the same form.
        layout: ``BSND`` or ``TND``, of queries and keys.
        sparse_mode: 3 or 0, as for :func:`npu_lightning_indexer_pto`.
        cmp_ratio: as for the indexer: both keys have one row per so many tokens.
        standard: the remaining keywords of
            ``torch_npu.npu_sparse_lightning_indexer_grad_kl_loss``, each with its only supported
            value: ``pre_tokens`` and ``next_tokens`` 2**63 - 1, ``sinks`` None.
    Returns:
        ``d_query_index``, ``d_key_index`` and ``d_weights``, of the shape and dtype of their
        tensor, and ``loss``, float32 ``[1]``. Padding and tokens without a valid index add nothing.
    Raises:
        RuntimeError: a constraint above is violated, or on an NPU a limit of its program; the
            message names the argument.

    Example:
        >>> import torch
        >>> rows = torch.eye(16)[None, :, None]
        >>> indices = torch.tensor([[[[1, 3]]]], dtype=torch.int32)
        >>> query, statistic = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 1, 1)
        >>> *_, d_weights, loss = npu_sparse_lightning_indexer_grad_kl_loss_pto(
        ...     query, rows, rows[:, 1:2], rows, torch.ones(1, 1, 1), indices, statistic,
        ...     statistic + 2, 1.0, sparse_mode=0,
        ... )
        >>> d_weights, loss
        (tensor([[[0.2311]]]), tensor([0.1201]))
    """


@op_function
def npu_dense_lightning_indexer_softmax_lse_pto(
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    *,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_klen: list[int] | None = None,
    layout: Layout = "BSND",
    sparse_mode: int = 3,
    cmp_ratio: int = 1,
    **standard: Unpack[Window],
) -> tuple[Tensor, Tensor]:  # type: ignore[empty-body]
    r"""Statistics of the softmax of an indexer's scores over every key that a token sees, for
    :func:`npu_dense_lightning_indexer_grad_kl_loss_pto`.

    .. math:: \max = \max_j I_j, \quad \mathrm{sum} = \sum_j \exp(I_j - \max)

    Args:
        query_index: of the indexer, ``[B, S1, N, D]`` or ``[T1, N, D]`` by ``layout``.
        key_index: of the indexer, ``[B, S2, 1, D]`` or ``[T2, 1, D]``; dtype of ``query_index``.
        weights: of the indexer, ``[B, S1, N]`` or ``[T1, N]``; dtype of ``query_index`` or float32.
        actual_seq_qlen: query tokens of each sequence, integers on the host; ``TND``: prefix sums.
        actual_seq_klen: keys of each sequence, in the same form.
        layout: ``BSND`` or ``TND``, of queries and keys.
        sparse_mode: 3 or 0, as for :func:`npu_lightning_indexer_pto`.
        cmp_ratio: as for the indexer: ``key_index`` has one row per so many tokens.
        standard: the remaining keywords of ``torch_npu.npu_dense_lightning_indexer_softmax_lse``,
            each with its only supported value: ``pre_tokens`` and ``next_tokens`` 2**63 - 1.
    Returns:
        ``softmax_max_index`` and ``softmax_sum_index``, float32 ``[B, 1, S1]`` or ``[1, T1]``; -inf
        and 0 for padding and for tokens that see no key.
    Raises:
        RuntimeError: a constraint above is violated, or on an NPU a limit of its program; the
            message names the argument.

    Example:
        >>> import torch
        >>> rows = torch.eye(16)[None, :, None]
        >>> npu_dense_lightning_indexer_softmax_lse_pto(
        ...     rows[:, 1:2], rows, torch.ones(1, 1, 1), sparse_mode=0
        ... )
        (tensor([[[1.]]]), tensor([[[6.5182]]]))
    """


@op_function
def npu_dense_lightning_indexer_grad_kl_loss_pto(
    query: Tensor,
    key: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    weights: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    softmax_max_index: Tensor,
    softmax_sum_index: Tensor,
    scale_value: float,
    *,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_klen: list[int] | None = None,
    layout: Layout = "BSND",
    sparse_mode: int = 3,
    cmp_ratio: int = 1,
    **standard: Unpack[Window],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # type: ignore[empty-body]
    r"""Loss of an indexer over every key that a token sees, and the loss's gradients: the
    divergence from dense attention, by which the indexer is warmed up (DeepSeek-V3.2,
    arXiv:2512.02556, section 2.1).

    The formula is that of :func:`npu_sparse_lightning_indexer_grad_kl_loss_pto` with these keys,
    and :math:`p_j = \frac{1}{N_1} \sum_h P_{hj}`, since each head's probabilities add up to 1.
    Keys are read in tiles: memory is linear in tokens and keys.

    Args:
        query: of the attention, ``[B, S1, N1, L]`` or ``[T1, N1, L]`` by ``layout``.
        key: of the attention, ``[B, S2, 1, L]`` or ``[T2, 1, L]``; dtype of ``query``.
        query_index: of the indexer, ``[B, S1, N, D]`` or ``[T1, N, D]``; dtype of ``query``.
        key_index: of the indexer, ``[B, S2, 1, D]`` or ``[T2, 1, D]``; dtype of ``query``.
        weights: of the indexer, ``[B, S1, N]`` or ``[T1, N]``; dtype of ``query`` or float32.
        softmax_max: statistics of attention over every key that a token sees; float32
            ``[B, 1, S1, N1]`` or ``[1, T1, N1]``.
        softmax_sum: of shape and dtype of ``softmax_max``, from the same attention.
        softmax_max_index: of :func:`npu_dense_lightning_indexer_softmax_lse_pto`; float32
            ``[B, 1, S1]`` or ``[1, T1]``.
        softmax_sum_index: of the same op, shape and dtype.
        scale_value: s of the attention.
        query_rope: None, or ``[.., N1, R]``; ``key_rope``: of the shape of ``key`` with R for L.
        actual_seq_qlen: query tokens of each sequence, integers on the host; ``TND``: prefix sums.
        actual_seq_klen: keys of each sequence, in the same form.
        layout: ``BSND`` or ``TND``, of queries and keys.
        sparse_mode: 3 or 0, as for :func:`npu_lightning_indexer_pto`.
        cmp_ratio: as for the indexer: both keys have one row per so many tokens.
        standard: the remaining keywords of ``torch_npu.npu_dense_lightning_indexer_grad_kl_loss``,
            each with its only supported value: ``pre_tokens`` and ``next_tokens`` 2**63 - 1.
    Returns:
        ``d_query_index``, ``d_key_index``, ``d_weights`` and ``loss``, as that op.
    Raises:
        RuntimeError: a constraint above is violated, or on an NPU a limit of its program; the
            message names the argument.

    Example:
        >>> import torch
        >>> rows = torch.eye(16)[None, :, None]
        >>> index = rows[:, 1:2], rows, torch.ones(1, 1, 1)
        >>> of_index = npu_dense_lightning_indexer_softmax_lse_pto(*index, sparse_mode=0)
        >>> query, statistic = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 1, 1)
        >>> *_, loss = npu_dense_lightning_indexer_grad_kl_loss_pto(
        ...     query, rows, *index, statistic, statistic + 16, *of_index, 1.0, sparse_mode=0
        ... )
        >>> loss
        tensor([0.0395])
    """
