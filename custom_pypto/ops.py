"""The public API: each function calls the op of the same name under ``torch.ops.custom_pypto``; its
docstring is the contract of that op.

Dimensions: B batch, S1 query tokens per sequence, S2 keys per sequence, T1 packed query tokens of
all sequences, N1 query heads, D index head dim (128), L latent dim (``kv_lora_rank``, 512), R rope
dim (64), K ``sparse_count``.

Layouts: ``BSND`` is ``[B, S, N, D]`` with optional token counts ``[B]`` (None: all tokens). ``TND``
is ``[T, N, D]`` and requires inclusive prefix sums ``[B]``. ``PA_BSND`` is a paged cache ``[blocks,
block_size, 1, D]`` and requires ``block_table [B, blocks per sequence]`` and token counts ``[B]``;
``block_size`` is a multiple of 16 up to 1024, blocks may be in any order, and rows past a
sequence's length are never read. All lengths and ids are int32. Keys are paged or have the query's
layout.

Words: a row is what a cache keeps of a token, or of ``cmp_ratio`` tokens; a slot is the place of a
row in the flattened cache; a scale group is the 128 values of an int8 row that share a scale.
docs/architecture.md has the others.

Integer values are not trusted: lengths are clamped to the tensors' capacity, and positions whose
block id is outside the cache are ignored.
"""

# ruff: noqa: F403, F405

from typing import Literal, overload

from torch import Tensor
from typing_extensions import Unpack  # torch brings it

from .quantized_ops import *
from .schemas import op_function
from .standard import (
    AbsorbedWindow,
    AttentionKeywords,
    IndexerKeywords,
    KeyLayout,
    Layout,
    Window,
)
from .training_ops import *
from .weight_ops import *

# spelt out for type checkers; a test compares with the modules
__all__ = [
    "add_custom",
    "npu_dense_lightning_indexer_grad_kl_loss_pto",
    "npu_dense_lightning_indexer_softmax_lse_pto",
    "npu_kv_quant_sparse_flash_attention_pto",
    "npu_kv_quant_update_pto",
    "npu_lightning_indexer_grad_pto",
    "npu_lightning_indexer_prolog_pto",
    "npu_lightning_indexer_pto",
    "npu_quant_index_update_pto",
    "npu_quant_lightning_indexer_pto",
    "npu_quant_rows_pto",
    "npu_sparse_attention_pto",
    "npu_sparse_flash_attention_grad_pto",
    "npu_sparse_flash_attention_pto",
    "npu_sparse_lightning_indexer_grad_kl_loss_pto",
    "weight_only_linear",
]


@op_function
def add_custom(x: Tensor, y: Tensor) -> Tensor:
    """``x + y``, elementwise and differentiable; the minimal op, a template for new ones.

    Args:
        x: any shape; bfloat16, float16, float32 or (CPU only) float64.
        y: shape, dtype and device of ``x``; no broadcasting.
    Returns:
        Tensor of the same shape and dtype.
    Raises:
        RuntimeError: a constraint above is violated; the message names the argument.

    Example:
        >>> import torch
        >>> add_custom(torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.5]))
        tensor([1.5000, 2.5000])
    """


@overload
def npu_lightning_indexer_pto(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    return_value: Literal[False] = False,
    **keywords: Unpack[IndexerKeywords],
) -> Tensor: ...


@overload
def npu_lightning_indexer_pto(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    return_value: Literal[True],
    **keywords: Unpack[IndexerKeywords],
) -> tuple[Tensor, Tensor]: ...


@overload
def npu_lightning_indexer_pto(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    return_value: bool,
    **keywords: Unpack[IndexerKeywords],
) -> Tensor | tuple[Tensor, Tensor]: ...


@op_function
def npu_lightning_indexer_pto(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    layout_query: Layout = "BSND",
    layout_key: KeyLayout = "PA_BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    cmp_ratio: int = 1,
    return_value: bool = False,
    **standard: Unpack[Window],
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Positions of the ``sparse_count`` highest-scoring keys of each query token.

    The score of key ``j`` for query token ``i`` is
    :math:`\sum_h w_{i,h}\,\mathrm{ReLU}(q_{i,h} \cdot k_j)`, products and sums in float32
    (lightning indexer of DeepSeek-V3.2, arXiv:2512.02556). Weights may be negative.

    Args:
        query: ``[B, S1, N1, D]`` or ``[T1, N1, D]`` by ``layout_query``; bfloat16, float16 or (CPU
            only) float32, RoPE already applied. D is a multiple of 16.
        key: by ``layout_key``; dtype of ``query``; one head; last dim contiguous, other strides
            arbitrary.
        weights: ``[B, S1, N1]`` or ``[T1, N1]``; dtype of ``query`` or float32.
        actual_seq_lengths_query: ``[B]`` int32 query tokens of each sequence; ``TND``: prefix sums.
        actual_seq_lengths_key: ``[B]`` int32 keys of each sequence; ``TND``: prefix sums.
        block_table: ``[B, blocks per sequence]`` int32, for a paged cache only.
        sparse_count: K, 1 to 2048, or 3072 to 8192 in steps of 1024.
        sparse_mode: 3: causal and right-aligned, token ``i`` of ``len_q`` sees keys
            ``j <= len_k - len_q + i``; 0: every key of the sequence.
        cmp_ratio: r, 1 to 128: ``key`` has one row per r tokens, as in the compressed sparse
            attention of DeepSeek-V4, and ``actual_seq_lengths_key`` still counts tokens. A sequence
            of ``len_k`` tokens has ``len_k // r`` rows, of which token ``i`` sees the first
            ``(len_k - len_q + i + 1) // r``, those whose tokens are all known to it; with
            ``sparse_mode`` 0, all. Positions are rows of the sequence. For ``TND``, its rows follow
            those of the sequences before it.
        return_value: return the scores of the positions too.
        standard: the remaining keywords of ``torch_npu.npu_lightning_indexer``, each with its only
            supported value: ``pre_tokens`` and ``next_tokens`` 2**63 - 1.
    Returns:
        ``[B, S1, 1, K]`` or ``[T1, 1, K]`` int32 positions within the sequence (not rows of
        ``key``), best first, ties by ascending position; deterministic on every run and for any
        number of threads. ``-1`` pads the row of a token that sees fewer than K keys; rows of
        padding tokens and of tokens that see no key are all ``-1``. A NaN score ranks first, as in
        ``torch.topk``. With ``return_value`` a tuple of these positions and their scores, in the
        dtype of ``query``, ``-inf`` beside each ``-1``; the scores are differentiable
        (:func:`npu_lightning_indexer_grad_pto`).
    Raises:
        RuntimeError: a constraint above is violated; the message names the argument.

    Example:
        >>> import torch
        >>> query = torch.ones(1, 2, 1, 16)  # two tokens, one head
        >>> key = torch.arange(16.0).repeat(16, 1).T.contiguous()[None, :, None]  # key j holds j
        >>> npu_lightning_indexer_pto(
        ...     query,
        ...     key,
        ...     torch.ones(1, 2, 1),
        ...     actual_seq_lengths_key=torch.tensor([4], dtype=torch.int32),
        ...     block_table=torch.tensor([[0]], dtype=torch.int32),
        ...     sparse_count=4,
        ... )[0, :, 0]
        tensor([[ 2,  1,  0, -1],
                [ 3,  2,  1,  0]], dtype=torch.int32)
    """


@overload
def npu_sparse_flash_attention_pto(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    return_softmax_lse: Literal[False] = False,
    **keywords: Unpack[AttentionKeywords],
) -> Tensor: ...


@overload
def npu_sparse_flash_attention_pto(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    return_softmax_lse: Literal[True],
    **keywords: Unpack[AttentionKeywords],
) -> tuple[Tensor, Tensor, Tensor]: ...


@overload
def npu_sparse_flash_attention_pto(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    return_softmax_lse: bool,
    **keywords: Unpack[AttentionKeywords],
) -> Tensor | tuple[Tensor, Tensor, Tensor]: ...


@op_function
def npu_sparse_flash_attention_pto(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    block_table: Tensor | None = None,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: Layout = "BSND",
    layout_kv: KeyLayout = "PA_BSND",
    sparse_mode: int = 3,
    sinks: Tensor | None = None,
    return_softmax_lse: bool = False,
    **standard: Unpack[AbsorbedWindow],
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    r"""Attention of each query token over the latent-cache rows that its indices select.

    .. math:: o_{i,h} = \sum_{j \in S_i} \mathrm{softmax}_j\big(s\,([q_{i,h} | q^R_{i,h}] \cdot
        [c_j | k^R_j])\big)\, c_j

    with the selection :math:`S_i` = ``sparse_indices[i]``, softmax in float32: multi-head latent
    attention with absorbed up-projections (DeepSeek-V2, arXiv:2405.04434, section 2.1) over the
    keys that the lightning indexer selected (DeepSeek-V3.2, arXiv:2512.02556). A sink is one more
    logit of its head, without a value: it adds :math:`\exp(sink_h)` to the sum that divides
    :math:`\exp(logit_j)`.

    Args:
        query: ``[B, S1, N1, L]`` or ``[T1, N1, L]`` by ``layout_query``; bfloat16, float16 or (CPU
            only) float32; L a multiple of 16.
        key: the latent cache by ``layout_kv``; dtype of ``query``; one head; last dim contiguous,
            other strides arbitrary.
        value: None to use ``key``, or a tensor of the shape of ``key``.
        sparse_indices: ``[B, S1, 1, K]`` or ``[T1, 1, K]`` int32 positions within the sequence, as
            the indexer returns them. ``-1`` ends a row; other positions that the token does not see
            are skipped; a duplicate position counts twice.
        scale_value: s, from 1e-38 to 2e38: ``192**-0.5`` for DeepSeek-V3.2, times mscale squared
            with YaRN; not ``576**-0.5``.
        block_table: ``[B, blocks per sequence]`` int32, for a paged cache only.
        actual_seq_lengths_query: ``[B]`` int32 query tokens of each sequence; ``TND``: prefix sums.
        actual_seq_lengths_kv: ``[B]`` int32 keys of each sequence; ``TND``: prefix sums.
        query_rope: ``[.., N1, R]``; requires ``key_rope``, of the shape of ``key`` with R for L.
        sparse_block_size: must be 1.
        sparse_mode: as for :func:`npu_lightning_indexer_pto`.
        sinks: ``[N1]`` float32, not multiplied by ``scale_value``.
        return_softmax_lse: whether to return the softmax's statistics too.
        standard: the remaining keywords of ``torch_npu.npu_sparse_flash_attention``, each with its
            only supported value: ``attention_mode`` 2, ``pre_tokens`` and ``next_tokens`` 2**63 -
            1.
    Returns:
        Tensor of the shape and dtype of ``query``; zeros for padding and tokens without a valid
        index. With ``return_softmax_lse`` a tuple of it, ``softmax_max``, the largest logit, scaled
        and with the sink, and ``softmax_sum``, the sum of ``exp(logit - softmax_max)``: float32
        ``[B, 1, S1, N1]`` or ``[1, T1, N1]``, ``-inf`` and 0 where the output is zeros for these
        reasons.
    Raises:
        RuntimeError: a constraint above is violated; the message names the argument. ``backward()``
            raises it too, also for a paged cache that requires no gradient.

    Example:
        >>> import torch
        >>> latent = torch.eye(16)[None, :, None]  # one block of 16 rows
        >>> out = npu_sparse_flash_attention_pto(
        ...     torch.zeros(1, 1, 1, 16),
        ...     latent,
        ...     None,
        ...     torch.tensor([[[[1, 3, -1]]]], dtype=torch.int32),
        ...     1.0,
        ...     actual_seq_lengths_kv=torch.tensor([16], dtype=torch.int32),
        ...     block_table=torch.tensor([[0]], dtype=torch.int32),
        ... )
        >>> out[0, 0, 0, :5]
        tensor([0.0000, 0.5000, 0.0000, 0.5000, 0.0000])
    """


@op_function
def npu_sparse_attention_pto(
    x: Tensor,
    w_dq: Tensor,
    w_uq_qr: Tensor,
    w_uk: Tensor,
    w_dkv_kr: Tensor,
    gamma_cq: Tensor,
    gamma_ckv: Tensor,
    sin: Tensor,
    cos: Tensor,
    cache_index: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    block_table: Tensor,
    act_seqs: Tensor,
    w_idx_qb: Tensor,
    w_idx_k: Tensor,
    w_idx_proj: Tensor,
    in_gamma_k: Tensor,
    in_beta_k: Tensor,
    index_k_cache: Tensor,
    *,
    softmax_scale: float | None = None,
    eps: float = 1e-6,
    sparse_count: int = 2048,
) -> Tensor:
    r"""DeepSeek Sparse Attention from hidden states to latent attention output, in one op.

    MLA prolog: :math:`c^Q = \mathrm{RMSNorm}(x W^{DQ})`, :math:`[q^C | q^R] = c^Q W^{UQ,QR}`,
    :math:`q = q^C W^{UK}` per head (absorption), :math:`[c | k^R] = x W^{DKV,KR}`, RMSNorm on c,
    RoPE on :math:`q^R` and :math:`k^R` (interleaved pairs). Indexer prolog: :math:`q^I = c^Q
    W^{I,QB}`, :math:`k^I = \mathrm{LayerNorm}(x W^{I,K})`, RoPE on the first R dims of both
    (half-split pairs), weights :math:`x W^{I,proj} / \sqrt{\text{index heads} \cdot D}` in float32.
    The new rows are written to the caches, then :func:`npu_lightning_indexer_pto` and
    :func:`npu_sparse_flash_attention_pto` run (``sparse_mode`` 3). DeepSeek-V3.2, arXiv:2512.02556.
    GLM-5's indexer rotates interleaved pairs: call the two ops.

    Args:
        x: ``[B, S1, H]`` bfloat16, float16 or (CPU only) float32; every weight and cache has the
            same dtype.
        w_dq: ``[H, Q]``.
        w_uq_qr: ``[Q, N1 * (P + R)]``, P the head dim without RoPE (128).
        w_uk: ``[N1, P, L]``.
        w_dkv_kr: ``[H, L + R]``.
        gamma_cq: ``[Q]`` of the RMSNorm of the query latent; gamma_ckv: ``[L]`` of the key latent.
        sin: ``[B, S1, R]``, the R / 2 angles twice, of the dtype of ``x`` or float32; so is cos.
        cache_index: ``[B, S1]`` int32 or int64: slot ``block * block_size + row`` of each new
            token; a token whose slot is outside the cache (-1: padding) is not written.
        kv_cache: ``[blocks, block_size, 1, L]``; kr_cache: ``[.., R]``, in each row the first
            members of all pairs, then the second; index_k_cache: ``[.., D]``. All three are written
            in place.
        block_table: ``[B, blocks per sequence]`` int32.
        act_seqs: ``[B]`` int32 keys of each sequence, including the new tokens.
        w_idx_qb: ``[Q, index heads * D]``; w_idx_k: ``[H, D]``; w_idx_proj: ``[H, index heads]``.
        in_gamma_k: ``[D]``, in_beta_k: ``[D]`` of the LayerNorm of the index key (eps 1e-6).
        softmax_scale: None for ``(P + R)**-0.5``; with YaRN, pass that value times mscale squared;
            from 1e-38 to 2e38.
        eps: of the two RMSNorms.
        sparse_count: K, as for :func:`npu_lightning_indexer_pto`.
    Returns:
        ``[B, S1, N1, L]`` of the dtype of ``x``.
    Raises:
        RuntimeError: a constraint above is violated; the message names the argument and the caches
            are unchanged. ``backward()`` raises it too: the op has no backward.

    Example:
        >>> import torch
        >>> x, w, gamma = torch.ones(1, 2, 16), torch.eye(16), torch.ones(16)  # two tokens
        >>> sin, slots = torch.zeros(1, 2, 16), torch.arange(2)[None]
        >>> latent, rope, index = (torch.zeros(1, 16, 1, 16) for _ in range(3))
        >>> table, lengths = torch.tensor([[0]]).int(), torch.tensor([2]).int()
        >>> out = npu_sparse_attention_pto(
        ...     x, w, torch.cat([w, w], 1), w[None], torch.cat([w, w], 1), gamma, gamma, sin,
        ...     sin + 1, slots, latent, rope, table, lengths, w, w, gamma[:, None], gamma, gamma,
        ...     index,
        ... )
        >>> out.shape, latent[0, :3, 0, 0]
        (torch.Size([1, 2, 1, 16]), tensor([1.0000, 1.0000, 0.0000]))
    """
