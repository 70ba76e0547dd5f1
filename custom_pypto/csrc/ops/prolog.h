// What the recipe's two ops compute before the ops that they call.
#pragma once

#include "../tasks/tensor.h"

namespace custom_pypto {

// 1 / sqrt(dims): keeps the variance of a product of that many dims
double scale_of(int64_t dims);

// The first half of sin or cos [B, S, R], which hold every angle twice, as two halves in float32
Tensor angles(const Tensor& twice);

// Rotates pairs of the first R dims of x [B, S, N, D] in place by such angles, in float32:
// neighbours, which become first and second members (MLA), or (x_i, x_{i + R/2}) (the indexer of
// DeepSeek-V3.2).
void rotate_in_place(const Tensor& x, const Tensor& sin, const Tensor& cos, bool neighbours);

// RoPE(LayerNorm(x . w)) in rows [B, S, 1, D] of x [B, S, H]; LayerNorm in float32
struct IndexKeyParams {
  const Tensor &x, &w, &gamma, &beta, &sin, &cos;
  double eps;
};
Tensor index_key(const IndexKeyParams& p);

// x . w * (N1 * D)^-0.5 in float32, for w [H, N1]
Tensor index_weights(const Tensor& x, const Tensor& w, int64_t dims);

}  // namespace custom_pypto
