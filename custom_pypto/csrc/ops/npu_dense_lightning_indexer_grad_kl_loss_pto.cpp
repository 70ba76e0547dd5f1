// Divergence of an indexer from attention over every visible key, and its gradients.
// docs/npu_dense_lightning_indexer_grad_kl_loss_pto.md
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include <tuple>

#include "../tasks/index_grad.h"
#include "index_kl_contract.h"

namespace custom_pypto {
namespace {

constexpr KeyNames kNames = {.op = "npu_dense_lightning_indexer_grad_kl_loss_pto",
                             .layout = "layout",
                             .lengths = "actual_seq_klen",
                             .query_layout = "layout",
                             .query_lengths = "actual_seq_qlen"};

void check_index_statistics(const char* name, const Tensor& tensor, const Tensor& query) {
  const bool packed = query.dim() == 3;
  const Argument argument(kNames.op, name, tensor);
  argument.rank(query.dim() - 1, packed ? "[1, T1]" : "[B, 1, S1]")
      .dtype(at::kFloat, "of npu_dense_lightning_indexer_softmax_lse_pto")
      .device_of(query);
  if (!packed) argument.size(0, query.sym_size(0), "B of query");
  argument.size(packed ? 0 : 1, 1, "N2: one key head")
      .size(packed ? 1 : 2, query.sym_size(packed ? 0 : 1), packed ? "T1 of query" : "S1 of query");
}

}  // namespace

template <bool computes>
std::tuple<Tensor, Tensor, Tensor, Tensor> npu_dense_lightning_indexer_grad_kl_loss_pto(
    const Tensor& query, const Tensor& key, const Tensor& query_index, const Tensor& key_index,
    const Tensor& weights, const Tensor& softmax_max, const Tensor& softmax_sum,
    const Tensor& softmax_max_index, const Tensor& softmax_sum_index, double scale_value,
    const OptionalTensor& query_rope, const OptionalTensor& key_rope, HostLengths actual_seq_qlen,
    HostLengths actual_seq_klen, c10::string_view layout, int64_t sparse_mode, int64_t cmp_ratio) {
  const HostSequences sequences(kNames, query, actual_seq_qlen, actual_seq_klen, layout,
                                sparse_mode, cmp_ratio, computes);
  const OptionalTensor max = softmax_max_index, sum = softmax_sum_index;
  SequenceParams attention = sequences.of(query, key);
  IndexKlParams p{.index = {.sequences = sequences.of(query_index, key_index), .weights = weights},
                  .query = query,
                  .key = key,
                  .query_rope = query_rope,
                  .key_rope = key_rope,
                  .softmax_max = softmax_max,
                  .softmax_sum = softmax_sum,
                  .scale_value = scale_value,
                  .softmax_max_index = max,
                  .softmax_sum_index = sum};
  check_index_kl(kNames, attention, p);
  check_index_statistics("softmax_max_index", softmax_max_index, query);
  check_index_statistics("softmax_sum_index", softmax_sum_index, query);
  if (computes) index_kl_backward(p);
  return {p.index.d_query, p.index.d_key, p.index.d_weights, p.loss};
}

REGISTER_OP(npu_dense_lightning_indexer_grad_kl_loss_pto,
            "(Tensor query, Tensor key, Tensor query_index, Tensor key_index, Tensor weights, "
            "Tensor softmax_max, Tensor softmax_sum, Tensor softmax_max_index, "
            "Tensor softmax_sum_index, float scale_value, *, Tensor? query_rope=None, "
            "Tensor? key_rope=None, SymInt[]? actual_seq_qlen=None, "
            "SymInt[]? actual_seq_klen=None, str layout='BSND', int sparse_mode=3, "
            "int cmp_ratio=1) -> (Tensor, Tensor, Tensor, Tensor)")

// the gradients are results: backward() through them raises an error
TORCH_LIBRARY_IMPL(custom_pypto, Autograd, m) {
  m.impl(kNames.op, torch::autograd::autogradNotImplementedFallback());
}

}  // namespace custom_pypto
