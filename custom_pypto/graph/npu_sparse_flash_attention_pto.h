// GE prototype of custom_pypto::npu_sparse_flash_attention_pto; all floating-point tensors share a
// dtype.
#ifndef CUSTOM_PYPTO_GRAPH_NPU_SPARSE_FLASH_ATTENTION_PTO_H
#define CUSTOM_PYPTO_GRAPH_NPU_SPARSE_FLASH_ATTENTION_PTO_H

#include "graph/operator_reg.h"

namespace ge {

REG_OP(SparseFlashAttentionPto)
    .INPUT(query, TensorType({DT_BF16, DT_FLOAT16}))
    .INPUT(key, TensorType({DT_BF16, DT_FLOAT16}))
    .OPTIONAL_INPUT(value, TensorType({DT_BF16, DT_FLOAT16}))
    .INPUT(sparse_indices, TensorType({DT_INT32}))
    .OPTIONAL_INPUT(block_table, TensorType({DT_INT32}))
    .OPTIONAL_INPUT(actual_seq_lengths_query, TensorType({DT_INT32}))
    .OPTIONAL_INPUT(actual_seq_lengths_kv, TensorType({DT_INT32}))
    .OPTIONAL_INPUT(query_rope, TensorType({DT_BF16, DT_FLOAT16}))
    .OPTIONAL_INPUT(key_rope, TensorType({DT_BF16, DT_FLOAT16}))
    .OUTPUT(attention_out, TensorType({DT_BF16, DT_FLOAT16}))
    .REQUIRED_ATTR(scale_value, Float)
    .ATTR(sparse_block_size, Int, 1)
    .ATTR(layout_query, String, "BSND")
    .ATTR(layout_kv, String, "PA_BSND")
    .ATTR(sparse_mode, Int, 3)
    .OP_END_FACTORY_REG(SparseFlashAttentionPto)

}  // namespace ge

#endif
