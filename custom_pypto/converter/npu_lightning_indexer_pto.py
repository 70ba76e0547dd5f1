"""``npu_lightning_indexer_pto`` as a node of a GE graph."""

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


@declare_supported(
    [
        Support(
            BF16(2, 2, 4, 128),
            BF16(4, 16, 1, 128),
            BF16(2, 2, 4),
            actual_seq_lengths_query=T([2, 1], dtype=torch.int32),
            actual_seq_lengths_key=T([20, 5], dtype=torch.int32),
            block_table=T([[3, 0], [1, -1]], dtype=torch.int32),
            sparse_count=8,
        ),
        Support(
            F16(3, 4, 128),
            F16(2, 16, 1, 128),
            F32(3, 4),
            actual_seq_lengths_query=T([1, 3], dtype=torch.int32),
            actual_seq_lengths_key=T([5, 16], dtype=torch.int32),
            block_table=T([[1], [0]], dtype=torch.int32),
            layout_query="TND",
            sparse_count=16,
            sparse_mode=0,
        ),
    ]
)
@register_fx_node_ge_converter(torch.ops.custom_pypto.npu_lightning_indexer_pto.default)
def convert_npu_lightning_indexer_pto(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "PA_BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    meta_outputs: TensorSpec = None,
):
    """NB: func: npu_lightning_indexer_pto(Tensor query, Tensor key, Tensor weights, *,
    Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None,
    Tensor? block_table=None, str layout_query="BSND", str layout_key="PA_BSND",
    int sparse_count=2048, int sparse_mode=3) -> Tensor
    """
    refuse(npu.check_npu_lightning_indexer_pto, query, key, block_table, layout_key, sparse_count)
    infer_shapes_anew(query)
    return ops.lightning_indexer_pto(
        query,
        key,
        weights,
        actual_seq_lengths_query,
        actual_seq_lengths_key,
        block_table,
        layout_query=layout_query,
        layout_key=layout_key,
        sparse_count=sparse_count,
        sparse_mode=sparse_mode,
    )
