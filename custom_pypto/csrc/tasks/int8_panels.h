// Rows of x rounded to int8: as floats, or as panels for products of integers.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "quantize.h"
#include "run_tasks.h"
#include "stored_weight.h"
#include "torch_product.h"

namespace custom_pypto {

// Rounds values that share a scale to multiples of it; all become NaN if one is NaN or infinite.
inline void round_to_int8(float* x, int64_t n) {
  const float largest = largest_magnitude(x, n);
  const bool finite = largest <= std::numeric_limits<float>::max();
  // below, the factor would leave the range of normal numbers
  const float factor = largest > 1e-30f && finite ? 127.0f / largest : 0.0f;
  const float scale = finite ? largest / 127.0f : NAN;
  constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  // in two loops: a fused product would be rounded once
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
  for (int64_t i = 0; i < n; ++i) x[i] = (x[i] + kWhole - kWhole) * scale;
}

// Rows of x of type T, each `part` values rounded to int8, as type E.
template <typename T, typename E>
Tensor rounded_to_int8(const Tensor& x, int64_t part) {
  const Tensor from = x.contiguous();
  const Tensor to = at::empty(x.sizes(), x.options().dtype(c10::CppTypeToScalarType<E>::value));
  const int64_t depth = x.size(-1);
  const T* rows = from.const_data_ptr<T>();
  E* rounded = to.mutable_data_ptr<E>();
  run_tasks(
      x.numel() / depth, [] { return AlignedVector<float>(); },
      [&](AlignedVector<float>& values, int64_t i) {
        values.resize(depth);
        widen(rows + i * depth, depth, values.data());
        for (int64_t d = 0; d < depth; d += part) round_to_int8(values.data() + d, part);
        convert(values.data(), depth, rounded + i * depth);
      });
  return to;
}

class Int8Panels {
 public:
  static constexpr int64_t kPanel = 16;

  // of a weight, a multiple of what kernels multiply at once
  static int64_t rows_of_task(int64_t) { return 96; }

  // Whether kernels multiply such rows by the weight.
  static bool fit(const StoredWeight& weight) {
    const cpu::Int8Products* products = kernels().int8_products;
    return products && products->multiply[weight.format()] &&
           weight.depth() % products->unit == 0 && weight.depth() <= cpu::kMostInt8Depth;
  }

  explicit Int8Panels(const StoredWeight& weight)
      : weight_(weight),
        products_(*kernels().int8_products),
        part_(nibbles() ? cpu::kWeightUnit : weight.depth()),
        parts_(weight.depth() / part_) {}

  void resize(int64_t panels) {
    panels_.resize(panels * quads());
    scales_.resize(panels * parts_ * kPanel);
    sums_.resize(panels * parts_ * kPanel);
  }

  // Up to kPanel rows, `stride` elements apart, of `all` that the weight meets.
  void pack(int64_t panel, const c10::BFloat16* rows, int64_t stride, int64_t count, int64_t all) {
    AlignedVector<int8_t> values(kPanel * weight_.depth());
    const int64_t first = panel * parts_ * kPanel;
    products_.round_panel({.x = &rows->x,
                           .stride = stride,
                           .count = static_cast<int>(count),
                           .depth = static_cast<int>(weight_.depth()),
                           .part = static_cast<int>(part_),
                           .quads = quads_of(all),
                           .nibbles = nibbles()},
                          values.data(), panels_.data() + panel * quads(), scales_.data() + first,
                          sums_.data() + first);
  }

  struct Scratch {
    explicit Scratch(const Int8Panels&) : registers(kernels().tiles) {}
    TileRegisters registers;
    AlignedVector<float> scales;
    AlignedVector<int32_t> sums;
    std::vector<uint16_t*> rows;  // of the output
  };

  // scratch.rows = some rows of the weight times as many rows of x, from a panel on.
  void multiply(int64_t first, int64_t expert, int64_t first_of_weight, int64_t rows_of_weight,
                Scratch& scratch) const {
    const int64_t width = (scratch.rows.size() + kPanel - 1) / kPanel * kPanel;
    const int64_t padded = (rows_of_weight + cpu::kRowsOfSums - 1) / cpu::kRowsOfSums;
    scratch.sums.resize(padded * cpu::kRowsOfSums * width);
    products_.multiply[weight_.format()](
        {.weight = weight_.operand(expert, first_of_weight, rows_of_weight, scratch.scales),
         .panels = panels_.data() + first * quads(),
         .panel_stride = quads(),
         .quads = quads_of(scratch.rows.size()),
         .parts = static_cast<int>(parts_),
         .x_scales = scales_.data() + first * parts_ * kPanel,
         .x_sums = sums_.data() + first * parts_ * kPanel,
         .m = static_cast<int>(scratch.rows.size()),
         .width = static_cast<int>(width),
         .sums = scratch.sums.data(),
         .out = scratch.rows.data()});
  }

 private:
  bool nibbles() const { return weight_.format() != cpu::kInt8Weight; }
  // of a row of x in a vector: fewer rows have more
  int quads_of(int64_t rows) const {
    if (nibbles()) return 1;
    return std::min(products_.most_quads, rows <= 4 ? 4 : rows <= 8 ? 2 : 1);
  }
  int64_t quads() const { return weight_.depth() / 4 * kPanel; }

  const StoredWeight& weight_;
  const cpu::Int8Products& products_;
  int64_t part_, parts_;  // values of a row that share a scale, and how many such parts
  AlignedVector<uint32_t> panels_;
  AlignedVector<float> scales_;  // [panel][part][row]
  AlignedVector<int32_t> sums_;  // of values, the same
};

}  // namespace custom_pypto
