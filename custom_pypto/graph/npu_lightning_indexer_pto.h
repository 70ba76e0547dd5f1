// GE prototype of custom_pypto::npu_lightning_indexer_pto; query and key share a dtype, weights
// have that one or float32.
#ifndef CUSTOM_PYPTO_GRAPH_NPU_LIGHTNING_INDEXER_PTO_H
#define CUSTOM_PYPTO_GRAPH_NPU_LIGHTNING_INDEXER_PTO_H

#include "graph/operator_reg.h"

namespace ge {

REG_OP(LightningIndexerPto)
    .INPUT(query, TensorType({DT_BF16, DT_FLOAT16}))
    .INPUT(key, TensorType({DT_BF16, DT_FLOAT16}))
    .INPUT(weights, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .OPTIONAL_INPUT(actual_seq_lengths_query, TensorType({DT_INT32}))
    .OPTIONAL_INPUT(actual_seq_lengths_key, TensorType({DT_INT32}))
    .OPTIONAL_INPUT(block_table, TensorType({DT_INT32}))
    .OUTPUT(sparse_indices, TensorType({DT_INT32}))
    .ATTR(layout_query, String, "BSND")
    .ATTR(layout_key, String, "PA_BSND")
    .ATTR(sparse_count, Int, 2048)
    .ATTR(sparse_mode, Int, 3)
    .OP_END_FACTORY_REG(LightningIndexerPto)

}  // namespace ge

#endif
