"""``npu_sparse_flash_attention_pto`` as a node of a GE graph."""

import torch
from torchair._ge_concrete_graph.fx2ge_converter import (
    declare_supported,
    register_fx_node_ge_converter,
)
from torchair._ge_concrete_graph.supported_declaration import BF16, F16, I32, Support, T
from torchair.ge import Tensor, TensorSpec

from .. import npu
from ..graph import ops
from .metadata import infer_shapes_anew, refuse


@declare_supported(
    [
        Support(
            BF16(2, 2, 4, 32),
            BF16(4, 16, 1, 32),
            None,
            I32(2, 2, 1, 8, value_range=(0, 20)),
            0.125,
            block_table=T([[3, 0], [1, -1]], dtype=torch.int32),
            actual_seq_lengths_query=T([2, 1], dtype=torch.int32),
            actual_seq_lengths_kv=T([20, 5], dtype=torch.int32),
            query_rope=BF16(2, 2, 4, 16),
            key_rope=BF16(4, 16, 1, 16),
        ),
        Support(
            F16(3, 4, 32),
            F16(2, 16, 1, 32),
            F16(2, 16, 1, 32),
            I32(3, 1, 8, value_range=(0, 16)),
            0.25,
            block_table=T([[1], [0]], dtype=torch.int32),
            actual_seq_lengths_query=T([1, 3], dtype=torch.int32),
            actual_seq_lengths_kv=T([5, 16], dtype=torch.int32),
            layout_query="TND",
            sparse_mode=0,
        ),
    ]
)
@register_fx_node_ge_converter(torch.ops.custom_pypto.npu_sparse_flash_attention_pto.default)
def convert_npu_sparse_flash_attention_pto(
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
    layout_query: str = "BSND",
    layout_kv: str = "PA_BSND",
    sparse_mode: int = 3,
    meta_outputs: TensorSpec = None,
):
    """NB: func: npu_sparse_flash_attention_pto(Tensor query, Tensor key, Tensor? value,
    Tensor sparse_indices, float scale_value, *, Tensor? block_table=None,
    Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_kv=None,
    Tensor? query_rope=None, Tensor? key_rope=None, int sparse_block_size=1,
    str layout_query="BSND", str layout_kv="PA_BSND", int sparse_mode=3) -> Tensor
    """
    refuse(
        npu.check_npu_sparse_flash_attention_pto,
        query,
        key,
        value,
        key_rope,
        block_table,
        layout_kv,
    )
    infer_shapes_anew(query)
    return ops.sparse_flash_attention_pto(
        query,
        key,
        value,
        sparse_indices,
        block_table,
        actual_seq_lengths_query,
        actual_seq_lengths_kv,
        query_rope,
        key_rope,
        scale_value=scale_value,
        sparse_block_size=sparse_block_size,
        layout_query=layout_query,
        layout_kv=layout_kv,
        sparse_mode=sparse_mode,
    )
