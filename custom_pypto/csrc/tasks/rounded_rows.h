// Rows of x rounded to 16 bits, and their products with a weight of few bits.
#pragma once

#include <algorithm>
#include <vector>

#include "stored_weight.h"

namespace custom_pypto {

class RoundedRows {
 public:
  explicit RoundedRows(const StoredWeight& weight) : weight_(weight) {
    for (int64_t d = 0; d < weight.depth();) {
      const int64_t group = d / weight.group();
      const int64_t end =
          std::min({d + cpu::kMostInt16Values, (group + 1) * weight.group(), weight.depth()});
      parts_.push_back({.first = d, .count = end - d, .group = group});
      d = end;
    }
  }

  void resize(int64_t rows) {
    values_.resize(rows * weight_.depth());
    scales_.resize(rows * parts_.size());
    sums_.resize(rows * parts_.size());
  }

  void round(int64_t row, const float* x) {
    int16_t* to = values_.data() + row * weight_.depth();
    for (size_t p = 0; p < parts_.size(); ++p) {
      const int64_t i = row * parts_.size() + p, first = parts_[p].first;
      weight_.kernels().round_int16(x + first, parts_[p].count, to + first, &scales_[i], &sums_[i]);
    }
  }

  struct Scratch {
    AlignedVector<float> scales, of_part, out;
    AlignedVector<int32_t> panels;
    int64_t width;  // of a row of out
  };

  // scratch.out = rows first, first + 1, ... times some rows of the weight.
  void multiply(int64_t first, int64_t count, int64_t expert, int64_t first_of_weight,
                int64_t rows_of_weight, Scratch& scratch) const {
    const cpu::Int16Kernels& kernels = *custom_pypto::kernels().int16;
    const cpu::Dots rows = weight_.operand(expert, first_of_weight, rows_of_weight, scratch.scales);
    const int64_t panels = (rows.n + kernels.panel_width - 1) / kernels.panel_width;
    const int64_t n = scratch.width = panels * kernels.panel_width;
    scratch.out.assign(count * n, 0.0f);
    scratch.panels.resize(n * cpu::kMostInt16Values / 2);
    scratch.of_part.assign(2 * n, 0.0f);
    float *scales = scratch.of_part.data(), *offsets = scales + n;
    for (size_t p = 0; p < parts_.size(); ++p) {
      const Part& part = parts_[p];
      for (int64_t w = 0; w < n; w += kernels.panel_width) {
        weight_.kernels().pack_int16(rows, w, std::min<int64_t>(rows.n - w, kernels.panel_width),
                                     part.first, part.count, kernels.panel_width,
                                     scratch.panels.data() + w * part.count / 2);
      }
      for (int64_t w = 0; w < rows.n; ++w) {
        scales[w] = rows.scales[w * rows.scale_stride + part.group];
        if (rows.has_offsets) offsets[w] = rows.offsets[w * rows.groups + part.group];
      }
      kernels.multiply({.panels = scratch.panels.data(),
                        .n_panels = static_cast<int>(panels),
                        .pairs = static_cast<int>(part.count / 2),
                        .scales = scales,
                        .offsets = rows.has_offsets ? offsets : nullptr,
                        .x = values_.data() + first * weight_.depth() + part.first,
                        .x_stride = weight_.depth(),
                        .x_scales = scales_.data() + first * parts_.size() + p,
                        .x_sums = sums_.data() + first * parts_.size() + p,
                        .x_parts = static_cast<int64_t>(parts_.size()),
                        .m = static_cast<int>(count),
                        .out = scratch.out.data(),
                        .out_stride = n});
    }
  }

 private:
  // Values that share a scale of x and one of the weight.
  struct Part {
    int64_t first, count, group;
  };

  const StoredWeight& weight_;
  std::vector<Part> parts_;  // of a row
  AlignedVector<int16_t> values_;
  AlignedVector<float> scales_, sums_;  // [row][part]
};

}  // namespace custom_pypto
