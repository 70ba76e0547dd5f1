// Sparse attention over the rows of a latent cache. docs/npu_sparse_flash_attention_pto.md
#include "npu_sparse_flash_attention_pto.h"

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

// Checks every argument and allocates the output.
void contract(AttentionParams& p) {
  check_unquantized_attention(kNames, p);
  const Tensor& query = p.sequences.query;
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

namespace {

using Statistics = std::tuple<Tensor, Tensor, Tensor>;  // with the output

// The arguments of a call without a gradient.
struct Constants {
  const Tensor& sparse_indices;
  double scale_value;
  const OptionalTensor &block_table, &lengths_query, &lengths_kv;
  int64_t sparse_block_size;
  c10::string_view layout_query, layout_kv;
  int64_t sparse_mode;
};

// The overload below autograd: the default one without `statistics`.
Statistics call(const Tensor& query, const Tensor& key, const OptionalTensor& value,
                const OptionalTensor& query_rope, const OptionalTensor& key_rope,
                const OptionalTensor& sinks, const Constants& c, std::optional<bool> statistics) {
  using Plain = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&, double,
                       const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                       const OptionalTensor&, const OptionalTensor&, int64_t, c10::string_view,
                       c10::string_view, int64_t, const OptionalTensor&);
  using Lse = Statistics(const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&, double,
                         const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                         const OptionalTensor&, const OptionalTensor&, int64_t, c10::string_view,
                         c10::string_view, int64_t, const OptionalTensor&, bool);
  const auto find = [](const char* overload) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(
        "custom_pypto::npu_sparse_flash_attention_pto", overload);
  };
  static const auto plain = find("").typed<Plain>();
  static const auto lse = find("softmax_lse").typed<Lse>();
  const at::AutoDispatchBelowADInplaceOrView guard;
  const auto run = [&](const auto& op, auto... more) {
    return op.call(query, key, value, c.sparse_indices, c.scale_value, c.block_table,
                   c.lengths_query, c.lengths_kv, query_rope, key_rope, c.sparse_block_size,
                   c.layout_query, c.layout_kv, c.sparse_mode, sinks, more...);
  };
  if (statistics) return run(lse, *statistics);
  return {run(plain), Tensor(), Tensor()};
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

// Both overloads, as npu_sparse_flash_attention_pto.
template <typename... Wanted>
auto with_gradients(const Tensor& query, const Tensor& key, const OptionalTensor& value,
                    const Tensor& sparse_indices, double scale_value,
                    const OptionalTensor& block_table,
                    const OptionalTensor& actual_seq_lengths_query,
                    const OptionalTensor& actual_seq_lengths_kv, const OptionalTensor& query_rope,
                    const OptionalTensor& key_rope, int64_t sparse_block_size,
                    c10::string_view layout_query, c10::string_view layout_kv, int64_t sparse_mode,
                    const OptionalTensor& sinks, Wanted... return_softmax_lse) {
  const Constants c{.sparse_indices = sparse_indices,
                    .scale_value = scale_value,
                    .block_table = block_table,
                    .lengths_query = actual_seq_lengths_query,
                    .lengths_kv = actual_seq_lengths_kv,
                    .sparse_block_size = sparse_block_size,
                    .layout_query = layout_query,
                    .layout_kv = layout_kv,
                    .sparse_mode = sparse_mode};
  const bool gradient = wants_gradient(kNames.op, {query, key, value, query_rope, key_rope, sinks});
  Statistics found;
  if (gradient) {
    const auto list =
        SparseFlashAttention::apply(query, key, value, query_rope, key_rope, sinks, c);
    found = {list[0], list[1], list[2]};
  } else {
    std::optional<bool> statistics;
    ((statistics = return_softmax_lse), ...);
    found = call(query, key, value, query_rope, key_rope, sinks, c, statistics);
  }
  if constexpr (sizeof...(Wanted) == 0) {
    return std::get<0>(found);
  } else {
    if (!gradient || (false || ... || return_softmax_lse)) return found;
    const Tensor& out = std::get<0>(found);
    const auto none = [&] { return at::empty({0}, out.options().dtype(at::kFloat)); };
    return Statistics(out, none(), none());
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(custom_pypto, Autograd, m) {
  m.impl(kNames.op, &with_gradients<>);
  m.impl(kSoftmaxLse, &with_gradients<bool>);
}

}  // namespace custom_pypto
