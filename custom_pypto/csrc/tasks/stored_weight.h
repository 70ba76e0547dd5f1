// Weights as they are stored, and where their values and scales are.
#pragma once

#include "kernel_set.h"
#include "panels.h"
#include "tensor.h"

namespace custom_pypto {

// What a format is. custom_pypto/weight_formats.py has the same; a test compares them.
struct WeightFacts {
  const char* name;
  at::ScalarType weight;
  std::optional<at::ScalarType> scales;
  int64_t codes;  // in an element of the weight
  bool blocks;    // rows and values of a square block share a scale
  int64_t group;  // values of a row with one scale; 0: the whole row, a block, or by the scales
  bool zeros;     // each scale has a zero beside it; groups are as many as the scales say
  const char* scale_shape;  // of a matrix, for messages
};

extern const WeightFacts kWeightFacts[cpu::kWeightFormats];  // of each format

// The format of a weight and its scales with these dtypes, or nothing. docs/weight_only_linear.md
std::optional<cpu::WeightFormat> weight_format(at::ScalarType weight,
                                               std::optional<at::ScalarType> scales);

// [N, K], or [E, N, K] of E experts.
class StoredWeight {
 public:
  // block: rows and values that share a scale of fp8
  StoredWeight(const Tensor& weight, const OptionalTensor& scales, int64_t block);

  int64_t experts() const { return experts_; }
  int64_t rows() const { return rows_; }
  int64_t depth() const { return depth_; }
  int64_t group() const { return group_; }  // values that share a scale
  int64_t groups() const { return groups_; }
  bool has_offsets() const { return facts().zeros; }
  cpu::WeightFormat format() const { return format_; }
  bool is_bfloat16() const { return format_ == cpu::kBfloat16Weight; }
  // whether the values of a column are contiguous, instead of those of a row; bfloat16 only
  bool transposed() const { return transposed_; }
  const cpu::WeightKernels& kernels() const { return custom_pypto::kernels().weights[format_]; }
  // by the number of rows of x
  const cpu::WeightWays& ways(at::ScalarType x) const;
  // the best way for its shape
  const cpu::DotsKernels& dots(bool x_in_bfloat16) const;
  // of rows of x that are rounded to int8; null: none
  const cpu::DotsKernels* dots_of_int8() const;
  // for packed rows of x; null: they meet the weight in bfloat16
  cpu::StoredKernel stored_kernel() const;

  // of a row, or of a column, if transposed
  int64_t row_bytes() const { return transposed_ ? 2 * depth_ : row_stride_; }

  // the first value of a row of bfloat16
  const uint16_t* bfloat16(int64_t expert, int64_t row) const {
    return reinterpret_cast<const uint16_t*>(values_ + expert * expert_stride_ + row * row_stride_);
  }
  // elements of bfloat16 between rows; between values of a row, if transposed
  int64_t row_stride() const { return row_stride_ / 2; }
  int64_t column_stride() const { return column_stride_; }

  // Some rows in bfloat16, where the kernels multiply it, `stride` apart; `scales` keeps theirs.
  void widen_bf16(int64_t expert, int64_t first, int64_t rows, int64_t stride,
                  AlignedVector<float>& scales, uint16_t* to) const;

  // What the operands of all rows share.
  cpu::Dots shape() const;

  // Of `rows` in turn, those that a call multiplies whose kernels find their scales in `operand`.
  int64_t rows_of_call(int64_t first, int64_t rows) const;

  // The operand of the kernels for some rows; `scales` keeps theirs, unless kernels read them as
  // they are stored.
  cpu::Dots operand(int64_t expert, int64_t first, int64_t rows, AlignedVector<float>& scales,
                    bool stored_scales = false) const;

 private:
  const WeightFacts& facts() const { return kWeightFacts[format_]; }
  const uint8_t* scales_from(int64_t row) const;  // of 4 bits, from a row on
  int64_t rows_of_scales(int64_t row) const;      // from a row of an expert on, that share them
  void read_scales(int64_t row, int64_t rows, float* scales) const;

  cpu::WeightFormat format_;
  const uint8_t* values_;
  int64_t experts_, rows_, depth_;
  int64_t expert_stride_, row_stride_;  // bytes
  int64_t column_stride_ = 1;
  bool transposed_ = false;
  Tensor scales_;  // contiguous
  int64_t group_, groups_, block_;
};

}  // namespace custom_pypto
