// Sparse attention over the rows of an int8 latent cache, which are dequantized while they are
// gathered. docs/npu_kv_quant_sparse_flash_attention_pto.md
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include "../tasks/attention.h"
#include "shared_contracts.h"

namespace custom_pypto {
namespace {

constexpr KeyNames kNames = {.op = "npu_kv_quant_sparse_flash_attention_pto",
                             .layout = "layout_kv",
                             .lengths = "actual_seq_lengths_kv"};

// The arguments that `attention` lacks have one legal value or determine the row.
// `attention.sequences.query` is [nope | rope].
struct QuantizedAttentionParams {
  AttentionParams attention;
  int64_t key_quant_mode, value_quant_mode;
  const OptionalTensor &key_dequant_scale, &value_dequant_scale;
  int64_t attention_mode, quant_scale_repo_mode, tile_size, rope_head_dim;
};

// The arguments of torch_npu's op that have one legal value here.
void check_modes(const QuantizedAttentionParams& p) {
  const char* op = kNames.op;
  constexpr char kPerGroup[] = "2 (a scale per token and tile of 128)";
  CHECK_ARGUMENT(p.key_quant_mode == 2, op, "key_quant_mode", kPerGroup, p.key_quant_mode);
  CHECK_ARGUMENT(p.value_quant_mode == 2, op, "value_quant_mode", kPerGroup, p.value_quant_mode);
  CHECK_ARGUMENT(p.attention_mode == 2, op, "attention_mode", "2 (MLA, absorbed)",
                 p.attention_mode);
  CHECK_ARGUMENT(p.quant_scale_repo_mode == 1, op, "quant_scale_repo_mode",
                 "1 (scales are part of the cache's rows)", p.quant_scale_repo_mode);
  CHECK_ARGUMENT(p.tile_size == kScaleGroup, op, "tile_size", "128 (elements per scale)",
                 p.tile_size);
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
void contract(QuantizedAttentionParams& quantized) {
  const char* op = kNames.op;
  AttentionParams& p = quantized.attention;
  check_modes(quantized);
  check_attention(kNames, p);
  const Tensor &query = p.sequences.query, &key = p.sequences.key;
  const int64_t query_last = query.dim() - 1, key_last = key.dim() - 1;
  const c10::SymInt width = query.sym_size(query_last), rope = quantized.rope_head_dim;
  const Int8RowLayout<c10::SymInt> row{.latent = width - rope, .rope = rope};
  Argument(op, "query", query).dtype(kHalves, "that of the RoPE part of the cache's rows");
  CHECK_ARGUMENT(row.latent > 0 && row.latent % kScaleGroup == 0, op,
                 c10::str("query.size(", query_last, ")"),
                 c10::str("a positive multiple of 128 (L) plus ", rope, " (rope_head_dim)"), width);
  Argument(op, "key", key)
      .int8("npu_sparse_flash_attention_pto")
      .device_of(query)
      .size(key_last, row.bytes(), kRowBytes)
      .dense_rows();
  CHECK_ARGUMENT(!p.value || same_memory(*p.value, key), op, "value",
                 "None or key (a row holds key and value)", "another tensor");
  c10::SymDimVector shape(query.sym_sizes().begin(), query.sym_sizes().end());
  shape.back() = row.latent;
  p.out = empty(shape, query.options());
}

void compute(const QuantizedAttentionParams& quantized, bool by_token) {
  const AttentionParams& p = quantized.attention;
  const SequenceParams& s = p.sequences;
  const int64_t rope = quantized.rope_head_dim, latent = s.query.size(-1) - rope;
  const Tensor query = s.query.narrow(-1, 0, latent);
  const OptionalTensor query_rope = s.query.narrow(-1, latent, rope);
  attend<Int8Rows>(
      AttentionParams{.sequences = {.query = query,
                                    .key = s.key,
                                    .actual_seq_lengths_query = s.actual_seq_lengths_query,
                                    .actual_seq_lengths_key = s.actual_seq_lengths_key,
                                    .block_table = s.block_table,
                                    .sparse_mode = s.sparse_mode,
                                    .query_layout = s.query_layout,
                                    .key_layout = s.key_layout},
                      .sparse_indices = p.sparse_indices,
                      .scale_value = p.scale_value,
                      .query_rope = query_rope,
                      .out = p.out},
      by_token);
}

}  // namespace

template <bool computes, bool by_token = false>
Tensor npu_kv_quant_sparse_flash_attention_pto(
    const Tensor& query, const Tensor& key, const OptionalTensor& value,
    const Tensor& sparse_indices, double scale_value, int64_t key_quant_mode,
    int64_t value_quant_mode, const OptionalTensor& key_dequant_scale,
    const OptionalTensor& value_dequant_scale, const OptionalTensor& block_table,
    const OptionalTensor& actual_seq_lengths_query, const OptionalTensor& actual_seq_lengths_kv,
    int64_t sparse_block_size, c10::string_view layout_query, c10::string_view layout_kv,
    int64_t sparse_mode, int64_t attention_mode, int64_t quant_scale_repo_mode, int64_t tile_size,
    int64_t rope_head_dim) {
  QuantizedAttentionParams p{
      .attention = {.sequences = {.query = query,
                                  .key = key,
                                  .actual_seq_lengths_query = actual_seq_lengths_query,
                                  .actual_seq_lengths_key = actual_seq_lengths_kv,
                                  .block_table = block_table,
                                  .layout_query = layout_query,
                                  .layout_key = layout_kv,
                                  .sparse_mode = sparse_mode},
                    .value = value,
                    .sparse_indices = sparse_indices,
                    .scale_value = scale_value,
                    .sparse_block_size = sparse_block_size},
      .key_quant_mode = key_quant_mode,
      .value_quant_mode = value_quant_mode,
      .key_dequant_scale = key_dequant_scale,
      .value_dequant_scale = value_dequant_scale,
      .attention_mode = attention_mode,
      .quant_scale_repo_mode = quant_scale_repo_mode,
      .tile_size = tile_size,
      .rope_head_dim = rope_head_dim};
  contract(p);
  if (computes) compute(p, by_token);
  return p.attention.out;
}

#define SCHEMA                                                                           \
  "(Tensor query, Tensor key, Tensor? value, Tensor sparse_indices, float scale_value, " \
  "int key_quant_mode, int value_quant_mode, *, Tensor? key_dequant_scale=None, "        \
  "Tensor? value_dequant_scale=None, Tensor? block_table=None, "                         \
  "Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_kv=None, "          \
  "int sparse_block_size=1, str layout_query='BSND', str layout_kv='PA_BSND', "          \
  "int sparse_mode=3, int attention_mode=2, int quant_scale_repo_mode=1, "               \
  "int tile_size=128, int rope_head_dim=64) -> Tensor"

REGISTER_OP(npu_kv_quant_sparse_flash_attention_pto, SCHEMA)

// for batch-invariant models, on the CPU alone
TORCH_LIBRARY_FRAGMENT(custom_pypto, m) {
  m.def("npu_kv_quant_sparse_flash_attention_pto.by_token" SCHEMA);
}
TORCH_LIBRARY_IMPL(custom_pypto, CPU, m) {
  m.impl("npu_kv_quant_sparse_flash_attention_pto.by_token",
         &npu_kv_quant_sparse_flash_attention_pto<true, true>);
}
TORCH_LIBRARY_IMPL(custom_pypto, Meta, m) {
  m.impl("npu_kv_quant_sparse_flash_attention_pto.by_token",
         &npu_kv_quant_sparse_flash_attention_pto<false, true>);
}

TORCH_LIBRARY_IMPL(custom_pypto, Autograd, m) {
  m.impl(kNames.op, torch::autograd::autogradNotImplementedFallback());
}

}  // namespace custom_pypto
