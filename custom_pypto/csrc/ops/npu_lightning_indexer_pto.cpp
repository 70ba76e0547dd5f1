// Lightning indexer: which keys matter most to each query token. docs/npu_lightning_indexer_pto.md
#include "npu_lightning_indexer_pto.h"

#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string>
#include <tuple>

#include "../tasks/indexer.h"
#include "shared_contracts.h"

namespace custom_pypto {
namespace {

constexpr KeyNames kNames = {
    .op = "npu_lightning_indexer_pto", .layout = "layout_key", .lengths = "actual_seq_lengths_key"};

// Checks every argument and allocates the output.
void contract(IndexerParams& p) {
  check_indexer(kNames, p);
  check_unquantized_index(kNames, p.sequences, p.weights);
  p.values = p.return_value ? at::empty_like(p.out, p.out.options().dtype(at::kFloat))
                            : at::empty({0}, p.sequences.query.options());
}

}  // namespace

void lightning_indexer(IndexerParams& p) {
  contract(p);
  select_keys(p);
}

using IndicesAndValues = std::tuple<Tensor, Tensor>;

template <bool computes>
IndicesAndValues npu_lightning_indexer_pto(
    const Tensor& query, const Tensor& key, const Tensor& weights,
    const OptionalTensor& actual_seq_lengths_query, const OptionalTensor& actual_seq_lengths_key,
    const OptionalTensor& block_table, c10::string_view layout_query, c10::string_view layout_key,
    int64_t sparse_count, int64_t sparse_mode, int64_t cmp_ratio, bool return_value) {
  IndexerParams p{.sequences = {.query = query,
                                .key = key,
                                .actual_seq_lengths_query = actual_seq_lengths_query,
                                .actual_seq_lengths_key = actual_seq_lengths_key,
                                .block_table = block_table,
                                .layout_query = layout_query,
                                .layout_key = layout_key,
                                .sparse_mode = sparse_mode,
                                .cmp_ratio = cmp_ratio},
                  .weights = weights,
                  .sparse_count = sparse_count,
                  .return_value = return_value};
  computes ? lightning_indexer(p) : contract(p);
  return {p.out, p.values.to(query.scalar_type())};
}

// sparse_indices, sparse_values
REGISTER_OP_WITH_FLAG(npu_lightning_indexer_pto, return_value,
                      "(Tensor query, Tensor key, Tensor weights, *, "
                      "Tensor? actual_seq_lengths_query=None, "
                      "Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, "
                      "str layout_query='BSND', str layout_key='PA_BSND', int sparse_count=2048, "
                      "int sparse_mode=3, int cmp_ratio=1",
                      return_value, "(Tensor, Tensor)")

namespace {

// The arguments of a call without a gradient.
struct Constants {
  const OptionalTensor &lengths_query, &lengths_key, &block_table;
  c10::string_view layout_query, layout_key;
  int64_t sparse_count, sparse_mode, cmp_ratio;
};

IndicesAndValues call(const Tensor& query, const Tensor& key, const Tensor& weights,
                      const Constants& c, bool return_value) {
  using Values = IndicesAndValues(
      const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
      const OptionalTensor&, c10::string_view, c10::string_view, int64_t, int64_t, int64_t, bool);
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("custom_pypto::npu_lightning_indexer_pto", "return_value")
          .typed<Values>();
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(query, key, weights, c.lengths_query, c.lengths_key, c.block_table, c.layout_query,
                 c.layout_key, c.sparse_count, c.sparse_mode, c.cmp_ratio, return_value);
}

class LightningIndexer : public torch::autograd::Function<LightningIndexer> {
 public:
  // the saved tensors, in order
  enum Saved { kQuery, kKey, kWeights, kIndices, kLengthsQuery, kLengthsKey, kBlockTable };

  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx,
                                                const Tensor& query, const Tensor& key,
                                                const Tensor& weights, const Constants& c) {
    auto [indices, values] = call(query, key, weights, c, true);
    const auto some = [](const OptionalTensor& x) { return x.value_or(Tensor()); };
    ctx->save_for_backward({query, key, weights, indices, some(c.lengths_query),
                            some(c.lengths_key), some(c.block_table)});
    ctx->saved_data["layout_query"] = std::string(c.layout_query);
    ctx->saved_data["layout_key"] = std::string(c.layout_key);
    ctx->saved_data["sparse_mode"] = c.sparse_mode;
    ctx->saved_data["cmp_ratio"] = c.cmp_ratio;
    ctx->saved_data["cut"] = c.layout_key == "PA_BSND" && !key.requires_grad();
    ctx->mark_non_differentiable({indices});
    return {indices, values};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    using Grad = std::tuple<Tensor, Tensor, Tensor>(
        const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
        const OptionalTensor&, const OptionalTensor&, c10::string_view, int64_t,
        std::optional<c10::string_view>, const OptionalTensor&, int64_t);
    static const auto op =
        c10::Dispatcher::singleton()
            .findSchemaOrThrow("custom_pypto::npu_lightning_indexer_grad_pto", "")
            .typed<Grad>();
    if (ctx->saved_data["cut"].toBool()) reject_cut_cache(kNames.op);
    const torch::autograd::variable_list saved = ctx->get_saved_variables();
    const auto some = [&](Saved i) {
      return saved[i].defined() ? OptionalTensor(saved[i]) : OptionalTensor();
    };
    const auto text = [&](const char* name) { return ctx->saved_data[name].toStringRef(); };
    const std::string layout_query = text("layout_query"), layout_key = text("layout_key");
    const auto [d_query, d_key, d_weights] = op.call(
        saved[kQuery], saved[kKey], grads[1], saved[kIndices], saved[kWeights], some(kLengthsQuery),
        some(kLengthsKey), layout_query, ctx->saved_data["sparse_mode"].toInt(), layout_key,
        some(kBlockTable), ctx->saved_data["cmp_ratio"].toInt());
    return {d_query, d_key, d_weights, Tensor()};
  }
};

IndicesAndValues with_gradients(const Tensor& query, const Tensor& key, const Tensor& weights,
                                const OptionalTensor& actual_seq_lengths_query,
                                const OptionalTensor& actual_seq_lengths_key,
                                const OptionalTensor& block_table, c10::string_view layout_query,
                                c10::string_view layout_key, int64_t sparse_count,
                                int64_t sparse_mode, int64_t cmp_ratio, bool return_value) {
  const Constants c{.lengths_query = actual_seq_lengths_query,
                    .lengths_key = actual_seq_lengths_key,
                    .block_table = block_table,
                    .layout_query = layout_query,
                    .layout_key = layout_key,
                    .sparse_count = sparse_count,
                    .sparse_mode = sparse_mode,
                    .cmp_ratio = cmp_ratio};
  if (!return_value || !wants_gradient(kNames.op, {query, key, weights})) {
    return call(query, key, weights, c, return_value);
  }
  const auto list = LightningIndexer::apply(query, key, weights, c);
  return {list[0], list[1]};
}

}  // namespace

TORCH_LIBRARY_IMPL(custom_pypto, Autograd, m) {
  m.impl("npu_lightning_indexer_pto.return_value", &with_gradients);
}

}  // namespace custom_pypto
