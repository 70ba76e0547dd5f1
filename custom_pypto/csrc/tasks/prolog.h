// Computations of the prologs, in torch's kernels.
#pragma once

#include <ATen/ATen.h>

#include <cmath>

namespace custom_pypto {

using at::Tensor;

// 1 / sqrt(dims): keeps the variance of a product of that many dims
inline double scale_of(int64_t dims) { return 1.0 / std::sqrt(static_cast<double>(dims)); }

// Rotates the pairs (first[i], second[i]) of [.., N, R / 2]; sin and cos [.., R] hold every angle
// twice.
inline Tensor rotate(const Tensor& first, const Tensor& second, const Tensor& sin,
                     const Tensor& cos) {
  const int64_t half = sin.size(-1) / 2;
  const Tensor s = sin.narrow(-1, 0, half).to(at::kFloat).unsqueeze(-2);
  const Tensor c = cos.narrow(-1, 0, half).to(at::kFloat).unsqueeze(-2);
  const Tensor a = first.to(at::kFloat), b = second.to(at::kFloat);
  return at::cat({a * c - b * s, b * c + a * s}, -1).to(first.scalar_type());
}

// The indexer of DeepSeek-V3.2: pairs (x_i, x_{i + R/2}) of the first R dims of [.., N, D].
inline Tensor rope_half_split(const Tensor& x, const Tensor& sin, const Tensor& cos) {
  const int64_t half = sin.size(-1) / 2;
  const Tensor rotated = rotate(x.narrow(-1, 0, half), x.narrow(-1, half, half), sin, cos);
  return at::cat({rotated, x.narrow(-1, 2 * half, x.size(-1) - 2 * half)}, -1);
}

// LayerNorm of index keys, in float32; RoPE follows.
inline Tensor normed_index_key(const Tensor& key, const Tensor& gamma, const Tensor& beta,
                               double eps) {
  return at::layer_norm(key.to(at::kFloat), {key.size(-1)}, gamma.to(at::kFloat),
                        beta.to(at::kFloat), eps)
      .to(key.scalar_type());
}

// x . w * (N1 * D)^-0.5 in float32, for w [H, N1]
inline Tensor index_weights(const Tensor& x, const Tensor& w, int64_t dims) {
  return at::matmul(x.to(at::kFloat), w.to(at::kFloat)) * scale_of(w.size(1) * dims);
}

}  // namespace custom_pypto
