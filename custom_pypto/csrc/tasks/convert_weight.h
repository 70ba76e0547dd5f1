// Matrices of a checkpoint in the formats of a model.
#pragma once

#include "tensor.h"

namespace custom_pypto {

// Last dims are contiguous.
struct ConversionParams {
  const Tensor& weight;  // [N, K] of floats or e4m3, or [N, K / 2] int8 of e2m1
  const OptionalTensor& scales;
  int64_t block_rows, block_columns;  // that share a scale
  const Tensor& out;                  // [N, K] of floats, or a stored weight
  const OptionalTensor& out_scales;   // contiguous
};

// Each value times its scale in float, rounded once.
void write_converted(const ConversionParams& p);

}  // namespace custom_pypto
