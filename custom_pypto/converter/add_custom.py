"""``add_custom`` as a node of a GE graph."""

import torch
from torchair._ge_concrete_graph.fx2ge_converter import (
    declare_supported,
    register_fx_node_ge_converter,
)
from torchair._ge_concrete_graph.supported_declaration import BF16, F16, F32, Support
from torchair.ge import Tensor, TensorSpec

from .. import npu
from ..graph import ops
from .metadata import infer_shapes_anew, refuse


@declare_supported(
    [
        Support(F32(2, 3), F32(2, 3)),
        Support(F16(4, 1, 5), F16(4, 1, 5)),
        Support(BF16(16), BF16(16)),
    ]
)
@register_fx_node_ge_converter(torch.ops.custom_pypto.add_custom.default)
def convert_add_custom(self: Tensor, other: Tensor, meta_outputs: TensorSpec = None):
    """NB: func: add_custom(Tensor self, Tensor other) -> Tensor"""
    refuse(npu.check_add_custom, self)
    infer_shapes_anew(self)
    return ops.add_custom(self, other)
