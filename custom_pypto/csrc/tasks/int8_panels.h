// Rows of x rounded to int8: as floats, and each with a scale for products with a weight of int8
// (W8A8).
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/round.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "stored_weight.h"

namespace custom_pypto {

// Parts of so many values of rows of x rounded to int8, times their scales, in float32. A part with
// NaN or infinity is NaN.
inline Tensor rounded_to_int8(const Tensor& x, int64_t values) {
  const Tensor parts = x.to(at::kFloat).unflatten(-1, {-1, values});
  const Tensor largest = parts.abs().amax(-1, /*keepdim=*/true);
  // 127 / tensor would be a product with its reciprocal
  const Tensor most = at::full_like(largest, 127.0);
  // below, the factor would leave the range of normal numbers
  const Tensor factor = (most / largest).masked_fill(largest <= 1e-30, 0.0);
  return ((parts * factor).round() * (largest / 127.0)).flatten(-2);
}

class Int8Panels {
 public:
  static constexpr int64_t kPanel = 16;

  // Whether tiles multiply such rows by the weight.
  static bool fit(const StoredWeight& weight) {
    const cpu::Bf16Kernels* tiles = kernels().tiles;
    return weight.format() == cpu::kInt8Weight && tiles && tiles->multiply_int8 &&
           weight.depth() % 64 == 0 && weight.depth() <= cpu::kMostInt8Depth;
  }

  explicit Int8Panels(const StoredWeight& weight) : weight_(weight), kernels_(kernels().tiles) {}

  void resize(int64_t panels) {
    panels_.resize(panels * quads());
    scales_.resize(panels * kPanel);
  }

  void pack(int64_t panel, const c10::BFloat16* rows, int64_t stride, int64_t count, int64_t) {
    AlignedVector<int8_t> values(kPanel * weight_.depth());
    kernels_->round_panel(&rows->x, stride, static_cast<int>(count),
                          static_cast<int>(weight_.depth()), values.data(),
                          panels_.data() + panel * quads(), scales_.data() + panel * kPanel);
  }

  struct Scratch {
    explicit Scratch(const Int8Panels& rows) : registers(rows.kernels_) {}
    TileRegisters registers;
    AlignedVector<float> scales;
    AlignedVector<int32_t> sums;
    std::vector<uint16_t*> rows;  // of the output
  };

  // scratch.rows = some rows of the weight times as many rows of x, from a panel on.
  void multiply(int64_t first, int64_t expert, int64_t first_of_weight, int64_t rows_of_weight,
                Scratch& scratch) const {
    const int64_t width = (scratch.rows.size() + kPanel - 1) / kPanel * kPanel;
    const cpu::Dots weight =
        weight_.operand(expert, first_of_weight, rows_of_weight, scratch.scales);
    scratch.sums.resize((rows_of_weight + 15) / 16 * 16 * width);
    kernels_->multiply_int8({.weight = reinterpret_cast<const int8_t*>(weight.weight),
                             .stride = weight.stride,
                             .n = weight.n,
                             .depth = weight.depth,
                             .scales = weight.scales,
                             .panels = panels_.data() + first * quads(),
                             .panel_stride = quads(),
                             .x_scales = scales_.data() + first * kPanel,
                             .m = static_cast<int>(scratch.rows.size()),
                             .width = static_cast<int>(width),
                             .sums = scratch.sums.data(),
                             .out = scratch.rows.data()});
  }

 private:
  int64_t quads() const { return weight_.depth() / 4 * kPanel; }

  const StoredWeight& weight_;
  const cpu::Bf16Kernels* kernels_;
  AlignedVector<uint32_t> panels_;
  AlignedVector<float> scales_;
};

}  // namespace custom_pypto
