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

  // of a weight, that meet `count` rows of x
  static int64_t rows_of_task(int64_t count) { return count <= 64 ? 32 : 128; }

  explicit PackedRows(const StoredWeight& weight)
      : weight_(weight), kernels_(kernels().tiles ? kernels().tiles : kernels().bf16) {}

  void resize(int64_t panels) {
    panels_.resize(panels * pairs());
    if (sums_groups()) group_sums_.resize(panels * sums_of_panel());
  }

  // Up to kPanel rows, `stride` elements apart, of `all` that the weight meets.
  void pack(int64_t panel, const c10::BFloat16* rows, int64_t stride, int64_t count, int64_t all) {
    uint32_t* to = panels_.data() + panel * pairs();
    const int depth = static_cast<int>(weight_.depth()), group = static_cast<int>(weight_.group());
    kernels_->pack_panel(&rows->x, stride, static_cast<int>(count), kPanel, depth, to);
    if (sums_groups()) {
      kernels_->sum_groups(to, depth, group, group_sums_.data() + panel * sums_of_panel());
    }
    if (weight_.stored_kernel() && is_few(all)) {
      kernels_->arrange_few(weight_.format(), group, to, depth);
    }
  }

  struct Scratch {
    explicit Scratch(const PackedRows& rows) : registers(rows.kernels_) {}
    TileRegisters registers;
    AlignedVector<float> scales, out;  // [row of the weight][row of x]
    AlignedVector<uint16_t> weight;
    std::vector<uint16_t*> rows;  // of the output
  };

  // scratch.rows = some rows of the weight times as many rows of x, from a panel on.
  void multiply(int64_t first, int64_t expert, int64_t first_of_weight, int64_t rows_of_weight,
                Scratch& scratch) const {
    const int64_t panels = (scratch.rows.size() + kPanel - 1) / kPanel;
    const cpu::StoredKernel kernel = weight_.stored_kernel();
    if (!kernel) {
      widen_and_multiply(first, panels, expert, first_of_weight, rows_of_weight, scratch);
      return write(rows_of_weight, panels * kPanel, scratch);
    }
    scratch.out.resize(rows_of_weight * panels * kPanel);
    const bool stored_scales = is_few(scratch.rows.size()) && weight_.format() == cpu::kFp4Weight;
    kernel({.weight = weight_.operand(expert, first_of_weight, rows_of_weight, scratch.scales,
                                      stored_scales),
            .panels = panels_.data() + first * pairs(),
            .panel_stride = pairs(),
            .group_sums = group_sums_.data() + first * sums_of_panel(),
            .m = static_cast<int>(scratch.rows.size()),
            .width = static_cast<int>(panels * kPanel),
            .sums = scratch.out.data(),
            .out = scratch.rows.data()});
  }

 private:
  // scratch.out = the products
  void widen_and_multiply(int64_t first, int64_t count, int64_t expert, int64_t first_of_weight,
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

  // scratch.rows = scratch.out, transposed
  static void write(int64_t rows_of_weight, int64_t width, Scratch& scratch) {
    AlignedVector<float> columns(kPanel * rows_of_weight);
    const int64_t m = scratch.rows.size();
    for (int64_t i = 0; i < m; i += kPanel) {
      for (int64_t r = 0; r < rows_of_weight; ++r) {
        const float* row = scratch.out.data() + r * width + i;
        for (int64_t c = 0; c < kPanel; ++c) columns[c * rows_of_weight + r] = row[c];
      }
      for (int64_t c = 0; c < std::min(kPanel, m - i); ++c) {
        narrow(columns.data() + c * rows_of_weight, rows_of_weight,
               reinterpret_cast<c10::BFloat16*>(scratch.rows[i + c]));
      }
    }
  }

  static bool is_few(int64_t rows) { return rows <= cpu::kFewRows; }
  bool sums_groups() const { return weight_.stored_kernel() && weight_.has_offsets(); }
  int64_t sums_of_panel() const { return sums_groups() ? weight_.groups() * kPanel : 0; }

  // whose values of the weight and of x stay in the level-2 cache
  static constexpr int64_t kDepth = 1152;
  // values between rows: those of a tile, 4 KiB apart, would fall in one set of a cache
  static constexpr int64_t kApart = 32;

  int64_t pairs() const { return weight_.depth() / 2 * kPanel; }

  const StoredWeight& weight_;
  const cpu::Bf16Kernels* kernels_;
  AlignedVector<uint32_t> panels_;
  AlignedVector<float> group_sums_;  // [panel][group][row]
};

}  // namespace custom_pypto
