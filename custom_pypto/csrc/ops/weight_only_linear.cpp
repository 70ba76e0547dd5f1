// Linear layers over weights as they are stored. docs/weight_only_linear.md
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include <string>

#include "../tasks/stored_weight.h"
#include "../tasks/weight_only.h"
#include "contract.h"

namespace custom_pypto {
namespace {

constexpr char kOp[] = "weight_only_linear";
constexpr int64_t kMostBlock = 1024;
constexpr int64_t kMostDepth = 1 << 30;  // kernels count in int

// [E] if there are experts, then `rest`
Argument shaped(const char* name, const Tensor& tensor, const Tensor& weight,
                std::initializer_list<c10::SymInt> rest, const char* shape, const char* why) {
  Argument argument(kOp, name, tensor);
  const int64_t experts = weight.dim() - 2;
  argument.rank(experts + static_cast<int64_t>(rest.size()), shape);
  if (experts) argument.size(0, weight.sym_size(0), "E of weight");
  int64_t dim = experts;
  for (const c10::SymInt& size : rest) argument.size(dim++, size, why);
  return argument;
}

void check_scales(const Tensor& weight, const Tensor& scales, const c10::SymInt& depth,
                  const c10::SymInt& block) {
  const c10::SymInt rows = weight.sym_size(-2);
  const WeightFacts& facts =
      kWeightFacts[*weight_format(weight.scalar_type(), scales.scalar_type())];
  if (facts.blocks) {
    shaped("scales", scales, weight, {(rows + block - 1) / block, (depth + block - 1) / block},
           facts.scale_shape, "blocks of weight, the last one may be shorter");
  } else if (facts.group) {
    const std::string why = "of weight: a scale for " + std::to_string(facts.group) + " values";
    shaped("scales", scales, weight, {rows, depth / facts.group}, facts.scale_shape, why.c_str());
  } else if (!facts.zeros) {
    shaped("scales", scales, weight, {rows}, facts.scale_shape, "N of weight");
  } else {
    const Argument argument(kOp, "scales", scales);
    argument.rank(weight.dim() + 1, facts.scale_shape);
    for (int64_t i = 0; i < weight.dim() - 1; ++i) {
      argument.size(i, weight.sym_size(i), "as weight");
    }
    argument.size(-1, 2, "scale and zero");
    const c10::SymInt groups = scales.sym_size(-2);
    CHECK_ARGUMENT(groups > 0 && depth % groups == 0 && depth / groups % cpu::kWeightUnit == 0, kOp,
                   "scales.size(-2)", "K / G, for a G that is a multiple of 32", groups);
  }
}

void check_weight(const Tensor& x, const Tensor& weight, const OptionalTensor& scales, bool experts,
                  int64_t block_size) {
  const Argument first(kOp, "x", x), second(kOp, "weight", weight);
  first.dtype(kFloating);
  CHECK_ARGUMENT(x.dim() >= 1, kOp, "x", "of shape [.., K]", x.sym_sizes());
  second.rank(experts ? 3 : 2, experts ? "[E, N, K] (with experts)" : "[N, K] (without experts)");
  second.device_of(x);
  const bool known = weight_format(weight.scalar_type(),
                                   scales ? std::optional(scales->scalar_type()) : std::nullopt)
                         .has_value();
  CHECK_ARGUMENT(known, kOp, "weight.dtype and scales.dtype",
                 "bfloat16 and None, int8 and float32, float8_e4m3fn and float32, uint8 (two of 4 "
                 "bits) and bfloat16 or float8_e8m0fnu",
                 dtype_name(weight.scalar_type()), " and ",
                 scales ? dtype_name(scales->scalar_type()) : "None");
  const c10::SymInt depth = x.sym_size(-1);
  CHECK_ARGUMENT(depth > 0 && depth <= kMostDepth && depth % cpu::kWeightUnit == 0, kOp,
                 "x.size(-1)", "a positive multiple of 32 up to 2**30 (K)", depth);
  const bool pairs = weight.scalar_type() == at::kByte;
  second.size(-1, pairs ? depth / 2 : depth, pairs ? "K / 2, two values per byte" : "K of x");
  CHECK_ARGUMENT(block_size > 0 && block_size <= kMostBlock && block_size % cpu::kWeightUnit == 0,
                 kOp, "block_size", "a multiple of 32 up to 1024", block_size);
  if (scales) {
    Argument(kOp, "scales", *scales).device_of(x);
    check_scales(weight, *scales, depth, block_size);
  }
  if (weight.scalar_type() == at::kBFloat16 && weight.sym_stride(-1) != 1) {
    CHECK_ARGUMENT(weight.sym_stride(-2) == 1, kOp, "weight.stride(-1) or weight.stride(-2)", "1",
                   weight.sym_stride(-1), " and ", weight.sym_stride(-2), "; call .contiguous()");
  } else {
    second.dense_rows();
  }
}

}  // namespace

template <bool computes>
Tensor weight_only_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& scales,
                          const OptionalTensor& experts, int64_t block_size) {
  check_weight(x, weight, scales, experts.has_value(), block_size);
  c10::SymDimVector shape(x.sym_sizes().begin(), x.sym_sizes().end() - 1);
  if (experts) {
    const Argument ids(kOp, "experts", *experts);
    ids.dtype(kSlots).device_of(x);
    const bool shared = experts->dim() == x.dim();
    CHECK_ARGUMENT(shared || experts->dim() + 1 == x.dim(), kOp, "experts",
                   "of shape [.., k] for x of shape [.., K] or [.., k, K]", experts->sym_sizes());
    ids.sizes(x, x.dim() - 1, "as x");
    if (shared) shape.push_back(experts->sym_size(-1));
  }
  shape.push_back(weight.sym_size(-2));
  const Tensor out = at::empty_symint(shape, x.options());
  if constexpr (computes) {
    if (out.numel() != 0) {
      weight_only({.x = x,
                   .weight = weight,
                   .scales = scales,
                   .experts = experts,
                   .block_size = block_size,
                   .out = out});
    }
  }
  return out;
}

REGISTER_OP(weight_only_linear,
            "(Tensor x, Tensor weight, Tensor? scales=None, *, Tensor? experts=None, "
            "int block_size=128) -> Tensor")

TORCH_LIBRARY_IMPL(custom_pypto, Autograd, m) {
  m.impl(kOp, torch::autograd::autogradNotImplementedFallback());
}

}  // namespace custom_pypto
