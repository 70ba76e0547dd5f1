// Sparse attention over the rows of an int8 latent cache, which are dequantised while they are
// gathered. docs/npu_kv_quant_sparse_flash_attention_pto.md
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include "../tasks/int8_rows.h"
#include "../tasks/params.h"

namespace custom_pypto {
namespace {

constexpr KeyNames kNames = {"npu_kv_quant_sparse_flash_attention_pto", "layout_kv",
                             "actual_seq_lengths_kv"};

// The arguments of torch_npu's op that have one legal value here.
void check_modes(const QuantisedAttentionParams& p) {
  const char* op = kNames.op;
  constexpr char kPerTile[] = "2 (a scale per token and tile of 128)";
  CHECK_ARGUMENT(p.key_quant_mode == 2, op, "key_quant_mode", kPerTile, p.key_quant_mode);
  CHECK_ARGUMENT(p.value_quant_mode == 2, op, "value_quant_mode", kPerTile, p.value_quant_mode);
  CHECK_ARGUMENT(p.attention_mode == 2, op, "attention_mode", "2 (MLA, absorbed)",
                 p.attention_mode);
  CHECK_ARGUMENT(p.quant_scale_repo_mode == 1, op, "quant_scale_repo_mode",
                 "1 (scales are part of the cache's rows)", p.quant_scale_repo_mode);
  CHECK_ARGUMENT(p.tile_size == kTile, op, "tile_size", "128 (elements per scale)", p.tile_size);
  CHECK_ARGUMENT(p.rope_head_dim > 0 && p.rope_head_dim % 16 == 0, op, "rope_head_dim",
                 "a positive multiple of 16", p.rope_head_dim);
  constexpr char kInRows[] = "None (scales are part of the cache's rows)";
  CHECK_ARGUMENT(!p.key_dequant_scale, op, "key_dequant_scale", kInRows, "a tensor");
  CHECK_ARGUMENT(!p.value_dequant_scale, op, "value_dequant_scale", kInRows, "a tensor");
}

bool same_memory(const Tensor& a, const Tensor& b) {
  return a.is_alias_of(b) && a.sym_storage_offset() == b.sym_storage_offset() &&
         a.sym_sizes() == b.sym_sizes() && a.sym_strides() == b.sym_strides();
}

// Checks every argument and allocates the output.
void contract(QuantisedAttentionParams& quantised) {
  const char* op = kNames.op;
  AttentionParams& p = quantised.attention;
  check_modes(quantised);
  check_attention(kNames, p);
  const int64_t query_last = p.query.dim() - 1, key_last = p.key.dim() - 1;
  const c10::SymInt width = p.query.sym_size(query_last), rope = quantised.rope_head_dim;
  const c10::SymInt latent = width - rope;
  Argument(op, "query", p.query).dtype(kHalves, "that of the RoPE part of the cache's rows");
  CHECK_ARGUMENT(latent > 0 && latent % kTile == 0, op, c10::str("query.size(", query_last, ")"),
                 c10::str("a positive multiple of 128 (L) plus ", rope, " (rope_head_dim)"), width);
  Argument(op, "key", p.key)
      .int8("npu_sparse_flash_attention_pto")
      .device_of(p.query)
      .size(key_last, quantised_row_bytes(latent, rope), kRowBytes)
      .dense_rows();
  CHECK_ARGUMENT(!p.value || same_memory(*p.value, p.key), op, "value",
                 "None or key (a row holds key and value)", "another tensor");
  c10::SymDimVector shape(p.query.sym_sizes().begin(), p.query.sym_sizes().end());
  shape.back() = latent;
  p.out = at::empty_symint(shape, p.query.options());
}

void compute(const QuantisedAttentionParams& quantised) {
  const AttentionParams& p = quantised.attention;
  const int64_t rope = quantised.rope_head_dim, latent = p.query.size(-1) - rope;
  const Tensor query = p.query.narrow(-1, 0, latent);
  const OptionalTensor none, query_rope = p.query.narrow(-1, latent, rope);
  AttentionParams split{{query, p.key, p.actual_seq_lengths_query, p.actual_seq_lengths_key,
                         p.block_table, p.layout_query, p.layout_key, p.sparse_mode},
                        none,
                        p.sparse_indices,
                        p.scale_value,
                        query_rope,
                        none,
                        none};
  split.query_layout = p.query_layout;
  split.key_layout = p.key_layout;
  split.out = p.out;
  attend(split);
}

}  // namespace

template <bool computes>
Tensor npu_kv_quant_sparse_flash_attention_pto(
    const Tensor& query, const Tensor& key, const OptionalTensor& value,
    const Tensor& sparse_indices, double scale_value, int64_t key_quant_mode,
    int64_t value_quant_mode, const OptionalTensor& key_dequant_scale,
    const OptionalTensor& value_dequant_scale, const OptionalTensor& block_table,
    const OptionalTensor& actual_seq_lengths_query, const OptionalTensor& actual_seq_lengths_kv,
    int64_t sparse_block_size, c10::string_view layout_query, c10::string_view layout_kv,
    int64_t sparse_mode, int64_t attention_mode, int64_t quant_scale_repo_mode, int64_t tile_size,
    int64_t rope_head_dim) {
  const OptionalTensor none;
  QuantisedAttentionParams p{{{query, key, actual_seq_lengths_query, actual_seq_lengths_kv,
                               block_table, layout_query, layout_kv, sparse_mode},
                              value,
                              sparse_indices,
                              scale_value,
                              none,
                              none,
                              none,
                              sparse_block_size},
                             key_quant_mode,
                             value_quant_mode,
                             key_dequant_scale,
                             value_dequant_scale,
                             attention_mode,
                             quant_scale_repo_mode,
                             tile_size,
                             rope_head_dim};
  contract(p);
  if (computes) compute(p);
  return p.attention.out;
}

REGISTER_CPU_AND_META(npu_kv_quant_sparse_flash_attention_pto)

TORCH_LIBRARY_IMPL(custom_pypto, Autograd, m) {
  m.impl(kNames.op, torch::autograd::autogradNotImplementedFallback());
}

}  // namespace custom_pypto
