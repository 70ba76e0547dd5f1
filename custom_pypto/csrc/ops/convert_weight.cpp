// The layer op of matrices of a checkpoint in the formats of a model, for models.load.
#include "../tasks/convert_weight.h"

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include "weight_only_linear.h"

namespace custom_pypto {
namespace {

using Block = at::OptionalIntArrayRef;

constexpr char kOp[] = "convert_weight";
constexpr at::ScalarType kPlain[] = {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble};
constexpr at::ScalarType kQuantized[] = {at::kFloat8_e4m3fn, at::kChar};
constexpr at::ScalarType kScales[] = {at::kFloat, at::kBFloat16, at::kHalf, at::kFloat8_e8m0fnu};
constexpr StoredNames kOut = {.op = kOp, .weight = "out", .scales = "out_scales"};

c10::SymInt blocks_of(const c10::SymInt& size, int64_t length) {
  return size / length + (size % length != 0 ? 1 : 0);
}

void check_blocks(const Tensor& weight, const c10::SymInt& depth, const Tensor& scales,
                  at::IntArrayRef block) {
  CHECK_ARGUMENT(block.size() == 2 && block[0] > 0 && block[1] > 0, kOp, "block",
                 "two positive sizes, the rows and columns that share a scale", block);
  CHECK_ARGUMENT(weight.scalar_type() != at::kChar || block[1] % 2 == 0, kOp, "block[1]",
                 "even for weight in int8, two values per byte", block[1]);
  constexpr char kWhy[] = "blocks of weight, the last one may be shorter";
  Argument(kOp, "scales", scales)
      .dtype(kScales)
      .rank(2, "[N / block[0], K / block[1]]")
      .size(0, blocks_of(weight.sym_size(0), block[0]), kWhy)
      .size(1, blocks_of(depth, block[1]), kWhy)
      .device_of(weight);
}

void contract(const Tensor& weight, const OptionalTensor& scales, Block block, const Tensor& out,
              const OptionalTensor& out_scales) {
  Argument(kOp, "weight", weight)
      .dtype(scales ? at::ArrayRef(kQuantized) : at::ArrayRef(kPlain),
             scales ? "with scales" : "without scales")
      .rank(2, "[N, K], or [N, K / 2] of int8")
      .dense_rows();
  CHECK_ARGUMENT(scales.has_value() == block.has_value(), kOp, "block",
                 "there if scales are, else None", block ? "a block without scales" : "None");
  const c10::SymInt depth = weight.sym_size(1) * (weight.scalar_type() == at::kChar ? 2 : 1);
  if (scales) check_blocks(weight, depth, *scales, *block);
  const Argument result(kOp, "out", out);
  const bool floats =
      !out_scales && (out.scalar_type() == at::kFloat || out.scalar_type() == at::kHalf);
  const WeightFacts* stored = floats ? nullptr
                                     : &check_weight_format(kOut, out, out_scales, true,
                                                            "float32 and None, float16 and None");
  const int64_t codes = stored ? stored->codes : 1;
  result.rank(2, codes > 1 ? "[N, K / 2]" : "[N, K]")
      .size(0, weight.sym_size(0), "N of weight")
      .size(1, depth / codes, codes > 1 ? "K / 2, two values per byte" : "K of weight")
      .device_of(weight)
      .dense_rows();
  if (!out_scales) return;
  CHECK_ARGUMENT(depth % cpu::kWeightUnit == 0, kOp, "K of weight",
                 c10::str("a multiple of 32 for out in ", dtype_name(out.scalar_type())), depth);
  Argument(kOp, "out_scales", *out_scales).device_of(weight);
  check_scales(kOut, *stored, out, *out_scales, depth, 0);
  CHECK_ARGUMENT(out_scales->is_contiguous(), kOp, "out_scales", "contiguous", "strides ",
                 out_scales->sym_strides());
}

}  // namespace

template <bool computes>
void convert_weight(const Tensor& weight, const OptionalTensor& scales, Block block,
                    const Tensor& out, const OptionalTensor& out_scales) {
  contract(weight, scales, block, out, out_scales);
  if constexpr (computes) {
    if (out.numel() == 0) return;
    write_converted({.weight = weight,
                     .scales = scales,
                     .block_rows = block ? (*block)[0] : 0,
                     .block_columns = block ? (*block)[1] : 0,
                     .out = out,
                     .out_scales = out_scales});
  }
}

REGISTER_OP(convert_weight,
            "(Tensor weight, Tensor? scales, int[]? block, Tensor(a!) out, Tensor(b!)? "
            "out_scales=None) -> ()")

TORCH_LIBRARY_IMPL(custom_pypto, Autograd, m) {
  m.impl(kOp, torch::autograd::autogradNotImplementedFallback());
}

}  // namespace custom_pypto
