// Divergence of an indexer from the sparse attention over its selection, and its gradients.
// docs/npu_sparse_lightning_indexer_grad_kl_loss_pto.md
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include <tuple>

#include "../tasks/index_grad.h"
#include "index_kl_contract.h"

namespace custom_pypto {
namespace {

constexpr KeyNames kNames = {.op = "npu_sparse_lightning_indexer_grad_kl_loss_pto",
                             .layout = "layout",
                             .lengths = "actual_seq_klen",
                             .query_layout = "layout",
                             .query_lengths = "actual_seq_qlen"};

}  // namespace

template <bool computes>
std::tuple<Tensor, Tensor, Tensor, Tensor> npu_sparse_lightning_indexer_grad_kl_loss_pto(
    const Tensor& query, const Tensor& key, const Tensor& query_index, const Tensor& key_index,
    const Tensor& weights, const Tensor& sparse_indices, const Tensor& softmax_max,
    const Tensor& softmax_sum, double scale_value, const OptionalTensor& query_rope,
    const OptionalTensor& key_rope, HostLengths actual_seq_qlen, HostLengths actual_seq_klen,
    c10::string_view layout, int64_t sparse_mode, int64_t cmp_ratio) {
  const HostSequences sequences(kNames, query, actual_seq_qlen, actual_seq_klen, layout,
                                sparse_mode, cmp_ratio, computes);
  const OptionalTensor indices = sparse_indices;
  SequenceParams attention = sequences.of(query, key);
  IndexKlParams p{.index = {.sequences = sequences.of(query_index, key_index), .weights = weights},
                  .query = query,
                  .key = key,
                  .query_rope = query_rope,
                  .key_rope = key_rope,
                  .softmax_max = softmax_max,
                  .softmax_sum = softmax_sum,
                  .scale_value = scale_value,
                  .sparse_indices = indices};
  check_index_kl(kNames, attention, p);
  check_sparse_indices(kNames, attention, sparse_indices);
  if (computes) index_kl_backward(p);
  return {p.index.d_query, p.index.d_key, p.index.d_weights, p.loss};
}

REGISTER_OP(npu_sparse_lightning_indexer_grad_kl_loss_pto,
            "(Tensor query, Tensor key, Tensor query_index, Tensor key_index, Tensor weights, "
            "Tensor sparse_indices, Tensor softmax_max, Tensor softmax_sum, float scale_value, *, "
            "Tensor? query_rope=None, Tensor? key_rope=None, SymInt[]? actual_seq_qlen=None, "
            "SymInt[]? actual_seq_klen=None, str layout='BSND', int sparse_mode=3, "
            "int cmp_ratio=1) -> (Tensor, Tensor, Tensor, Tensor)")

// the gradients are results: backward() through them raises an error
TORCH_LIBRARY_IMPL(custom_pypto, Autograd, m) {
  m.impl(kNames.op, torch::autograd::autogradNotImplementedFallback());
}

}  // namespace custom_pypto
