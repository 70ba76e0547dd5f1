// Rows of x in bfloat16, packed for the kernels that multiply it, and their products with a weight.
#pragma once

#include <algorithm>
#include <vector>

#include "kernel_set.h"
#include "stored_weight.h"

namespace custom_pypto {

class PackedRows {
 public:
  static constexpr int64_t kPanel = 16;  // rows of x, packed together

  explicit PackedRows(const StoredWeight& weight)
      : weight_(weight), kernels_(kernels().tiles ? kernels().tiles : kernels().bf16) {}

  void resize(int64_t panels) { panels_.resize(panels * pairs()); }

  // Up to kPanel rows, `stride` elements apart.
  void pack(int64_t panel, const c10::BFloat16* rows, int64_t stride, int64_t count) {
    kernels_->pack_panel(&rows->x, stride, static_cast<int>(count), kPanel,
                         static_cast<int>(weight_.depth()), panels_.data() + panel * pairs());
  }

  struct Scratch {
    explicit Scratch(const PackedRows& rows) : registers(rows.kernels_) {}
    TileRegisters registers;
    AlignedVector<float> scales, out;  // [row of the weight][width]
    AlignedVector<uint16_t> weight;
    int64_t width;
  };

  // scratch.out = some rows of the weight times the rows of x in `count` panels.
  void multiply(int64_t first, int64_t count, int64_t expert, int64_t first_of_weight,
                int64_t rows_of_weight, Scratch& scratch) const {
    const int64_t depth = weight_.depth();
    // kernels read and write rows up to a multiple of 16
    const int64_t padded = (rows_of_weight + 15) / 16 * 16, width = count * kPanel;
    int64_t stride = weight_.row_stride();
    const uint16_t* weight = nullptr;
    if (weight_.is_bfloat16()) weight = weight_.bfloat16(expert, first_of_weight);
    if (!weight || padded != rows_of_weight) {
      stride = depth + kApart;
      scratch.weight.resize(padded * stride);
      weight_.widen_bf16(expert, first_of_weight, rows_of_weight, stride, scratch.scales,
                         scratch.weight.data());
      weight = scratch.weight.data();
    }
    scratch.width = width;
    scratch.out.resize(padded * width);
    for (int64_t d = 0; d < depth; d += kDepth) {
      kernels_->multiply({.a = weight + d,
                          .a_stride = stride,
                          .n = static_cast<int>(rows_of_weight),
                          .b = panels_.data() + first * pairs() + d / 2 * kPanel,
                          .b_stride = pairs(),
                          .depth = static_cast<int>(std::min(kDepth, depth - d)),
                          .width = static_cast<int>(width)},
                         scratch.out.data(), width, /*first=*/d == 0);
    }
  }

 private:
  // whose values of the weight and of x stay in the level-2 cache
  static constexpr int64_t kDepth = 1152;
  // values between rows: those of a tile, 4 KiB apart, would fall in one set of a cache
  static constexpr int64_t kApart = 32;

  int64_t pairs() const { return weight_.depth() / 2 * kPanel; }

  const StoredWeight& weight_;
  const cpu::Bf16Kernels* kernels_;
  AlignedVector<uint32_t> panels_;
};

}  // namespace custom_pypto
