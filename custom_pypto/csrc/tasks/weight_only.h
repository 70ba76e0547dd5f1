// Linear layers over weights as they are stored.
#pragma once

#include "tensor.h"

namespace custom_pypto {

struct WeightOnlyParams {
  Tensor x;              // [.., K]
  const Tensor& weight;  // [N, K] or [E, N, K] in a stored format
  const OptionalTensor& scales;
  const OptionalTensor& experts;  // [.., k] of integers, or of x's leading dims
  int64_t block_size;
  Tensor out;              // [.., N] or [.., k, N], contiguous
  bool invariant = false;  // the bits of a row do not depend on how many there are
  bool int8_x = false;     // x is rounded to int8, each row with a scale; for 4 bits 32 values
};

void weight_only(const WeightOnlyParams& p);

}  // namespace custom_pypto
