"""A node of each GE operator of the package, by functions typed after the prototypes.

Generated from the headers in this folder by ``python -m custom_pypto.graph``; do not edit. The
first call imports torchair, which needs torch_npu; importing this module needs neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchair.ge import Tensor

__all__ = [
    "add_custom",
    "lightning_indexer_pto",
    "sparse_attention_pto",
    "sparse_flash_attention_pto",
]


def add_custom(
    self: Tensor,
    other: Tensor,
) -> Tensor:
    """GE operator ``AddCustom``, prototype add_custom.h.

    Meaning and shapes: :func:`custom_pypto.add_custom`.

    Args:
        self: bfloat16, float16 or float32.
        other: bfloat16, float16 or float32.
    Returns:
        out: bfloat16, float16 or float32.
    """
    from torchair import ge

    return ge.custom_op(
        "AddCustom",
        inputs={
            "self": self,
            "other": other,
        },
        outputs=[
            "out",
        ],
    )


def lightning_indexer_pto(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    *,
    layout_query: str = "BSND",
    layout_key: str = "PA_BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
) -> Tensor:
    """GE operator ``LightningIndexerPto``, prototype npu_lightning_indexer_pto.h.

    Meaning and shapes: :func:`custom_pypto.npu_lightning_indexer_pto`.

    Args:
        query: bfloat16 or float16.
        key: bfloat16 or float16.
        weights: bfloat16, float16 or float32.
        actual_seq_lengths_query: int32, or None.
        actual_seq_lengths_key: int32, or None.
        block_table: int32, or None.
    Returns:
        sparse_indices: int32.
    """
    from torchair import ge

    return ge.custom_op(
        "LightningIndexerPto",
        inputs={
            "query": query,
            "key": key,
            "weights": weights,
            "actual_seq_lengths_query": actual_seq_lengths_query,
            "actual_seq_lengths_key": actual_seq_lengths_key,
            "block_table": block_table,
        },
        attrs={
            "layout_query": ge.attr.Str(layout_query),
            "layout_key": ge.attr.Str(layout_key),
            "sparse_count": ge.attr.Int(sparse_count),
            "sparse_mode": ge.attr.Int(sparse_mode),
        },
        outputs=[
            "sparse_indices",
        ],
    )


def sparse_attention_pto(
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
    softmax_scale: float = 0.0,
    eps: float = 1e-06,
    sparse_count: int = 2048,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """GE operator ``SparseAttentionPto``, prototype npu_sparse_attention_pto.h.

    Meaning and shapes: :func:`custom_pypto.npu_sparse_attention_pto`.

    Args:
        x: bfloat16 or float16.
        w_dq: bfloat16 or float16.
        w_uq_qr: bfloat16 or float16.
        w_uk: bfloat16 or float16.
        w_dkv_kr: bfloat16 or float16.
        gamma_cq: bfloat16 or float16.
        gamma_ckv: bfloat16 or float16.
        sin: bfloat16, float16 or float32.
        cos: bfloat16, float16 or float32.
        cache_index: int32 or int64.
        kv_cache: bfloat16 or float16.
        kr_cache: bfloat16 or float16.
        block_table: int32.
        act_seqs: int32.
        w_idx_qb: bfloat16 or float16.
        w_idx_k: bfloat16 or float16.
        w_idx_proj: bfloat16 or float16.
        in_gamma_k: bfloat16 or float16.
        in_beta_k: bfloat16 or float16.
        index_k_cache: bfloat16 or float16.
    Returns:
        attention_out: bfloat16 or float16.
        kv_cache: bfloat16 or float16, the input, written in place.
        kr_cache: bfloat16 or float16, the input, written in place.
        index_k_cache: bfloat16 or float16, the input, written in place.
    """
    from torchair import ge

    return ge.custom_op(
        "SparseAttentionPto",
        inputs={
            "x": x,
            "w_dq": w_dq,
            "w_uq_qr": w_uq_qr,
            "w_uk": w_uk,
            "w_dkv_kr": w_dkv_kr,
            "gamma_cq": gamma_cq,
            "gamma_ckv": gamma_ckv,
            "sin": sin,
            "cos": cos,
            "cache_index": cache_index,
            "kv_cache": kv_cache,
            "kr_cache": kr_cache,
            "block_table": block_table,
            "act_seqs": act_seqs,
            "w_idx_qb": w_idx_qb,
            "w_idx_k": w_idx_k,
            "w_idx_proj": w_idx_proj,
            "in_gamma_k": in_gamma_k,
            "in_beta_k": in_beta_k,
            "index_k_cache": index_k_cache,
        },
        attrs={
            "softmax_scale": ge.attr.Float(softmax_scale),
            "eps": ge.attr.Float(eps),
            "sparse_count": ge.attr.Int(sparse_count),
        },
        outputs=[
            "attention_out",
            "kv_cache",
            "kr_cache",
            "index_k_cache",
        ],
    )


def sparse_flash_attention_pto(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    block_table: Tensor | None = None,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    *,
    scale_value: float,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "PA_BSND",
    sparse_mode: int = 3,
) -> Tensor:
    """GE operator ``SparseFlashAttentionPto``, prototype npu_sparse_flash_attention_pto.h.

    Meaning and shapes: :func:`custom_pypto.npu_sparse_flash_attention_pto`.

    Args:
        query: bfloat16 or float16.
        key: bfloat16 or float16.
        value: bfloat16 or float16, or None.
        sparse_indices: int32.
        block_table: int32, or None.
        actual_seq_lengths_query: int32, or None.
        actual_seq_lengths_kv: int32, or None.
        query_rope: bfloat16 or float16, or None.
        key_rope: bfloat16 or float16, or None.
    Returns:
        attention_out: bfloat16 or float16.
    """
    from torchair import ge

    return ge.custom_op(
        "SparseFlashAttentionPto",
        inputs={
            "query": query,
            "key": key,
            "value": value,
            "sparse_indices": sparse_indices,
            "block_table": block_table,
            "actual_seq_lengths_query": actual_seq_lengths_query,
            "actual_seq_lengths_kv": actual_seq_lengths_kv,
            "query_rope": query_rope,
            "key_rope": key_rope,
        },
        attrs={
            "scale_value": ge.attr.Float(scale_value),
            "sparse_block_size": ge.attr.Int(sparse_block_size),
            "layout_query": ge.attr.Str(layout_query),
            "layout_kv": ge.attr.Str(layout_kv),
            "sparse_mode": ge.attr.Int(sparse_mode),
        },
        outputs=[
            "attention_out",
        ],
    )
