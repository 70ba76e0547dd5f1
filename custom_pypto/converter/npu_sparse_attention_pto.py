"""``npu_sparse_attention_pto`` as a node of a GE graph."""

import torch
from torchair._ge_concrete_graph.fx2ge_converter import (
    declare_supported,
    register_fx_node_ge_converter,
)
from torchair._ge_concrete_graph.supported_declaration import BF16, F16, F32, Support, T
from torchair.ge import Tensor, TensorSpec

from .. import npu
from ..graph import ops
from .metadata import infer_shapes_anew, refuse


def _case(floating, angle, *, slots: torch.dtype, **keywords) -> Support:
    hidden, q_rank, heads, nope, latent, rope = 32, 16, 2, 16, 32, 16
    index_heads, index_dim = 4, 128
    return Support(
        floating(2, 1, hidden),
        floating(hidden, q_rank),
        floating(q_rank, heads * (nope + rope)),
        floating(heads, nope, latent),
        floating(hidden, latent + rope),
        floating(q_rank),
        floating(latent),
        angle(2, 1, rope),
        angle(2, 1, rope),
        T([[3], [20]], dtype=slots),
        floating(4, 16, 1, latent),
        floating(4, 16, 1, rope),
        T([[3, 0], [1, -1]], dtype=torch.int32),
        T([20, 5], dtype=torch.int32),
        floating(q_rank, index_heads * index_dim),
        floating(hidden, index_dim),
        floating(hidden, index_heads),
        floating(index_dim),
        floating(index_dim),
        floating(4, 16, 1, index_dim),
        **keywords,
    )


@declare_supported(
    [
        _case(BF16, BF16, slots=torch.int32, sparse_count=8),
        _case(F16, F32, slots=torch.int64, softmax_scale=0.25, eps=1e-5, sparse_count=16),
    ]
)
@register_fx_node_ge_converter(torch.ops.custom_pypto.npu_sparse_attention_pto.default)
def convert_npu_sparse_attention_pto(
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
    meta_outputs: TensorSpec = None,
):
    """NB: func: npu_sparse_attention_pto(Tensor x, Tensor w_dq, Tensor w_uq_qr, Tensor w_uk,
    Tensor w_dkv_kr, Tensor gamma_cq, Tensor gamma_ckv, Tensor sin, Tensor cos,
    Tensor cache_index, Tensor(a!) kv_cache, Tensor(b!) kr_cache, Tensor block_table,
    Tensor act_seqs, Tensor w_idx_qb, Tensor w_idx_k, Tensor w_idx_proj, Tensor in_gamma_k,
    Tensor in_beta_k, Tensor(c!) index_k_cache, *, float? softmax_scale=None,
    float eps=1e-06, int sparse_count=2048) -> Tensor
    """
    refuse(
        npu.check_npu_sparse_attention_pto,
        x,
        w_dq,
        w_uk,
        kv_cache,
        kr_cache,
        block_table,
        w_idx_k,
        w_idx_proj,
        index_k_cache,
        sparse_count,
    )
    infer_shapes_anew(x)
    # the caches are outputs of the node, by which torchair knows that it writes them, and not
    # of the op
    return ops.sparse_attention_pto(
        x,
        w_dq,
        w_uq_qr,
        w_uk,
        w_dkv_kr,
        gamma_cq,
        gamma_ckv,
        sin,
        cos,
        cache_index,
        kv_cache,
        kr_cache,
        block_table,
        act_seqs,
        w_idx_qb,
        w_idx_k,
        w_idx_proj,
        in_gamma_k,
        in_beta_k,
        index_k_cache,
        softmax_scale=0.0 if softmax_scale is None else softmax_scale,  # see the prototype
        eps=eps,
        sparse_count=sparse_count,
    )[0]
