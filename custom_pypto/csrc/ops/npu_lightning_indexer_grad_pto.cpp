// Gradients of the lightning indexer. docs/npu_lightning_indexer_grad_pto.md
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include <tuple>

#include "../tasks/index_grad.h"
#include "shared_contracts.h"

namespace custom_pypto {
namespace {

constexpr KeyNames kNames = {.op = "npu_lightning_indexer_grad_pto",
                             .layout = "layout_key",
                             .lengths = "actual_seq_lengths_key",
                             .query_layout = "layout"};

// Checks every argument and allocates the gradients.
void contract(IndexGradParams& p, const Tensor& sparse_indices, const Tensor& dy) {
  check_index(kNames, p.sequences, p.weights);
  check_unquantized_index(kNames, p.sequences, p.weights);
  check_sparse_indices(kNames, p.sequences, sparse_indices);
  const Tensor& query = p.sequences.query;
  Argument(kNames.op, "dy", dy)
      .rank(query.dim(), "that of sparse_indices")
      .sizes(sparse_indices, query.dim(), "as sparse_indices")
      .dtype_or_float32(query.scalar_type(), "dtype of query")
      .device_of(query);
  p.d_query = empty(query.sym_sizes(), query.options());
  p.d_key = empty(p.sequences.key.sym_sizes(), query.options());
  p.d_weights = empty(p.weights.sym_sizes(), p.weights.options());
}

}  // namespace

template <bool computes>
std::tuple<Tensor, Tensor, Tensor> npu_lightning_indexer_grad_pto(
    const Tensor& query, const Tensor& key, const Tensor& dy, const Tensor& sparse_indices,
    const Tensor& weights, const OptionalTensor& actual_seq_lengths_query,
    const OptionalTensor& actual_seq_lengths_key, c10::string_view layout, int64_t sparse_mode,
    std::optional<c10::string_view> layout_key, const OptionalTensor& block_table,
    int64_t cmp_ratio) {
  IndexGradParams p{.sequences = {.query = query,
                                  .key = key,
                                  .actual_seq_lengths_query = actual_seq_lengths_query,
                                  .actual_seq_lengths_key = actual_seq_lengths_key,
                                  .block_table = block_table,
                                  .layout_query = layout,
                                  .layout_key = layout_key ? *layout_key : layout,
                                  .sparse_mode = sparse_mode,
                                  .cmp_ratio = cmp_ratio},
                    .weights = weights};
  contract(p, sparse_indices, dy);
  if (computes) index_backward(p, sparse_indices, dy);
  return {p.d_query, p.d_key, p.d_weights};
}

REGISTER_OP(npu_lightning_indexer_grad_pto,
            "(Tensor query, Tensor key, Tensor dy, Tensor sparse_indices, Tensor weights, "
            "Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, "
            "str layout='BSND', int sparse_mode=3, *, str? layout_key=None, "
            "Tensor? block_table=None, int cmp_ratio=1) -> (Tensor, Tensor, Tensor)")

// a second derivative raises an error instead of being zero
TORCH_LIBRARY_IMPL(custom_pypto, Autograd, m) {
  m.impl(kNames.op, torch::autograd::autogradNotImplementedFallback());
}

}  // namespace custom_pypto
