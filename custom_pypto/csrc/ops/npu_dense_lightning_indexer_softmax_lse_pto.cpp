// Statistics of the softmax of an indexer's scores over every visible key.
// docs/npu_dense_lightning_indexer_grad_kl_loss_pto.md
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include <tuple>

#include "../tasks/indexer.h"
#include "index_kl_contract.h"

namespace custom_pypto {
namespace {

constexpr KeyNames kNames = {.op = "npu_dense_lightning_indexer_softmax_lse_pto",
                             .layout = "layout",
                             .lengths = "actual_seq_klen",
                             .query_layout = "layout",
                             .query_lengths = "actual_seq_qlen",
                             .query = "query_index",
                             .key = "key_index"};

}  // namespace

template <bool computes>
std::tuple<Tensor, Tensor> npu_dense_lightning_indexer_softmax_lse_pto(
    const Tensor& query_index, const Tensor& key_index, const Tensor& weights,
    HostLengths actual_seq_qlen, HostLengths actual_seq_klen, c10::string_view layout,
    int64_t sparse_mode, int64_t cmp_ratio) {
  const HostSequences sequences(kNames, query_index, actual_seq_qlen, actual_seq_klen, layout,
                                sparse_mode, cmp_ratio, computes);
  SequenceParams p = sequences.of(query_index, key_index);
  check_index(kNames, p, weights);
  check_unquantized_index(kNames, p, weights);
  // [B, 1, S1] or [1, T1]
  c10::SymDimVector shape(query_index.sym_sizes().begin(), query_index.sym_sizes().end() - 2);
  shape.insert(shape.end() - 1, 1);
  const Tensor max = empty(shape, query_index.options().dtype(at::kFloat));
  const Tensor sum = at::empty_like(max);
  if (computes) index_statistics(p, weights, max, sum);
  return {max, sum};
}

REGISTER_OP(npu_dense_lightning_indexer_softmax_lse_pto,
            "(Tensor query_index, Tensor key_index, Tensor weights, *, "
            "SymInt[]? actual_seq_qlen=None, SymInt[]? actual_seq_klen=None, str layout='BSND', "
            "int sparse_mode=3, int cmp_ratio=1) -> (Tensor, Tensor)")

// constants of a divergence, whose gradients are results of their own op
TORCH_LIBRARY_IMPL(custom_pypto, Autograd, m) {
  m.impl(kNames.op, torch::autograd::autogradNotImplementedFallback());
}

}  // namespace custom_pypto
