// Projections, RoPE and quantization before the lightning indexer on an int8 cache.
// docs/npu_lightning_indexer_prolog_pto.md
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "../tasks/index_rows.h"
#include "contract.h"
#include "prolog.h"

namespace custom_pypto {
namespace {

constexpr char kOp[] = "npu_lightning_indexer_prolog_pto";
constexpr int64_t kMostInt8 = (1 << 17) - 1;  // products of bytes whose sum int32 holds
constexpr int64_t kTokensAtOnce = 1024;       // bounds the memory of float32 queries

using Result = std::tuple<Tensor, Tensor, Tensor>;  // query, query_scale, weights

struct PrologParams {
  const Tensor &token_x, &q_norm;
  const OptionalTensor& q_norm_scale;
  const Tensor& wq_b;
  const OptionalTensor& wq_b_scale;
  const Tensor &wk, &weights_proj, &ln_gamma_k, &ln_beta_k, &cos_idx_rope, &sin_idx_rope;
  const Tensor &hadamard_q, &hadamard_k, &idx_k_cache, &idx_k_scale_cache, &idx_k_cache_index;
  double layernorm_epsilon_k;
  c10::string_view layout_query, layout_key;
};

// [size] or [size, 1]
void check_scale(const char* name, const OptionalTensor& scale, const Dim& size, const char* shape,
                 const Tensor& first) {
  CHECK_ARGUMENT(scale, kOp, name, "a tensor (q_norm is int8)", "None");
  CHECK_ARGUMENT(scale->dim() == 1 || scale->dim() == 2, kOp, name, c10::str("of shape ", shape),
                 scale->sym_sizes());
  Argument argument(kOp, name, *scale);
  argument.size(0, size);
  if (scale->dim() == 2) argument.size(1, 1, "one scale per row");
  argument.dtype(at::kFloat).device_of(first);
}

void check_quantization(const PrologParams& p, const Dim& tokens, const Dim& columns) {
  if (p.q_norm.scalar_type() == at::kChar) {
    CHECK_ARGUMENT(p.q_norm.sym_size(1) <= kMostInt8, kOp, "q_norm.size(1)",
                   c10::str("at most ", kMostInt8, " (int32 holds the sums)"),
                   p.q_norm.sym_size(1));
    check_scale("q_norm_scale", p.q_norm_scale, tokens, "[T] or [T, 1]", p.token_x);
    check_scale("wq_b_scale", p.wq_b_scale, columns, "[N1 * D] or [N1 * D, 1]", p.token_x);
    return;
  }
  const auto unscaled = [&](const char* name, const OptionalTensor& scale) {
    CHECK_ARGUMENT(!scale, kOp, name,
                   c10::str("None (q_norm is ", dtype_name(p.q_norm.scalar_type()), ")"),
                   "a tensor; quantize q_norm and wq_b to int8, or omit both scales");
  };
  unscaled("q_norm_scale", p.q_norm_scale);
  unscaled("wq_b_scale", p.wq_b_scale);
}

// Every rule is checked here, before the caches are touched.
Result contract(const PrologParams& p) {
  CHECK_ARGUMENT(p.layout_query == "TND", kOp, "layout_query", "'TND'",
                 c10::str("'", p.layout_query, "'"));
  CHECK_ARGUMENT(p.layout_key == "PA_BSND", kOp, "layout_key", "'PA_BSND'",
                 c10::str("'", p.layout_key, "'"));
  CHECK_ARGUMENT(std::isfinite(p.layernorm_epsilon_k) && p.layernorm_epsilon_k >= 0, kOp,
                 "layernorm_epsilon_k", "finite and at least 0", p.layernorm_epsilon_k);
  Dim T("T"), H("H"), Q("Q"), N1("N1", Dim::kPositive), D("D", Dim::kInt8Dims);
  Dim R("R", Dim::kMultipleOf16), N2("1", "N2: one key head", 1);
  Dim blocks("blocks"), block_size("block_size", Dim::kBlockSize);
  Dim columns("N1 * D", "N1 of weights_proj * D of wk");

  ShapeTable table(kOp);
#define CHECK_SHAPE(name, ...) table.row(#name, p.name, {__VA_ARGS__}).device_of(p.token_x)
#define CHECK_SHAPE_AND_DTYPE(...) \
  CHECK_SHAPE(__VA_ARGS__).dtype(p.token_x.scalar_type(), "dtype of token_x")
  CHECK_SHAPE(token_x, T, H).dtype(kFloating);
  CHECK_SHAPE(q_norm, T, Q).dtype({p.token_x.scalar_type(), at::kChar}, "dtype of token_x, W8A8");
  CHECK_SHAPE(wq_b, Q, columns).dtype(p.q_norm.scalar_type(), "dtype of q_norm");
  CHECK_SHAPE_AND_DTYPE(wk, H, D);
  CHECK_SHAPE_AND_DTYPE(weights_proj, H, N1);
  CHECK_SHAPE_AND_DTYPE(ln_gamma_k, D);
  CHECK_SHAPE_AND_DTYPE(ln_beta_k, D);
  CHECK_SHAPE(cos_idx_rope, T, R).dtype_or_float32(p.token_x.scalar_type(), "dtype of token_x");
  CHECK_SHAPE(sin_idx_rope, T, R).dtype_or_float32(p.token_x.scalar_type(), "dtype of token_x");
  CHECK_SHAPE_AND_DTYPE(hadamard_q, D, D);
  CHECK_SHAPE_AND_DTYPE(hadamard_k, D, D);
  CHECK_SHAPE(idx_k_cache, blocks, block_size, N2, D).int8("npu_sparse_attention_pto").dense_rows();
  Dim one("1", "one scale per row", 1);
  if (p.idx_k_scale_cache.dim() == 4) {
    CHECK_SHAPE(idx_k_scale_cache, blocks, block_size, N2, one).dtype(at::kHalf);
  } else {
    CHECK_SHAPE(idx_k_scale_cache, blocks, block_size, N2).dtype(at::kHalf);
  }
  CHECK_SHAPE(idx_k_cache_index, T).dtype(kSlots, "flat slots of the caches");
#undef CHECK_SHAPE_AND_DTYPE
#undef CHECK_SHAPE
  CHECK_ARGUMENT(R.size <= D.size, kOp, "cos_idx_rope.size(1)",
                 c10::str("at most ", D.size, " (the first R of D dims are rotated)"), R.size);
  columns.size = N1.size * D.size;
  table.check_sizes();
  check_quantization(p, T, columns);
  const auto in = [&](at::ScalarType dtype) { return p.token_x.options().dtype(dtype); };
  return {empty({T.size, N1.size, D.size}, in(at::kChar)),
          empty({T.size, N1.size, 1}, in(at::kHalf)), empty({T.size, N1.size}, in(at::kHalf))};
}

// a . b of bytes: float32 holds the sum of so many products in any order, and int32 the sum of sums
Tensor int8_product(const Tensor& a, const Tensor& b) {
  constexpr int64_t kExactInFloat = 1024;
  const Tensor sums = at::zeros({a.size(0), b.size(1)}, a.options().dtype(at::kInt));
  for (int64_t first = 0; first < b.size(0); first += kExactInFloat) {
    const int64_t some = std::min(kExactInFloat, b.size(0) - first);
    sums.add_(
        at::matmul(a.narrow(1, first, some).to(at::kFloat), b.narrow(0, first, some).to(at::kFloat))
            .to(at::kInt));
  }
  return sums;
}

// Rows of q_norm . wq_b, in the dtype of token_x.
Tensor queries(const PrologParams& p, int64_t first, int64_t tokens) {
  const Tensor latent = p.q_norm.narrow(0, first, tokens);
  if (!p.q_norm_scale) return at::matmul(latent, p.wq_b);
  const Tensor row_scale = p.q_norm_scale->narrow(0, first, tokens).reshape({tokens, 1});
  const Tensor sums = int8_product(latent, p.wq_b).to(at::kFloat);
  return sums.mul(row_scale).mul_(p.wq_b_scale->reshape({1, -1})).to(p.token_x.scalar_type());
}

void compute(const PrologParams& p, const Result& result) {
  const auto& [query, query_scale, weights] = result;
  const Tensor sin = p.sin_idx_rope.unsqueeze(0), cos = p.cos_idx_rope.unsqueeze(0);
  const int64_t T = p.token_x.size(0), N1 = query.size(1), D = query.size(2);
  for (int64_t first = 0; first < T; first += kTokensAtOnce) {
    const int64_t some = std::min(kTokensAtOnce, T - first);
    const Tensor q = queries(p, first, some).view({1, some, N1, D});
    rotate_in_place(q, angles(sin.narrow(1, first, some)), angles(cos.narrow(1, first, some)),
                    /*neighbours=*/false);
    quantize_rows(q, p.hadamard_q, query.narrow(0, first, some),
                  query_scale.narrow(0, first, some));
  }
  weights.copy_(index_weights(p.token_x, p.weights_proj, D));
  const Tensor key = index_key({.x = p.token_x.unsqueeze(0),
                                .w = p.wk,
                                .gamma = p.ln_gamma_k,
                                .beta = p.ln_beta_k,
                                .sin = angles(sin),
                                .cos = angles(cos),
                                .eps = p.layernorm_epsilon_k});
  const bool four = p.idx_k_scale_cache.dim() == 4;
  quantize_into_cache(key.view({T, D}), p.hadamard_k, p.idx_k_cache_index, p.idx_k_cache,
                      four ? p.idx_k_scale_cache.squeeze(3) : p.idx_k_scale_cache);
}

}  // namespace

template <bool computes>
Result npu_lightning_indexer_prolog_pto(
    const Tensor& token_x, const Tensor& q_norm, const OptionalTensor& q_norm_scale,
    const Tensor& wq_b, const OptionalTensor& wq_b_scale, const Tensor& wk,
    const Tensor& weights_proj, const Tensor& ln_gamma_k, const Tensor& ln_beta_k,
    const Tensor& cos_idx_rope, const Tensor& sin_idx_rope, const Tensor& hadamard_q,
    const Tensor& hadamard_k, const Tensor& idx_k_cache, const Tensor& idx_k_scale_cache,
    const Tensor& idx_k_cache_index, double layernorm_epsilon_k, c10::string_view layout_query,
    c10::string_view layout_key) {
  const PrologParams p{.token_x = token_x,
                       .q_norm = q_norm,
                       .q_norm_scale = q_norm_scale,
                       .wq_b = wq_b,
                       .wq_b_scale = wq_b_scale,
                       .wk = wk,
                       .weights_proj = weights_proj,
                       .ln_gamma_k = ln_gamma_k,
                       .ln_beta_k = ln_beta_k,
                       .cos_idx_rope = cos_idx_rope,
                       .sin_idx_rope = sin_idx_rope,
                       .hadamard_q = hadamard_q,
                       .hadamard_k = hadamard_k,
                       .idx_k_cache = idx_k_cache,
                       .idx_k_scale_cache = idx_k_scale_cache,
                       .idx_k_cache_index = idx_k_cache_index,
                       .layernorm_epsilon_k = layernorm_epsilon_k,
                       .layout_query = layout_query,
                       .layout_key = layout_key};
  const Result result = contract(p);
  if (computes && token_x.size(0) != 0) compute(p, result);
  return result;
}

REGISTER_OP(
    npu_lightning_indexer_prolog_pto,
    "(Tensor token_x, Tensor q_norm, Tensor? q_norm_scale, Tensor wq_b, Tensor? wq_b_scale, "
    "Tensor wk, Tensor weights_proj, Tensor ln_gamma_k, Tensor ln_beta_k, "
    "Tensor cos_idx_rope, Tensor sin_idx_rope, Tensor hadamard_q, Tensor hadamard_k, "
    "Tensor(a!) idx_k_cache, Tensor(b!) idx_k_scale_cache, Tensor idx_k_cache_index, "
    "float layernorm_epsilon_k, *, str layout_query='TND', "
    "str layout_key='PA_BSND') -> (Tensor, Tensor, Tensor)")

TORCH_LIBRARY_IMPL(custom_pypto, Autograd, m) {
  m.impl(kOp, torch::autograd::autogradNotImplementedFallback());
}

}  // namespace custom_pypto
