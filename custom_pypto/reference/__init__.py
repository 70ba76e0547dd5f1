"""What each op means, in plain torch: slow, materialises everything, and is the definition that
the kernels are tested against.
"""

from .add_custom import add_custom
from .npu_lightning_indexer_pto import npu_lightning_indexer_pto
from .npu_sparse_attention_pto import npu_sparse_attention_pto
from .npu_sparse_flash_attention_pto import npu_sparse_flash_attention_pto

__all__ = [
    "add_custom",
    "npu_lightning_indexer_pto",
    "npu_sparse_attention_pto",
    "npu_sparse_flash_attention_pto",
]
