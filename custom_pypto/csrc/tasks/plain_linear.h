// Linear layers over weights in floats, where the bits of a row do not depend on other rows.
#pragma once

#include "tensor.h"

namespace custom_pypto {

struct PlainLinearParams {
  const Tensor& x;                // [.., K] floats
  const Tensor& weight;           // [N, K] or [E, N, K] floats, any strides
  const OptionalTensor& experts;  // [.., k] of integers, or of x's leading dims
  Tensor out;                     // [.., N] or [.., k, N], contiguous, dtype of x
};

// Sums are in float32: one chain over each kDepth values of x and the weight, whatever rows there
// are, and their sums in order.
void plain_linear(const PlainLinearParams& p);

}  // namespace custom_pypto
