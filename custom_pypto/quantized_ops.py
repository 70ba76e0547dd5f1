"""The ops on int8 caches. :mod:`custom_pypto.ops` exports them and explains letters and layouts."""

from typing import Literal

from torch import Tensor
from typing_extensions import Unpack  # torch brings it

from .schemas import op_function
from .standard import Int8Window, KeyLayout, Layout, OwnDtypesWindow

__all__ = [
    "npu_kv_quant_sparse_flash_attention_pto",
    "npu_kv_quant_update_pto",
    "npu_lightning_indexer_prolog_pto",
    "npu_quant_index_update_pto",
    "npu_quant_lightning_indexer_pto",
    "npu_quant_rows_pto",
]


@op_function
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
    layout_query: Layout = "BSND",
    layout_key: KeyLayout = "PA_BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    **standard: Unpack[Int8Window],
) -> Tensor:
    r""":func:`npu_lightning_indexer_pto` over int8 rows, each with a scale.

    The score of key ``j`` for query token ``i`` is
    :math:`s^K_j \sum_h w_{i,h}\,s^Q_{i,h}\,\mathrm{ReLU}(q_{i,h} \cdot k_j)`. The integer products
    are exact, sums over heads in float32. The scales stay outside of the ReLU; where they are not
    negative, this is the indexer of the dequantized rows. Arguments, order of axes and names are
    those of ``torch_npu.npu_quant_lightning_indexer``.

    Args:
        query: ``[B, S1, N1, D]`` or ``[T1, N1, D]`` by ``layout_query``; int8, any byte; D a
            multiple of 16 up to 1024.
        key: by ``layout_key``; int8; one head; last dim contiguous, other strides arbitrary.
        weights: ``[B, S1, N1]`` or ``[T1, N1]``; bfloat16, float16 or float32.
        query_dequant_scale: of the shape of ``weights``; float16 or float32.
        key_dequant_scale: of the shape of ``key`` without D, as ``[blocks, block_size, 1]``; dtype
            of ``query_dequant_scale``; any strides.
        query_quant_mode: must be 0: int8, one scale per row; key_quant_mode: the same.
        actual_seq_lengths_query: as for :func:`npu_lightning_indexer_pto`, and so are
            ``actual_seq_lengths_key``, ``block_table``, ``sparse_count`` and ``sparse_mode``.
        standard: the remaining keywords of ``torch_npu.npu_quant_lightning_indexer``, each with its
            only supported value: ``pre_tokens`` and ``next_tokens`` 2**63 - 1, ``query_dtype`` and
            ``key_dtype`` None.
    Returns:
        int32 positions as :func:`npu_lightning_indexer_pto` returns them. They differ from those of
        the rows before quantization where scores nearly tie.
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


@op_function
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


@op_function
def npu_quant_index_update_pto(
    x: Tensor,
    slots: Tensor,
    cache: Tensor,
    scale_cache: Tensor,
    *,
    hadamard: Tensor | None = None,
) -> None:
    r"""Quantizes index keys as :func:`npu_quant_rows_pto` and writes them into a paged cache.

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


@op_function
def npu_lightning_indexer_prolog_pto(
    token_x: Tensor,
    q_norm: Tensor,
    q_norm_scale: Tensor | None,
    wq_b: Tensor,
    wq_b_scale: Tensor | None,
    wk: Tensor,
    weights_proj: Tensor,
    ln_gamma_k: Tensor,
    ln_beta_k: Tensor,
    cos_idx_rope: Tensor,
    sin_idx_rope: Tensor,
    hadamard_q: Tensor,
    hadamard_k: Tensor,
    idx_k_cache: Tensor,
    idx_k_scale_cache: Tensor,
    idx_k_cache_index: Tensor,
    layernorm_epsilon_k: float,
    *,
    layout_query: Literal["TND"] = "TND",
    layout_key: Literal["PA_BSND"] = "PA_BSND",
) -> tuple[Tensor, Tensor, Tensor]:
    r"""What the indexer of DeepSeek-V3.2 needs of new tokens, on an int8 cache: queries, weights,
    and their keys in the cache.

    .. math::
        q &= \mathrm{quant}\big(\mathrm{RoPE}(c\,W_{qb})\,H_q\big), \quad
        k = \mathrm{quant}\big(\mathrm{RoPE}(\mathrm{LayerNorm}(x\,W_k))\,H_k\big) \\
        w &= x\,W_w\,(N_1 D)^{-1/2}

    ``quant`` is :func:`npu_quant_rows_pto`. RoPE rotates the pairs ``(i, i + R / 2)`` of the first
    R dims. Every projection and each of its results is rounded to the dtype of ``token_x``, the
    weights only to float16; LayerNorm and RoPE are computed in float32. Name and arguments are
    those of the operator in CANN's inference recipes; docs/npu_lightning_indexer_prolog_pto.md
    lists the differences.

    Args:
        token_x: x, ``[T, H]`` hidden states; bfloat16, float16 or (CPU only) float32.
        q_norm: c, ``[T, Q]``, the query latent after its RMSNorm: of the dtype of ``token_x``, or
            int8 (W8A8), with Q up to 131071.
        q_norm_scale: ``[T]`` or ``[T, 1]`` float32, one scale per token, if ``q_norm`` is int8;
            otherwise None.
        wq_b: ``[Q, N1 * D]`` of the dtype of ``q_norm``; D a multiple of 16 up to 1024.
        wq_b_scale: ``[N1 * D]`` or ``[N1 * D, 1]`` float32, if ``q_norm`` is int8; otherwise None.
        wk: ``[H, D]`` of the dtype of ``token_x``, as all that follow unless stated.
        weights_proj: ``[H, N1]``.
        ln_gamma_k: ``[D]``, weight of the LayerNorm; ``ln_beta_k``, its bias.
        cos_idx_rope: ``[T, R]``, each angle's cosine twice, in two halves; also float32; R a
            multiple of 16 up to D. ``sin_idx_rope``: their sines.
        hadamard_q: ``[D, D]``, rotates queries; ``hadamard_k``, keys: the same orthogonal matrix.
        idx_k_cache: ``[blocks, block_size, 1, D]`` int8, written in place; last dim contiguous,
            other strides arbitrary on the CPU.
        idx_k_scale_cache: ``[blocks, block_size, 1]`` or ``[blocks, block_size, 1, 1]`` float16,
            written in place.
        idx_k_cache_index: ``[T]`` int32 or int64: slots, as of :func:`npu_quant_index_update_pto`.
        layernorm_epsilon_k: finite and at least 0; 1e-6 for DeepSeek-V3.2.
        layout_query: must be ``TND``; layout_key: must be ``PA_BSND``.
    Returns:
        Queries ``[T, N1, D]`` int8, their scales ``[T, N1, 1]`` and weights ``[T, N1]``, both
        float16. For :func:`npu_quant_lightning_indexer_pto`, drop the last dim of the scales.
    Raises:
        RuntimeError: a constraint above is violated; the message names the argument and the caches
            are unchanged.

    Example:
        >>> import torch
        >>> x, w = torch.ones(2, 4), torch.ones(4, 16)
        >>> cache = torch.zeros(1, 16, 1, 16, dtype=torch.int8)
        >>> scales = torch.zeros(1, 16, 1, dtype=torch.float16)
        >>> query, query_scale, weights = npu_lightning_indexer_prolog_pto(
        ...     x,
        ...     q_norm=torch.ones(2, 4),
        ...     q_norm_scale=None,
        ...     wq_b=torch.ones(4, 16),
        ...     wq_b_scale=None,
        ...     wk=w,
        ...     weights_proj=torch.ones(4, 1),
        ...     ln_gamma_k=torch.ones(16),
        ...     ln_beta_k=torch.ones(16),
        ...     cos_idx_rope=torch.ones(2, 16),
        ...     sin_idx_rope=torch.zeros(2, 16),
        ...     hadamard_q=torch.eye(16),
        ...     hadamard_k=torch.eye(16),
        ...     idx_k_cache=cache,
        ...     idx_k_scale_cache=scales,
        ...     idx_k_cache_index=torch.tensor([3, -1]),
        ...     layernorm_epsilon_k=1e-6,
        ... )
        >>> query.shape, query_scale.shape, weights[0]
        (torch.Size([2, 1, 16]), torch.Size([2, 1, 1]), tensor([1.], dtype=torch.float16))
        >>> cache[0, 2:5, 0, 0], scales[0, 3]
        (tensor([  0, 127,   0], dtype=torch.int8), tensor([0.0079], dtype=torch.float16))
    """


@op_function
def npu_kv_quant_sparse_flash_attention_pto(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    key_quant_mode: int,
    value_quant_mode: int,
    *,
    key_dequant_scale: Tensor | None = None,
    value_dequant_scale: Tensor | None = None,
    block_table: Tensor | None = None,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: Layout = "BSND",
    layout_kv: KeyLayout = "PA_BSND",
    sparse_mode: int = 3,
    attention_mode: int = 2,
    quant_scale_repo_mode: int = 1,
    tile_size: int = 128,
    rope_head_dim: int = 64,
    **standard: Unpack[OwnDtypesWindow],
) -> Tensor:
    r"""Attention of each query token over the rows of an int8 cache that its indices select.

    A row of the cache is ``nope | rope | scales``: L int8, R elements of the dtype of ``query``,
    and L / 128 float32 scales, one per tile of 128 int8: 656 bytes for L 512 and R 64. The result
    is that of :func:`npu_sparse_flash_attention_pto`, without sinks, on the dequantized rows

    .. math:: c_{j,d} = \mathrm{round}\big(x_{j,d}\,s_{j, \lfloor d/128 \rfloor}\big)

    products in float32, rounded to the dtype of ``query`` (the cache "C8" of
    ``torch_npu.npu_kv_quant_sparse_flash_attention`` on Atlas A2 and A3).
    :func:`npu_kv_quant_update_pto` writes such rows.

    Args:
        query: ``[B, S1, N1, L + R]`` or ``[T1, N1, L + R]`` by ``layout_query``, the RoPE dims
            last; bfloat16 or float16; L a multiple of 128.
        key: the cache by ``layout_kv``; int8; one head; last dim ``L + 2 * R + L / 32``,
            contiguous, other strides arbitrary.
        value: None or ``key``.
        sparse_indices: ``[B, S1, 1, K]`` or ``[T1, 1, K]`` int32 positions within the sequence, as
            for :func:`npu_sparse_flash_attention_pto`.
        scale_value: s, from 1e-38 to 2e38: ``192**-0.5`` for DeepSeek-V3.2, times mscale squared
            with YaRN; not ``576**-0.5``.
        key_quant_mode: must be 2, a scale per token and tile; value_quant_mode: the same.
        key_dequant_scale: must be None: rows hold their scales; value_dequant_scale: the same.
        block_table: ``[B, blocks per sequence]`` int32, for a paged cache only.
        actual_seq_lengths_query: ``[B]`` int32 query tokens of each sequence; ``TND``: prefix sums.
        actual_seq_lengths_kv: ``[B]`` int32 keys of each sequence; ``TND``: prefix sums.
        sparse_block_size: must be 1.
        sparse_mode: as for :func:`npu_lightning_indexer_pto`.
        attention_mode: must be 2, MLA with absorbed up-projections.
        quant_scale_repo_mode: must be 1: scales are part of the rows.
        tile_size: must be 128.
        rope_head_dim: R, a multiple of 16.
        standard: the remaining keywords of ``torch_npu.npu_kv_quant_sparse_flash_attention``, each
            with its only supported value: ``pre_tokens`` and ``next_tokens`` 2**63 - 1,
            ``key_dtype`` and ``value_dtype`` None.
    Returns:
        ``[B, S1, N1, L]`` or ``[T1, N1, L]`` of the dtype of ``query``; zeros for padding and
        tokens without a valid index.
    Raises:
        RuntimeError: a constraint above is violated; the message names the argument. ``backward()``
            raises it too: the op has no backward.

    Example:
        >>> import torch
        >>> latent = torch.eye(16, 128, dtype=torch.bfloat16)  # 16 rows
        >>> cache = torch.zeros(1, 16, 1, 128 + 2 * 16 + 4, dtype=torch.int8)
        >>> npu_kv_quant_update_pto(latent, torch.zeros(16, 16).bfloat16(), torch.arange(16), cache)
        >>> out = npu_kv_quant_sparse_flash_attention_pto(
        ...     torch.zeros(1, 1, 1, 128 + 16, dtype=torch.bfloat16),
        ...     cache,
        ...     None,
        ...     torch.tensor([[[[1, 3, -1]]]], dtype=torch.int32),
        ...     1.0,
        ...     key_quant_mode=2,
        ...     value_quant_mode=2,
        ...     actual_seq_lengths_kv=torch.tensor([16], dtype=torch.int32),
        ...     block_table=torch.tensor([[0]], dtype=torch.int32),
        ...     rope_head_dim=16,
        ... )
        >>> out[0, 0, 0, :5]
        tensor([0.0000, 0.5000, 0.0000, 0.5000, 0.0000], dtype=torch.bfloat16)
    """


@op_function
def npu_kv_quant_update_pto(latent: Tensor, rope: Tensor, slots: Tensor, cache: Tensor) -> None:
    r"""Quantizes key rows into a cache of :func:`npu_kv_quant_sparse_flash_attention_pto`.

    Each tile of 128 elements of ``latent`` is quantized by the formula of
    :func:`npu_quant_rows_pto`, with a float32 scale; ``rope`` is stored as it is. A row is
    ``nope | rope | scales``.

    Args:
        latent: ``[.., L]`` bfloat16 or float16; L a multiple of 128.
        rope: ``[.., R]`` of the dtype of ``latent``; R a multiple of 16.
        slots: the shape of ``latent`` without L, int32 or int64: slot ``block * block_size + row``
            of each row; a row whose slot is outside the cache (-1: padding) is not written, and of
            rows with the same slot the last one stays.
        cache: ``[blocks, block_size, 1, L + 2 * R + L / 32]`` int8, written in place.
    Raises:
        RuntimeError: a constraint above is violated; the message names the argument and the cache
            is unchanged.

    Example:
        >>> import torch
        >>> cache = torch.zeros(1, 16, 1, 128 + 2 * 16 + 4, dtype=torch.int8)
        >>> latent = torch.linspace(-1, 1, 128, dtype=torch.bfloat16)[None]
        >>> npu_kv_quant_update_pto(latent, torch.zeros(1, 16).bfloat16(), torch.tensor([3]), cache)
        >>> cache[0, 3, 0, :3]
        tensor([-127, -125, -123], dtype=torch.int8)
    """
