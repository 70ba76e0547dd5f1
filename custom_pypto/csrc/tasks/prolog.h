// Computations of the prologs, in torch's kernels.
#pragma once

#include <cmath>

#include "tensor.h"

namespace custom_pypto {

// 1 / sqrt(dims): keeps the variance of a product of that many dims
inline double scale_of(int64_t dims) { return 1.0 / std::sqrt(static_cast<double>(dims)); }

// In float32, rounded before the product with gamma.
Tensor rms_norm(const Tensor& x, const Tensor& gamma, double eps);

// MLA: pairs (x0, x1), (x2, x3), ... of [.., N, R]; the output is all first members, then all
// second ones. sin and cos [.., R] hold every angle twice.
Tensor rope_interleaved(const Tensor& x, const Tensor& sin, const Tensor& cos);

// The indexer of DeepSeek-V3.2: pairs (x_i, x_{i + R/2}) of the first R dims of [.., N, D].
Tensor rope_half_split(const Tensor& x, const Tensor& sin, const Tensor& cos);

// LayerNorm of index keys, in float32; RoPE follows.
Tensor normed_index_key(const Tensor& key, const Tensor& gamma, const Tensor& beta, double eps);

// x . w * (N1 * D)^-0.5 in float32, for w [H, N1]
Tensor index_weights(const Tensor& x, const Tensor& w, int64_t dims);

// a . b of bytes, exact on every instruction set; its sums fit in int32
Tensor int8_product(const Tensor& a, const Tensor& b);

}  // namespace custom_pypto
