#include <Python.h>
#include <torch/library.h>

#include <string>

#include "../tasks/kernel_set.h"

// Names and order of arguments follow the published custom_pypto recipe; shapes, dtypes and meaning
// follow torch_npu's npu_lightning_indexer and npu_sparse_flash_attention. Our own arguments are
// keyword-only. Mutated caches are declared, so that torch.compile keeps the writes in order.
TORCH_LIBRARY(custom_pypto, m) {
  m.def("add_custom(Tensor self, Tensor other) -> Tensor");
  m.def("add_custom_backward(Tensor self) -> (Tensor, Tensor)");
  m.def(
      "npu_lightning_indexer_pto(Tensor query, Tensor key, Tensor weights, *, "
      "Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, "
      "Tensor? block_table=None, str layout_query='BSND', str layout_key='PA_BSND', "
      "int sparse_count=2048, int sparse_mode=3, int cmp_ratio=1) -> Tensor");
  const std::string attention =
      "(Tensor query, Tensor key, Tensor? value, Tensor sparse_indices, float scale_value, *, "
      "Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, "
      "Tensor? actual_seq_lengths_kv=None, Tensor? query_rope=None, Tensor? key_rope=None, "
      "int sparse_block_size=1, str layout_query='BSND', str layout_kv='PA_BSND', "
      "int sparse_mode=3, Tensor? sinks=None";
  m.def(("npu_sparse_flash_attention_pto" + attention + ") -> Tensor").c_str());
  // attention_out, softmax_max, softmax_sum
  m.def(("npu_sparse_flash_attention_pto.softmax_lse" + attention +
         ", bool return_softmax_lse) -> (Tensor, Tensor, Tensor)")
            .c_str());
  m.def(
      "npu_quant_lightning_indexer_pto(Tensor query, Tensor key, Tensor weights, "
      "Tensor query_dequant_scale, Tensor key_dequant_scale, int query_quant_mode, "
      "int key_quant_mode, *, Tensor? actual_seq_lengths_query=None, "
      "Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, str layout_query='BSND', "
      "str layout_key='PA_BSND', int sparse_count=2048, int sparse_mode=3) -> Tensor");
  m.def("npu_quant_rows_pto(Tensor x, *, Tensor? hadamard=None) -> (Tensor, Tensor)");
  m.def(
      "npu_quant_index_update_pto(Tensor x, Tensor slots, Tensor(a!) cache, "
      "Tensor(b!) scale_cache, *, Tensor? hadamard=None) -> ()");
  m.def(
      "npu_kv_quant_sparse_flash_attention_pto(Tensor query, Tensor key, Tensor? value, "
      "Tensor sparse_indices, float scale_value, int key_quant_mode, int value_quant_mode, *, "
      "Tensor? key_dequant_scale=None, Tensor? value_dequant_scale=None, "
      "Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, "
      "Tensor? actual_seq_lengths_kv=None, int sparse_block_size=1, str layout_query='BSND', "
      "str layout_kv='PA_BSND', int sparse_mode=3, int attention_mode=2, "
      "int quant_scale_repo_mode=1, int tile_size=128, int rope_head_dim=64) -> Tensor");
  m.def(
      "npu_kv_quant_update_pto(Tensor latent, Tensor rope, Tensor slots, Tensor(a!) cache) -> ()");
  m.def(
      "npu_lightning_indexer_prolog_pto(Tensor token_x, Tensor q_norm, Tensor? q_norm_scale, "
      "Tensor wq_b, Tensor? wq_b_scale, Tensor wk, Tensor weights_proj, Tensor ln_gamma_k, "
      "Tensor ln_beta_k, Tensor cos_idx_rope, Tensor sin_idx_rope, Tensor hadamard_q, "
      "Tensor hadamard_k, Tensor(a!) idx_k_cache, Tensor(b!) idx_k_scale_cache, "
      "Tensor idx_k_cache_index, float layernorm_epsilon_k, *, str layout_query='TND', "
      "str layout_key='PA_BSND') -> (Tensor, Tensor, Tensor)");
  m.def(
      "npu_sparse_attention_pto(Tensor x, Tensor w_dq, Tensor w_uq_qr, Tensor w_uk, "
      "Tensor w_dkv_kr, Tensor gamma_cq, Tensor gamma_ckv, Tensor sin, Tensor cos, "
      "Tensor cache_index, Tensor(a!) kv_cache, Tensor(b!) kr_cache, Tensor block_table, "
      "Tensor act_seqs, Tensor w_idx_qb, Tensor w_idx_k, Tensor w_idx_proj, Tensor in_gamma_k, "
      "Tensor in_beta_k, Tensor(c!) index_k_cache, *, float? softmax_scale=None, float eps=1e-6, "
      "int sparse_count=2048) -> Tensor");
  m.def("cpu_isa() -> str", []() { return std::string(custom_pypto::kernels().name); });
}

// Importing custom_pypto._C loads this library; the ops are reached through torch.ops.
extern "C" PyObject* PyInit__C(void) {
  static PyModuleDef module = {.m_base = PyModuleDef_HEAD_INIT,
                               .m_name = "_C",
                               .m_doc = nullptr,
                               .m_size = -1,
                               .m_methods = nullptr,
                               .m_slots = nullptr,
                               .m_traverse = nullptr,
                               .m_clear = nullptr,
                               .m_free = nullptr};
  return PyModule_Create(&module);
}
