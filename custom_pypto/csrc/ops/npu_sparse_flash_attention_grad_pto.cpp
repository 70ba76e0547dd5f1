// Gradients of sparse attention. docs/npu_sparse_flash_attention_grad_pto.md
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include <tuple>

#include "../tasks/attention_grad.h"
#include "npu_sparse_flash_attention_pto.h"
#include "shared_contracts.h"

namespace custom_pypto {
namespace {

constexpr KeyNames kNames = {.op = "npu_sparse_flash_attention_grad_pto",
                             .layout = "layout_kv",
                             .lengths = "actual_seq_kvlen",
                             .query_layout = "layout",
                             .query_lengths = "actual_seq_qlen"};

// A gradient of a tensor, or one without elements for an absent one.
Tensor gradient_of(const OptionalTensor& tensor, const Tensor& query) {
  if (!tensor) return at::empty({0}, query.options());
  return empty(tensor->sym_sizes(), tensor->options());
}

// Checks every argument and allocates the gradients.
void contract(AttentionGradParams& p, const Tensor& out) {
  check_unquantized_attention(kNames, p.attention);
  const Tensor& query = p.attention.sequences.query;
  for (const auto& [name, tensor] : {std::pair<const char*, const Tensor&>{"d_out", p.d_out},
                                     std::pair<const char*, const Tensor&>{"out", out}}) {
    Argument(kNames.op, name, tensor)
        .rank(query.dim(), "that of query")
        .sizes(query, query.dim(), "as query")
        .dtype(query.scalar_type(), "dtype of query")
        .device_of(query);
  }
  check_statistics(kNames, "softmax_max", p.softmax_max, query);
  check_statistics(kNames, "softmax_sum", p.softmax_sum, query);
  p.d_query = gradient_of(query, query);
  p.d_key = gradient_of(p.attention.sequences.key, query);
  p.d_value = gradient_of(p.attention.value, query);
  p.d_query_rope = gradient_of(p.attention.query_rope, query);
  p.d_key_rope = gradient_of(p.attention.key_rope, query);
  p.d_sinks = p.attention.sinks ? gradient_of(p.attention.sinks, query)
                                : at::empty({0}, query.options().dtype(at::kFloat));
}

}  // namespace

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

template <bool computes>
Gradients npu_sparse_flash_attention_grad_pto(
    const Tensor& query, const Tensor& key, const OptionalTensor& value,
    const Tensor& sparse_indices, const Tensor& d_out, const Tensor& out, const Tensor& softmax_max,
    const Tensor& softmax_sum, double scale_value, int64_t sparse_block_size,
    const OptionalTensor& query_rope, const OptionalTensor& key_rope,
    const OptionalTensor& actual_seq_qlen, const OptionalTensor& actual_seq_kvlen,
    c10::string_view layout, int64_t sparse_mode, std::optional<c10::string_view> layout_kv,
    const OptionalTensor& block_table, const OptionalTensor& sinks) {
  AttentionGradParams p{.attention = {.sequences = {.query = query,
                                                    .key = key,
                                                    .actual_seq_lengths_query = actual_seq_qlen,
                                                    .actual_seq_lengths_key = actual_seq_kvlen,
                                                    .block_table = block_table,
                                                    .layout_query = layout,
                                                    .layout_key = layout_kv ? *layout_kv : layout,
                                                    .sparse_mode = sparse_mode},
                                      .value = value,
                                      .sparse_indices = sparse_indices,
                                      .scale_value = scale_value,
                                      .query_rope = query_rope,
                                      .key_rope = key_rope,
                                      .sinks = sinks,
                                      .sparse_block_size = sparse_block_size},
                        .d_out = d_out,
                        .softmax_max = softmax_max,
                        .softmax_sum = softmax_sum};
  contract(p, out);
  if (computes) attend_backward(p);
  return {p.d_query, p.d_key, p.d_value, p.d_query_rope, p.d_key_rope, p.d_sinks};
}

REGISTER_OP(npu_sparse_flash_attention_grad_pto,
            "(Tensor query, Tensor key, Tensor? value, Tensor sparse_indices, Tensor d_out, "
            "Tensor out, Tensor softmax_max, Tensor softmax_sum, float scale_value, "
            "int sparse_block_size=1, Tensor? query_rope=None, Tensor? key_rope=None, "
            "Tensor? actual_seq_qlen=None, Tensor? actual_seq_kvlen=None, str layout='BSND', "
            "int sparse_mode=3, *, str? layout_kv=None, Tensor? block_table=None, "
            "Tensor? sinks=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")

// a second derivative raises an error instead of being zero
TORCH_LIBRARY_IMPL(custom_pypto, Autograd, m) {
  m.impl(kNames.op, torch::autograd::autogradNotImplementedFallback());
}

}  // namespace custom_pypto
