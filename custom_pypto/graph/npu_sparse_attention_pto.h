// GE prototype of custom_pypto::npu_sparse_attention_pto; weights and caches have the dtype of x,
// sin and cos that one or float32.
//
// The caches are inputs and, under the same names, outputs: GE's way to say that an operator writes
// them in place. softmax_scale 0.0 stands for the schema's None, which no GE attribute can hold;
// the op itself takes positive scales only.
#ifndef CUSTOM_PYPTO_GRAPH_NPU_SPARSE_ATTENTION_PTO_H
#define CUSTOM_PYPTO_GRAPH_NPU_SPARSE_ATTENTION_PTO_H

#include "graph/operator_reg.h"

namespace ge {

REG_OP(SparseAttentionPto)
    .INPUT(x, TensorType({DT_BF16, DT_FLOAT16}))
    .INPUT(w_dq, TensorType({DT_BF16, DT_FLOAT16}))
    .INPUT(w_uq_qr, TensorType({DT_BF16, DT_FLOAT16}))
    .INPUT(w_uk, TensorType({DT_BF16, DT_FLOAT16}))
    .INPUT(w_dkv_kr, TensorType({DT_BF16, DT_FLOAT16}))
    .INPUT(gamma_cq, TensorType({DT_BF16, DT_FLOAT16}))
    .INPUT(gamma_ckv, TensorType({DT_BF16, DT_FLOAT16}))
    .INPUT(sin, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .INPUT(cos, TensorType({DT_BF16, DT_FLOAT16, DT_FLOAT}))
    .INPUT(cache_index, TensorType({DT_INT32, DT_INT64}))
    .INPUT(kv_cache, TensorType({DT_BF16, DT_FLOAT16}))
    .INPUT(kr_cache, TensorType({DT_BF16, DT_FLOAT16}))
    .INPUT(block_table, TensorType({DT_INT32}))
    .INPUT(act_seqs, TensorType({DT_INT32}))
    .INPUT(w_idx_qb, TensorType({DT_BF16, DT_FLOAT16}))
    .INPUT(w_idx_k, TensorType({DT_BF16, DT_FLOAT16}))
    .INPUT(w_idx_proj, TensorType({DT_BF16, DT_FLOAT16}))
    .INPUT(in_gamma_k, TensorType({DT_BF16, DT_FLOAT16}))
    .INPUT(in_beta_k, TensorType({DT_BF16, DT_FLOAT16}))
    .INPUT(index_k_cache, TensorType({DT_BF16, DT_FLOAT16}))
    .OUTPUT(attention_out, TensorType({DT_BF16, DT_FLOAT16}))
    .OUTPUT(kv_cache, TensorType({DT_BF16, DT_FLOAT16}))
    .OUTPUT(kr_cache, TensorType({DT_BF16, DT_FLOAT16}))
    .OUTPUT(index_k_cache, TensorType({DT_BF16, DT_FLOAT16}))
    .ATTR(softmax_scale, Float, 0.0)
    .ATTR(eps, Float, 1e-6)
    .ATTR(sparse_count, Int, 2048)
    .OP_END_FACTORY_REG(SparseAttentionPto)

}  // namespace ge

#endif
