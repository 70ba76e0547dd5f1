// Layer ops of rows: norms, rotations, routes and sums.
#include "../tasks/row_functions.h"

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include <algorithm>
#include <iterator>
#include <string_view>
#include <tuple>

#include "contract.h"

namespace custom_pypto {

template <bool computes>
Tensor rms_norm(const Tensor& x, const OptionalTensor& weight, double eps) {
  constexpr char kOp[] = "rms_norm";
  const Argument first(kOp, "x", x);
  first.dtype(kFloating);
  CHECK_ARGUMENT(x.dim() >= 1, kOp, "x", "of shape [.., D]", x.sym_sizes());
  if (weight) {
    Argument(kOp, "weight", *weight)
        .rank(1, "[D]")
        .size(0, x.sym_size(-1), "D of x")
        .dtype_or_float32(x.scalar_type(), "dtype of x")
        .device_of(x);
  }
  const Tensor out = empty(x.sym_sizes(), x.options());
  if (computes && x.numel() != 0) norm_rows(x, weight, eps, out);
  return out;
}

// x [B, S, N, D], and cos and sin for each token
void check_angles(const char* op, const Tensor& x, const Tensor& cos, const Tensor& sin,
                  const char* shape) {
  Argument(op, "x", x).rank(4, "[B, S, N, D]").dtype(kFloating);
  for (const auto& [name, angles] : {std::pair("cos", &cos), std::pair("sin", &sin)}) {
    Argument(op, name, *angles)
        .rank(3, shape)
        .sizes(x, 2, "as x")
        .size(2, cos.sym_size(-1), "as cos")
        .dtype(x.scalar_type(), "dtype of x")
        .device_of(x);
  }
}

template <bool computes>
Tensor rotate(const Tensor& x, const Tensor& cos, const Tensor& sin, int64_t first,
              bool interleaved) {
  constexpr char kOp[] = "rotate";
  check_angles(kOp, x, cos, sin, "[B, S, R]");
  const c10::SymInt width = cos.sym_size(-1);
  CHECK_ARGUMENT(width % 2 == 0, kOp, "cos.size(-1)", "even (R)", width);
  CHECK_ARGUMENT(first >= 0 && x.sym_size(-1) - width >= first, kOp, "first",
                 "at least 0, and at most D - R", first);
  const Tensor out = empty(x.sym_sizes(), x.options());
  if (computes && x.numel() != 0) {
    rotate_rows(
        {.x = x, .cos = cos, .sin = sin, .first = first, .interleaved = interleaved, .out = out});
  }
  return out;
}

template <bool computes>
Tensor rotate_pairs(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  constexpr char kOp[] = "rotate_pairs";
  check_angles(kOp, x, cos, sin, "[B, S, R / 2]");
  const c10::SymInt pairs = cos.sym_size(-1);
  CHECK_ARGUMENT(x.sym_size(-1) >= 2 * pairs, kOp, "cos.size(-1)", "at most D / 2 (R / 2)", pairs);
  const Tensor out = empty(x.sym_sizes(), x.options());
  if (computes && x.numel() != 0) {
    const int64_t first = x.size(-1) - 2 * cos.size(-1);
    rotate_pair_rows({.x = x, .cos = cos, .sin = sin, .first = first, .out = out});
  }
  return out;
}

// Checks bias [E] and k beside logits [T, E]; returns weights and experts [T, k], to be filled.
std::tuple<Tensor, Tensor> choices(const char* op, const Tensor& logits, const Tensor& bias,
                                   int64_t k) {
  const c10::SymInt experts = logits.sym_size(1);
  Argument(op, "bias", bias)
      .rank(1, "[E]")
      .size(0, experts, "E of logits")
      .dtype(at::kFloat)
      .device_of(logits);
  CHECK_ARGUMENT(k >= 1 && experts >= k, op, "k", "from 1 to E", k);
  const auto shape = {logits.sym_size(0), c10::SymInt(k)};
  return {empty(shape, logits.options()), empty(shape, logits.options().dtype(at::kLong))};
}

template <bool computes>
std::tuple<Tensor, Tensor> route(const Tensor& logits, const Tensor& bias, int64_t groups,
                                 int64_t kept, int64_t k, bool normalize, double scale) {
  constexpr char kOp[] = "route";
  Argument(kOp, "logits", logits).rank(2, "[T, E]").dtype(at::kFloat).dense_rows();
  const c10::SymInt experts = logits.sym_size(1);
  CHECK_ARGUMENT(groups >= 1 && experts % groups == 0 && experts / groups >= 2, kOp, "groups",
                 "a divisor of E, with two experts in a group", groups);
  CHECK_ARGUMENT(kept >= 1 && kept <= groups, kOp, "kept", "from 1 to groups", kept);
  const auto [weights, chosen] = choices(kOp, logits, bias, k);
  if (computes && logits.numel() != 0) {
    route_rows({.logits = logits.contiguous(),
                .bias = bias.contiguous(),
                .groups = groups,
                .kept = kept,
                .normalize = normalize,
                .scale = scale,
                .weights = weights,
                .experts = chosen});
  }
  return {weights, chosen};
}

template <bool computes>
std::tuple<Tensor, Tensor> route_roots(const Tensor& logits, const Tensor& bias, int64_t k,
                                       double scale) {
  constexpr char kOp[] = "route_roots";
  Argument(kOp, "logits", logits).rank(2, "[T, E]").dtype(kFloating);
  const auto [weights, chosen] = choices(kOp, logits, bias, k);
  if (computes && logits.numel() != 0) {
    route_root_rows({.logits = logits.contiguous(),
                     .bias = bias.contiguous(),
                     .scale = scale,
                     .weights = weights,
                     .experts = chosen});
  }
  return {weights, chosen};
}

template <bool computes>
Tensor weighted_sum(const Tensor& x, const Tensor& weights) {
  constexpr char kOp[] = "weighted_sum";
  Argument(kOp, "x", x).rank(3, "[T, k, D]").dtype(kFloating);
  Argument(kOp, "weights", weights)
      .rank(2, "[T, k]")
      .sizes(x, 2, "as x")
      .dtype(at::kFloat)
      .device_of(x);
  const Tensor out = empty({x.sym_size(0), x.sym_size(2)}, x.options());
  if (computes && out.numel() != 0) {
    add_weighted_rows(x.contiguous(), weights.contiguous(), out);
  }
  return out;
}

template <bool computes>
Tensor activate(const Tensor& x, std::string_view name) {
  constexpr char kOp[] = "activate";
  Argument(kOp, "x", x).dtype(kFloating);
  constexpr std::string_view kNames[] = {"sigmoid", "silu", "softplus"};  // as Activation
  const auto* found = std::find(std::begin(kNames), std::end(kNames), name);
  CHECK_ARGUMENT(found != std::end(kNames), kOp, "name", "'sigmoid', 'silu' or 'softplus'", "'",
                 name, "'");
  const Tensor out = empty(x.sym_sizes(), x.options());
  if (computes && x.numel() != 0) {
    const auto f = static_cast<Activation>(found - std::begin(kNames));
    activate_values(x.contiguous(), f, out);
  }
  return out;
}

REGISTER_OP(activate, "(Tensor x, str name) -> Tensor")
REGISTER_OP(rms_norm, "(Tensor x, Tensor? weight, float eps) -> Tensor")
REGISTER_OP(rotate, "(Tensor x, Tensor cos, Tensor sin, int first, bool interleaved) -> Tensor")
REGISTER_OP(rotate_pairs, "(Tensor x, Tensor cos, Tensor sin) -> Tensor")

REGISTER_OP(route,
            "(Tensor logits, Tensor bias, int groups, int kept, int k, bool normalize, float scale)"
            " -> (Tensor, Tensor)")

REGISTER_OP(route_roots, "(Tensor logits, Tensor bias, int k, float scale) -> (Tensor, Tensor)")

REGISTER_OP(weighted_sum, "(Tensor x, Tensor weights) -> Tensor")

TORCH_LIBRARY_IMPL(custom_pypto, Autograd, m) {
  for (const char* op :
       {"activate", "rms_norm", "rotate", "rotate_pairs", "route", "route_roots", "weighted_sum"}) {
    m.impl(op, torch::autograd::autogradNotImplementedFallback());
  }
}

}  // namespace custom_pypto
