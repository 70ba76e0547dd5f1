// Sparse attention over the rows of a latent cache. docs/npu_sparse_flash_attention_pto.md
#include "npu_sparse_flash_attention_pto.h"

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include <tuple>

#include "../tasks/attention.h"
#include "shared_contracts.h"

namespace custom_pypto {
namespace {

constexpr KeyNames kNames = {.op = "npu_sparse_flash_attention_pto",
                             .layout = "layout_kv",
                             .lengths = "actual_seq_lengths_kv"};

// Checks that rank, dtype, device and all sizes but the last match `like`.
Argument like(const Tensor& like, const char* name, const Tensor& tensor, const char* why) {
  return Argument(kNames.op, name, tensor)
      .rank(like.dim(), why)
      .sizes(like, like.dim() - 1, why)
      .dtype(like.scalar_type(), why)
      .device_of(like);
}

// Checks every argument and allocates the output.
void contract(AttentionParams& p) {
  const char* op = kNames.op;
  check_attention(kNames, p);
  const Tensor &query = p.sequences.query, &key = p.sequences.key;
  const int64_t query_last = query.dim() - 1, key_last = key.dim() - 1;
  const c10::SymInt L = query.sym_size(-1);
  Argument(op, "query", query).dtype(kFloating).keeps(query_last, Dim::kMultipleOf16, "L");
  Argument(op, "key", key)
      .dtype(query.scalar_type(), "dtype of query")
      .device_of(query)
      .size(key_last, L, "L of query")
      .dense_rows();
  if (p.value) like(key, "value", *p.value, "as key").size(key_last, L, "as key").dense_rows();
  CHECK_ARGUMENT(p.query_rope.has_value() == p.key_rope.has_value(), op, "key_rope",
                 p.query_rope ? "a tensor, as query_rope is" : "None, as query_rope is",
                 p.key_rope ? "a tensor" : "None");
  if (p.query_rope) {
    like(query, "query_rope", *p.query_rope, "as query, except R")
        .keeps(query_last, Dim::kMultipleOf16, "R");
    like(key, "key_rope", *p.key_rope, "as key, except R")
        .size(key_last, p.query_rope->sym_size(-1), "R of query_rope")
        .dense_rows();
  }
  if (p.sinks) {
    Argument(op, "sinks", *p.sinks)
        .rank(1, "[N1]")
        .size(0, query.sym_size(-2), "N1 of query")
        .dtype(at::kFloat, "a logit per head")
        .device_of(query);
  }
  p.out = at::empty_symint(query.sym_sizes(), query.options());
  if (p.return_softmax_lse) {
    // [B, N2, S1, N1] or [N2, T1, N1]
    c10::SymDimVector shape(query.sym_sizes().begin(), query.sym_sizes().end() - 1);
    shape.insert(shape.end() - 2, 1);
    p.softmax_max = at::empty_symint(shape, query.options().dtype(at::kFloat));
    p.softmax_sum = at::empty_like(p.softmax_max);
  }
}

}  // namespace

void sparse_flash_attention(AttentionParams& p) {
  contract(p);
  attend<ModelRows>(p);
}

// Both overloads. Statistics is bool, return_softmax_lse, for softmax_lse, and absent otherwise.
template <bool computes, typename... Statistics>
auto npu_sparse_flash_attention_pto(
    const Tensor& query, const Tensor& key, const OptionalTensor& value,
    const Tensor& sparse_indices, double scale_value, const OptionalTensor& block_table,
    const OptionalTensor& actual_seq_lengths_query, const OptionalTensor& actual_seq_lengths_kv,
    const OptionalTensor& query_rope, const OptionalTensor& key_rope, int64_t sparse_block_size,
    c10::string_view layout_query, c10::string_view layout_kv, int64_t sparse_mode,
    const OptionalTensor& sinks, Statistics... return_softmax_lse) {
  AttentionParams p{.sequences = {.query = query,
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
                    .query_rope = query_rope,
                    .key_rope = key_rope,
                    .sinks = sinks,
                    .sparse_block_size = sparse_block_size,
                    .return_softmax_lse = (false || ... || return_softmax_lse)};
  computes ? sparse_flash_attention(p) : contract(p);
  if constexpr (sizeof...(Statistics) == 0) {
    return p.out;
  } else {
    const auto none = [&] { return at::empty({0}, query.options().dtype(at::kFloat)); };
    return p.return_softmax_lse ? std::make_tuple(p.out, p.softmax_max, p.softmax_sum)
                                : std::make_tuple(p.out, none(), none());
  }
}

constexpr char kSoftmaxLse[] = "npu_sparse_flash_attention_pto.softmax_lse";

#define ARGUMENTS                                                                           \
  "(Tensor query, Tensor key, Tensor? value, Tensor sparse_indices, float scale_value, *, " \
  "Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, "                       \
  "Tensor? actual_seq_lengths_kv=None, Tensor? query_rope=None, Tensor? key_rope=None, "    \
  "int sparse_block_size=1, str layout_query='BSND', str layout_kv='PA_BSND', "             \
  "int sparse_mode=3, Tensor? sinks=None"

REGISTER_OP(npu_sparse_flash_attention_pto, ARGUMENTS ") -> Tensor")
TORCH_LIBRARY_FRAGMENT(custom_pypto, m) {
  // attention_out, softmax_max, softmax_sum
  m.def("npu_sparse_flash_attention_pto.softmax_lse" ARGUMENTS
        ", bool return_softmax_lse) -> (Tensor, Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(custom_pypto, CPU, m) {
  m.impl(kSoftmaxLse, &npu_sparse_flash_attention_pto<true, bool>);
}
TORCH_LIBRARY_IMPL(custom_pypto, Meta, m) {
  m.impl(kSoftmaxLse, &npu_sparse_flash_attention_pto<false, bool>);
}

// backward() raises an error instead of silently omitting a gradient
TORCH_LIBRARY_IMPL(custom_pypto, Autograd, m) {
  for (const char* overload : {kNames.op, kSoftmaxLse}) {
    m.impl(overload, torch::autograd::autogradNotImplementedFallback());
  }
}

}  // namespace custom_pypto
