// Sparse attention over the rows of a latent cache. docs/npu_sparse_flash_attention_pto.md
#include "npu_sparse_flash_attention_pto.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string>
#include <tuple>

#include "../tasks/attention.h"
#include "shared_contracts.h"

namespace custom_pypto {
namespace {

constexpr KeyNames kNames = {.op = "npu_sparse_flash_attention_pto",
                             .layout = "layout_kv",
                             .lengths = "actual_seq_lengths_kv"};

Tensor no_statistics(const Tensor& query) {
  return at::empty({0}, query.options().dtype(at::kFloat));
}

// Checks every argument and allocates the output.
void contract(AttentionParams& p) {
  check_unquantized_attention(kNames, p);
  const Tensor& query = p.sequences.query;
  p.out = empty(query.sym_sizes(), query.options());
  if (p.return_softmax_lse) {
    // [B, N2, S1, N1] or [N2, T1, N1]
    c10::SymDimVector shape(query.sym_sizes().begin(), query.sym_sizes().end() - 1);
    shape.insert(shape.end() - 2, 1);
    p.softmax_max = empty(shape, query.options().dtype(at::kFloat));
    p.softmax_sum = at::empty_like(p.softmax_max);
  } else {
    p.softmax_max = no_statistics(query);
    p.softmax_sum = no_statistics(query);
  }
}

}  // namespace

void sparse_flash_attention(AttentionParams& p) {
  contract(p);
  attend<ModelRows>(p, false);
}

using Statistics = std::tuple<Tensor, Tensor, Tensor>;  // with the output

template <bool computes, bool by_token = false>
Statistics npu_sparse_flash_attention_pto(
    const Tensor& query, const Tensor& key, const OptionalTensor& value,
    const Tensor& sparse_indices, double scale_value, const OptionalTensor& block_table,
    const OptionalTensor& actual_seq_lengths_query, const OptionalTensor& actual_seq_lengths_kv,
    const OptionalTensor& query_rope, const OptionalTensor& key_rope, int64_t sparse_block_size,
    c10::string_view layout_query, c10::string_view layout_kv, int64_t sparse_mode,
    const OptionalTensor& sinks, bool return_softmax_lse) {
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
                    .return_softmax_lse = return_softmax_lse};
  contract(p);
  if (computes) attend<ModelRows>(p, by_token);
  return {p.out, p.softmax_max, p.softmax_sum};
}

#define ARGUMENTS                                                             \
  "(Tensor query, Tensor key, Tensor? value, Tensor sparse_indices, "         \
  "float scale_value, *, Tensor? block_table=None, "                          \
  "Tensor? actual_seq_lengths_query=None, "                                   \
  "Tensor? actual_seq_lengths_kv=None, Tensor? query_rope=None, "             \
  "Tensor? key_rope=None, int sparse_block_size=1, str layout_query='BSND', " \
  "str layout_kv='PA_BSND', int sparse_mode=3, Tensor? sinks=None"

// attention_out, softmax_max, softmax_sum
REGISTER_OP_WITH_FLAG(npu_sparse_flash_attention_pto, softmax_lse, ARGUMENTS, return_softmax_lse,
                      "(Tensor, Tensor, Tensor)")

// for batch-invariant models, on the CPU alone
TORCH_LIBRARY_FRAGMENT(custom_pypto, m) {
  m.def("npu_sparse_flash_attention_pto.by_token" ARGUMENTS
        ", bool return_softmax_lse=False) -> (Tensor, Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(custom_pypto, CPU, m) {
  m.impl("npu_sparse_flash_attention_pto.by_token", &npu_sparse_flash_attention_pto<true, true>);
}
TORCH_LIBRARY_IMPL(custom_pypto, Meta, m) {
  m.impl("npu_sparse_flash_attention_pto.by_token", &npu_sparse_flash_attention_pto<false, true>);
}

namespace {

// The arguments of a call without a gradient.
struct Constants {
  const Tensor& sparse_indices;
  double scale_value;
  const OptionalTensor &block_table, &lengths_query, &lengths_kv;
  int64_t sparse_block_size;
  c10::string_view layout_query, layout_kv;
  int64_t sparse_mode;
  bool by_token;
};

// The op below autograd.
Statistics call(const Tensor& query, const Tensor& key, const OptionalTensor& value,
                const OptionalTensor& query_rope, const OptionalTensor& key_rope,
                const OptionalTensor& sinks, const Constants& c, bool return_softmax_lse) {
  using Attend =
      Statistics(const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&, double,
                 const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                 const OptionalTensor&, const OptionalTensor&, int64_t, c10::string_view,
                 c10::string_view, int64_t, const OptionalTensor&, bool);
  const auto find = [](const char* overload) {
    return c10::Dispatcher::singleton()
        .findSchemaOrThrow("custom_pypto::npu_sparse_flash_attention_pto", overload)
        .typed<Attend>();
  };
  static const auto together = find("softmax_lse"), by_token = find("by_token");
  const auto& op = c.by_token ? by_token : together;
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(query, key, value, c.sparse_indices, c.scale_value, c.block_table, c.lengths_query,
                 c.lengths_kv, query_rope, key_rope, c.sparse_block_size, c.layout_query,
                 c.layout_kv, c.sparse_mode, sinks, return_softmax_lse);
}

class SparseFlashAttention : public torch::autograd::Function<SparseFlashAttention> {
 public:
  // the saved tensors, in order
  enum Saved {
    kQuery,
    kKey,
    kValue,
    kQueryRope,
    kKeyRope,
    kSinks,
    kIndices,
    kOut,
    kMax,
    kSum,
    kBlockTable,
    kLengthsQuery,
    kLengthsKv
  };

  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx,
                                                const Tensor& query, const Tensor& key,
                                                const OptionalTensor& value,
                                                const OptionalTensor& query_rope,
                                                const OptionalTensor& key_rope,
                                                const OptionalTensor& sinks, const Constants& c) {
    auto [out, max, sum] = call(query, key, value, query_rope, key_rope, sinks, c, true);
    const auto some = [](const OptionalTensor& x) { return x.value_or(Tensor()); };
    ctx->save_for_backward({query, key, some(value), some(query_rope), some(key_rope), some(sinks),
                            c.sparse_indices, out, max, sum, some(c.block_table),
                            some(c.lengths_query), some(c.lengths_kv)});
    ctx->saved_data["scale_value"] = c.scale_value;
    ctx->saved_data["sparse_block_size"] = c.sparse_block_size;
    ctx->saved_data["layout_query"] = std::string(c.layout_query);
    ctx->saved_data["layout_kv"] = std::string(c.layout_kv);
    ctx->saved_data["sparse_mode"] = c.sparse_mode;
    ctx->saved_data["cut"] = c.layout_kv == "PA_BSND" && !key.requires_grad();
    ctx->mark_non_differentiable({max, sum});
    return {out, max, sum};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
    using Grad = Gradients(
        const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&, const Tensor&,
        const Tensor&, const Tensor&, const Tensor&, double, int64_t, const OptionalTensor&,
        const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, c10::string_view,
        int64_t, std::optional<c10::string_view>, const OptionalTensor&, const OptionalTensor&);
    static const auto op =
        c10::Dispatcher::singleton()
            .findSchemaOrThrow("custom_pypto::npu_sparse_flash_attention_grad_pto", "")
            .typed<Grad>();
    if (ctx->saved_data["cut"].toBool()) reject_cut_cache(kNames.op);
    const torch::autograd::variable_list saved = ctx->get_saved_variables();
    const auto some = [&](Saved i) {
      return saved[i].defined() ? OptionalTensor(saved[i]) : OptionalTensor();
    };
    const auto text = [&](const char* name) { return ctx->saved_data[name].toStringRef(); };
    const std::string layout_query = text("layout_query"), layout_kv = text("layout_kv");
    const Tensor d_out = grads[0].defined() ? grads[0] : at::zeros_like(saved[kOut]);
    const auto [d_query, d_key, d_value, d_query_rope, d_key_rope, d_sinks] =
        op.call(saved[kQuery], saved[kKey], some(kValue), saved[kIndices], d_out, saved[kOut],
                saved[kMax], saved[kSum], ctx->saved_data["scale_value"].toDouble(),
                ctx->saved_data["sparse_block_size"].toInt(), some(kQueryRope), some(kKeyRope),
                some(kLengthsQuery), some(kLengthsKv), layout_query,
                ctx->saved_data["sparse_mode"].toInt(), layout_kv, some(kBlockTable), some(kSinks));
    const auto of = [&](Saved i, const Tensor& gradient) {
      return saved[i].defined() ? gradient : Tensor();
    };
    return {d_query,
            d_key,
            of(kValue, d_value),
            of(kQueryRope, d_query_rope),
            of(kKeyRope, d_key_rope),
            of(kSinks, d_sinks),
            Tensor()};
  }
};

template <bool by_token>
Statistics with_gradients(const Tensor& query, const Tensor& key, const OptionalTensor& value,
                          const Tensor& sparse_indices, double scale_value,
                          const OptionalTensor& block_table,
                          const OptionalTensor& actual_seq_lengths_query,
                          const OptionalTensor& actual_seq_lengths_kv,
                          const OptionalTensor& query_rope, const OptionalTensor& key_rope,
                          int64_t sparse_block_size, c10::string_view layout_query,
                          c10::string_view layout_kv, int64_t sparse_mode,
                          const OptionalTensor& sinks, bool return_softmax_lse) {
  const Constants c{.sparse_indices = sparse_indices,
                    .scale_value = scale_value,
                    .block_table = block_table,
                    .lengths_query = actual_seq_lengths_query,
                    .lengths_kv = actual_seq_lengths_kv,
                    .sparse_block_size = sparse_block_size,
                    .layout_query = layout_query,
                    .layout_kv = layout_kv,
                    .sparse_mode = sparse_mode,
                    .by_token = by_token};
  if (!wants_gradient(kNames.op, {query, key, value, query_rope, key_rope, sinks})) {
    return call(query, key, value, query_rope, key_rope, sinks, c, return_softmax_lse);
  }
  const auto list = SparseFlashAttention::apply(query, key, value, query_rope, key_rope, sinks, c);
  if (return_softmax_lse) return {list[0], list[1], list[2]};
  return {list[0], no_statistics(query), no_statistics(query)};
}

}  // namespace

TORCH_LIBRARY_IMPL(custom_pypto, Autograd, m) {
  m.impl("npu_sparse_flash_attention_pto.softmax_lse", &with_gradients<false>);
  m.impl("npu_sparse_flash_attention_pto.by_token", &with_gradients<true>);
}

}  // namespace custom_pypto
