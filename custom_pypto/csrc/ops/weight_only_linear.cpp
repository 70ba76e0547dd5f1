// Linear layers over weights as they are stored. docs/weight_only_linear.md
#include "weight_only_linear.h"

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include <string>

#include "../tasks/plain_linear.h"
#include "../tasks/weight_only.h"

namespace custom_pypto {

const WeightFacts& check_weight_format(const StoredNames& names, const Tensor& weight,
                                       const OptionalTensor& scales, bool rounded,
                                       const char* others) {
  const auto name_of = [](at::ScalarType codes, std::optional<at::ScalarType> of_scales) {
    return dtype_name(codes) + " and " + (of_scales ? dtype_name(*of_scales) : "None");
  };
  const auto of_scales = scales ? std::optional(scales->scalar_type()) : std::nullopt;
  std::string known = others;
  for (int i = 0; i < cpu::kWeightFormats; ++i) {
    const WeightFacts& facts = kWeightFacts[i];
    if (rounded && !kernels().weights[i].round) continue;
    if (facts.weight == weight.scalar_type() && facts.scales == of_scales) return facts;
    known += (known.empty() ? "" : ", ") + name_of(facts.weight, facts.scales);
  }
  CHECK_ARGUMENT(false, names.op, c10::str(names.weight, ".dtype and ", names.scales, ".dtype"),
                 known, name_of(weight.scalar_type(), of_scales));
}

void check_scales(const StoredNames& names, const WeightFacts& facts, const Tensor& weight,
                  const Tensor& scales, const c10::SymInt& depth, const c10::SymInt& block) {
  const int64_t lead = weight.dim() - 2;  // 1 with experts
  const c10::SymInt rows = weight.sym_size(-2);
  const Argument argument(names.op, names.scales, scales);
  const auto of_rank = [&](int64_t rank) {
    if (scales.dim() != lead + rank) {
      // not before: where weights have passed through the caches, a string takes 10 microseconds
      const auto shape = c10::str(lead ? "[E, " : "[", facts.scale_shape, "] for ", names.weight,
                                  " in ", dtype_name(facts.weight));
      argument.rank(lead + rank, shape.c_str());
    }
    if (lead) argument.size(0, weight.sym_size(0), "E of weight");
  };
  if (facts.blocks) {
    constexpr char kWhy[] = "blocks of weight, the last one may be shorter";
    of_rank(2);
    argument.size(lead, (rows + block - 1) / block, kWhy);
    argument.size(lead + 1, (depth + block - 1) / block, kWhy);
    return;
  }
  of_rank(facts.zeros ? 3 : facts.group ? 2 : 1);
  argument.size(lead, rows, "N of weight");
  if (facts.group) {
    static_assert(cpu::kFp4Group == 32);
    argument.size(lead + 1, depth / facts.group, "of weight: a scale for 32 values");
  }
  if (facts.zeros) {
    argument.size(-1, 2, "scale and zero");
    const c10::SymInt groups = scales.sym_size(-2);
    CHECK_ARGUMENT(groups > 0 && depth % groups == 0 && depth / groups % cpu::kWeightUnit == 0,
                   names.op, c10::str(names.scales, ".size(-2)"),
                   "K / G, for a G that is a multiple of 32", groups);
  }
}

namespace {

constexpr char kOp[] = "weight_only_linear", kInvariant[] = "invariant_linear";
constexpr int64_t kMostBlock = 1024;
constexpr int64_t kMostDepth = 1 << 30;  // kernels count in int
// beyond, x may be rounded to int8 for a weight of int8
constexpr int64_t kFewTokens = 16;

void check_operands(const char* op, const Tensor& x, const Tensor& weight, bool experts) {
  const Argument first(op, "x", x), second(op, "weight", weight);
  first.dtype(kFloating);
  CHECK_ARGUMENT(x.dim() >= 1, op, "x", "of shape [.., K]", x.sym_sizes());
  second.rank(experts ? 3 : 2, experts ? "[E, N, K] (with experts)" : "[N, K] (without experts)");
  second.device_of(x);
}

void check_weight(const char* op, const Tensor& x, const Tensor& weight,
                  const OptionalTensor& scales, bool experts, int64_t block_size) {
  check_operands(op, x, weight, experts);
  const Argument second(op, "weight", weight);
  const StoredNames names = {.op = op, .weight = "weight", .scales = "scales"};
  const WeightFacts& facts = check_weight_format(names, weight, scales);
  const c10::SymInt depth = x.sym_size(-1);
  CHECK_ARGUMENT(depth > 0 && depth <= kMostDepth && depth % cpu::kWeightUnit == 0, op,
                 "x.size(-1)", "a positive multiple of 32 up to 2**30 (K)", depth);
  second.size(-1, depth / facts.codes, facts.codes > 1 ? "K / 2, two values per byte" : "K of x");
  CHECK_ARGUMENT(block_size > 0 && block_size <= kMostBlock && block_size % cpu::kWeightUnit == 0,
                 op, "block_size", "a multiple of 32 up to 1024", block_size);
  if (scales) {
    Argument(op, "scales", *scales).device_of(x);
    check_scales(names, facts, weight, *scales, depth, block_size);
  }
  if (weight.scalar_type() == at::kBFloat16 && weight.sym_stride(-1) != 1) {
    CHECK_ARGUMENT(weight.sym_stride(-2) == 1, op, "weight.stride(-1) or weight.stride(-2)", "1",
                   weight.sym_stride(-1), " and ", weight.sym_stride(-2), "; call .contiguous()");
  } else {
    second.dense_rows();
  }
}

// [.., N], or with experts [.., k, N], to be filled
Tensor output(const char* op, const Tensor& x, const Tensor& weight,
              const OptionalTensor& experts) {
  c10::SymDimVector shape(x.sym_sizes().begin(), x.sym_sizes().end() - 1);
  if (experts) {
    const Argument ids(op, "experts", *experts);
    ids.dtype(kSlots).device_of(x);
    const bool shared = experts->dim() == x.dim();
    CHECK_ARGUMENT(shared || experts->dim() + 1 == x.dim(), op, "experts",
                   "of shape [.., k] for x of shape [.., K] or [.., k, K]", experts->sym_sizes());
    ids.sizes(x, x.dim() - 1, "as x");
    if (shared) shape.push_back(experts->sym_size(-1));
  }
  shape.push_back(weight.sym_size(-2));
  return empty(shape, x.options());
}

// Whether the kernels of stored weights multiply it, in floats.
bool is_stored(const Tensor& weight) {
  if (weight.scalar_type() != at::kBFloat16 || weight.dim() < 2) return false;
  const bool dense = weight.sym_stride(-1) == 1 || weight.sym_stride(-2) == 1;
  return dense && weight.sym_size(-1) > 0 && weight.sym_size(-1) % cpu::kWeightUnit == 0;
}

}  // namespace

template <bool computes>
Tensor weight_only_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& scales,
                          const OptionalTensor& experts, int64_t block_size, bool int8_x) {
  check_weight(kOp, x, weight, scales, experts.has_value(), block_size);
  const bool int8 = weight.scalar_type() == at::kChar;
  CHECK_ARGUMENT(!int8_x || int8 || weight.scalar_type() == at::kByte, kOp, "int8_x",
                 "False for a weight that has neither int8 nor 4 bits", "True");
  const Tensor out = output(kOp, x, weight, experts);
  if (computes && out.numel() != 0) {
    const int64_t chosen = experts && experts->dim() ? experts->size(-1) : 1;
    const int64_t tokens = experts ? experts->numel() / chosen : x.numel() / x.size(-1);
    weight_only({.x = x,
                 .weight = weight,
                 .scales = scales,
                 .experts = experts,
                 .block_size = block_size,
                 .out = out,
                 .int8_x = int8_x && (!int8 || tokens > kFewTokens)});
  }
  return out;
}

template <bool computes>
Tensor invariant_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& scales,
                        const OptionalTensor& experts, int64_t block_size) {
  const bool stored = scales || is_stored(weight);
  if (stored) {
    check_weight(kInvariant, x, weight, scales, experts.has_value(), block_size);
  } else {
    check_operands(kInvariant, x, weight, experts.has_value());
    const Argument second(kInvariant, "weight", weight);
    second.dtype(kFloating, "without scales");
    const c10::SymInt depth = x.sym_size(-1);
    CHECK_ARGUMENT(depth > 0 && depth <= kMostDepth, kInvariant, "x.size(-1)",
                   "positive and up to 2**30 (K)", depth);
    second.size(-1, depth, "K of x");
  }
  const Tensor out = output(kInvariant, x, weight, experts);
  if (computes && out.numel() != 0) {
    if (stored) {
      weight_only({.x = x,
                   .weight = weight,
                   .scales = scales,
                   .experts = experts,
                   .block_size = block_size,
                   .out = out,
                   .invariant = true});
    } else {
      plain_linear({.x = x, .weight = weight, .experts = experts, .out = out});
    }
  }
  return out;
}

REGISTER_OP(weight_only_linear,
            "(Tensor x, Tensor weight, Tensor? scales=None, *, Tensor? experts=None, "
            "int block_size=128, bool int8_x=False) -> Tensor")

REGISTER_OP(invariant_linear,
            "(Tensor x, Tensor weight, Tensor? scales=None, *, Tensor? experts=None, "
            "int block_size=128) -> Tensor")

TORCH_LIBRARY_IMPL(custom_pypto, Autograd, m) {
  for (const char* op : {kOp, kInvariant}) {
    m.impl(op, torch::autograd::autogradNotImplementedFallback());
  }
}

}  // namespace custom_pypto
